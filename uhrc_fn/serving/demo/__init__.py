"""`python -m uhrc_fn.serving`: conversations served with and without the cache."""
