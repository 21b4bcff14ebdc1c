"""The engine's side: host-facing objects around the functional cache."""
