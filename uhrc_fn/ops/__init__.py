"""The operations: pure functions over a `CacheState`, one verb a file."""
