"""Pools: the big buffers that travel beside the cache, and the tables of requests.

Free lists live in `CacheState`, nowhere else: what is here holds bits, and rows that
say which page or slot is whose. All are pytrees and all their methods are pure.
"""
