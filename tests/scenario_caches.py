"""Prompts, caches and requests of the scenarios: few shapes, so that few compile."""

import numpy as np
from request_harness import Request, RequestHarness
from request_machine import config_of

from uhrc_fn import CacheConfig, ComponentType

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


def a(start: int, stop: int) -> list[int]:
    """Tokens of one family."""
    return list(range(1000 + start, 1000 + stop))


def b(start: int, stop: int) -> list[int]:
    """Tokens of another."""
    return list(range(2000 + start, 2000 + stop))


def requests_of(component: ComponentType, page_size: int) -> RequestHarness:
    """Request tables over a cache of FULL and `component`, of 14 pages."""
    return RequestHarness(config_of(component, page_size))


def started(h: RequestHarness, tokens, written: int) -> Request:
    """A request that has written so many tokens of its prompt, chunk by chunk."""
    request = h.admit(tokens, len(tokens))
    assert request is not None
    while request.written < written:
        count = min(h.chunk(request, 1 << 10), written - request.written)
        assert h.extend(request, count)
    return request


def hit(h: RequestHarness, tokens) -> int:
    """Tokens that a new request would resume from."""
    return int(np.asarray(h.match(tokens).hit_length))
