"""Small hybrid models in plain JAX on the pools."""
