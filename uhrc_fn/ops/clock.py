"""Renumber recency stamps, order kept, so that the clock never runs out."""

import dataclasses

import jax.numpy as jnp

from ..components import component_rules
from ..state import CacheState, Counter
from ..status import Status


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
    data = tree.component_data
    nodes = data.shape[1]
    for r in component_rules(cache.config):
        stamp = data[r.stamp_row]
        order = jnp.argsort(stamp, stable=True)
        rank = (
            jnp.zeros((nodes,), jnp.int32)
            .at[order]
            .set(jnp.arange(nodes, dtype=jnp.int32), unique_indices=True)
        )
        data = data.at[r.stamp_row].set(jnp.where(stamp < 0, stamp, rank))
    counters = cache.counters.at[int(Counter.CLOCK)].set(nodes)
    counters = counters.at[int(Counter.PLAN_LIMIT)].set(-1)
    status = counters[Counter.STATUS] & ~int(Status.CLOCK_HIGH)
    counters = counters.at[int(Counter.STATUS)].set(status)
    tree = dataclasses.replace(tree, component_data=data)
    return dataclasses.replace(cache, tree=tree, counters=counters)
