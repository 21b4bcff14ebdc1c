"""Serving: hybrid models whose prefix cache lives inside the jitted step."""
