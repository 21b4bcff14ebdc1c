"""How every replayed request begins, whatever the components: match, lock, allocate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..config import ComponentType
from ..ops.allocate import alloc_pages, page_table
from ..ops.lock import inc_lock_ref
from ..ops.match import match_prefix
from ..params import (
    HostArray,
    IncLockRefResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from ..state import CacheState


class Requests(NamedTuple):
    """A chunk of requests, one row each."""

    start: HostArray  # first key token
    num_pages: HostArray
    namespace: HostArray  # [requests, 4]
    full_blocks: HostArray  # pages up to the last one that is a full block


class Begun(NamedTuple):
    """A request that holds its prefix and pages for the rest."""

    key: RadixKey
    match: MatchResult
    receipt: IncLockRefResult
    pages: jax.Array  # [width] what it hit, then what it got, then 0
    hit: jax.Array  # pages
    held: jax.Array  # pages, less than the key has where the pool is exhausted
    evicted: jax.Array  # pages


def begin(cache: CacheState, request: Requests, tokens, width: int):
    """Begin one request of at most `width` pages.

    Returns:
      ``(cache, begun)``.
    """
    size = cache.config.page_size
    key = RadixKey(
        token_ids=jax.lax.dynamic_slice(tokens, (request.start,), (width * size,)),
        length=request.num_pages * size,
        namespace=request.namespace,
        is_truncated=jnp.zeros((), bool),
    )
    cache, match = match_prefix(cache, MatchPrefixParams(key=key))
    cache, receipt = inc_lock_ref(cache, match)
    hit = match.hit_length // size
    num_free = cache.num_free[ComponentType.FULL]
    # A request that outgrows the whole pool asks for all of it.
    most = min(width, cache.config.num_pages)
    wanted = jnp.minimum(request.num_pages - hit, most)
    cache, alloc = alloc_pages(cache, wanted, max_new=most, partial=True)
    begun = Begun(
        key=key,
        match=match,
        receipt=receipt,
        pages=page_table(match, alloc),
        hit=hit,
        held=hit + alloc.count,
        evicted=jnp.maximum(alloc.count - num_free, 0),
    )
    return cache, begun
