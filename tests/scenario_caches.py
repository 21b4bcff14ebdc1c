"""Prompts and caches of the scenarios: few shapes, so that few compile."""

from uhrc_fn import CacheConfig

WINDOW = CacheConfig(
    components=("FULL", "SWA"),
    page_size=1,
    num_pages=24,
    num_swa_pages=24,
    sliding_window_size=4,
    max_prefix_pages=16,
)
"""FULL and SWA of 24 tokens each, a window of 4, one token a page."""

SNAPSHOTS = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=1,
    num_pages=64,
    num_recurrent_slots=8,
    max_prefix_pages=16,
)
"""FULL and RECURRENT, one token a page: a snapshot may stand anywhere."""

WINDOWED = CacheConfig(
    components=("FULL", "SWA"),
    page_size=1,
    num_pages=128,
    num_swa_pages=128,
    sliding_window_size=4,
    max_prefix_pages=32,
)
"""`WINDOW` with room for longer prompts and more of them."""

FOUR_SLOTS = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=1,
    num_pages=64,
    num_recurrent_slots=4,
    max_prefix_pages=32,
)
"""`SNAPSHOTS` with longer prompts and too few slots for many of them."""


def a(start: int, stop: int) -> list[int]:
    """Tokens of one family."""
    return list(range(1000 + start, 1000 + stop))


def b(start: int, stop: int) -> list[int]:
    """Tokens of another."""
    return list(range(2000 + start, 2000 + stop))


def c(start: int, stop: int) -> list[int]:
    """Tokens of a third."""
    return list(range(3000 + start, 3000 + stop))
