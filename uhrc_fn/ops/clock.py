"""Renumber recency stamps, order kept, so that the clock never runs out."""

import dataclasses

import jax
import jax.numpy as jnp

from ..components import component_rules
from ..components.base import LOW_STAMP
from ..state import CacheState, Counter
from ..status import Status
from ..tree_arrays import NULL, fence, num_rows, row_of, settle


def compact_clock(cache: CacheState) -> CacheState:
    """Renumber all stamps as 0, 1, ... in their order and wind the clock back.

    Call it between steps once `Status.CLOCK_HIGH` is up, which it clears. It sorts
    all nodes, so it is no part of a step.

    Args:
      cache: the state.

    Returns:
      The cache; every order of eviction is what it was.
    """
    tree = cache.tree
    fields = tree.fields
    nodes = num_rows(fields)
    for r in component_rules(cache.config):
        stamp = row_of(fields, r.stamp_field)
        order = jnp.argsort(stamp, stable=True)
        rank = (
            jnp.zeros((nodes,), jnp.int32)
            .at[order]
            .set(jnp.arange(nodes, dtype=jnp.int32), unique_indices=True)
        )
        # `NULL` stays; what is low stays low.
        settled = jnp.where(stamp < NULL, rank - LOW_STAMP, rank)
        stamp, fields = fence(jnp.where(stamp == NULL, NULL, settled), fields)
        start = r.stamp_field * nodes
        fields = jax.lax.dynamic_update_slice(fields, stamp, (start,))
    counters = cache.counters.at[int(Counter.CLOCK)].set(nodes)
    counters = counters.at[int(Counter.PLAN_LIMIT)].set(-1)
    status = counters[Counter.STATUS] & ~int(Status.CLOCK_HIGH)
    counters = counters.at[int(Counter.STATUS)].set(status)
    tree = dataclasses.replace(tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, counters=counters)
    return settle(cache, ())[0]
