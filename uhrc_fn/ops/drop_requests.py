"""Forget all requests at once: what they held is free, what they published stays."""

import dataclasses

import jax.numpy as jnp

from .. import free_lists
from ..config import NUM_COMPONENTS
from ..state import (
    SERIAL,
    CacheState,
    Counter,
    Owner,
    Ring,
    bump,
    owner_offset,
    ring_capacity,
)
from ..tree_arrays import LAST_ACCESS, LOCK_REF, NULL, settle


def drop_requests(cache: CacheState) -> CacheState:
    """Give back every lock, page and slot that requests hold, whoever they are.

    For a cache whose requests are gone for good, as after a restart: with `load` it
    makes a warm tree without a leak. Their receipts become stale.

    Args:
      cache: the state; of a stack of them, `vmap` it.

    Returns:
      The cache: all of its pages and slots are the tree's, evictable, or free.
    """
    config, counters = cache.config, cache.counters
    is_dropped = cache.owner == int(Owner.REQUEST)
    held = {}
    for ring in list(Ring)[:NUM_COMPONENTS]:
        start = owner_offset(config, ring) + 1
        held[ring] = is_dropped[start : start + ring_capacity(config, ring)]
    held[Ring.LEDGER] = cache.ledger[SERIAL] != 0
    free_ids = cache.free_ids
    for ring, is_given in held.items():
        # Ledger rows count from 0; of other ids, 0 is the dummy.
        first = 0 if ring == Ring.LEDGER else 1
        ids = jnp.arange(first, first + is_given.shape[0], dtype=jnp.int32)
        free_ids, count = free_lists.push(
            free_ids, counters, config, ring, ids, is_given
        )
        counters = bump(counters, **free_lists.given(ring, count))
    counters = bump(counters, evictable=cache.protected, protected=-cache.protected)
    # What was locked may be older than all that is planned: select anew.
    counters = counters.at[int(Counter.PLAN_LIMIT)].set(NULL)
    fields = cache.tree.by_field.at[LOCK_REF:LAST_ACCESS].set(0).reshape(-1)
    cache = dataclasses.replace(
        cache,
        tree=dataclasses.replace(cache.tree, fields=fields),
        free_ids=free_ids,
        owner=jnp.where(is_dropped, int(Owner.FREE), cache.owner),
        ledger=cache.ledger.at[SERIAL].set(0),
        counters=counters,
    )
    return settle(cache, ())[0]
