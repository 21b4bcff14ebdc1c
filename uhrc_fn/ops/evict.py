"""Evict: free what was used longest ago, children before their parents.

Stamps are one total order in which a child is always older than its parent, so the
victims of a phase are simply its lowest stamps: found by selection, not by walking.
The phases are RECURRENT, SWA, FULL; only FULL removes nodes.
"""

import dataclasses

import jax.numpy as jnp

from ..components import component_rules
from ..components.base import Component
from ..config import ComponentType
from ..params import EvictParams, EvictResult
from ..state import CacheState, bump, flag
from ..status import Status
from .remove import remove, remove_many, remove_values
from .victims import choose_lowest, take_planned


def evict(
    cache: CacheState, params: EvictParams, *, max_victims: int | None = None
) -> tuple[CacheState, EvictResult]:
    """Free at least what `params` asks for, as far as it is not locked.

    Args:
      cache: the state.
      params: tokens (rounded up to pages) and slots wanted, each by its own phase.
      max_victims: static bound on the victims of a component; fewer writes. None
        means no bound. Up to `CacheConfig.victim_plan_size` victims leave in the
        order of their stamps; a larger bound frees the same pages in node order.

    Returns:
      ``(cache, result)`` with all that was freed, also what went with a FULL page; a
      shortfall is reported, not asserted.

    Status:
      BAD_LENGTH: a negative amount counted as 0.

    Ownership:
      victims are free.
    """
    config = cache.config
    bound = config.num_nodes if max_victims is None else max_victims
    if not 1 <= bound <= config.num_nodes:
        raise ValueError(
            f"max_victims={max_victims}; wanted 1 to num_nodes={config.num_nodes}. "
            "Leave it unset for no bound."
        )
    wanted = (params.num_tokens, params.swa_num_tokens, params.recurrent_num)
    wanted = [jnp.asarray(w, jnp.int32) for w in wanted]
    freed = [jnp.zeros((), jnp.int32) for _ in ComponentType]
    rules = component_rules(config)
    for r in sorted(rules, key=lambda r: r.eviction_priority):
        need = -(-jnp.maximum(wanted[r.type], 0) // r.entry_size)
        need = jnp.minimum(jnp.maximum(need - freed[r.type], 0), bound)
        if r.removes_node:
            cache, counts = evict_full(cache, need, bound)
            for other, count in zip(rules, counts, strict=True):
                freed[other.type] += count
        else:
            cache, count = evict_values(cache, r, need, bound)
            freed[r.type] += count
    status = flag(jnp.stack(wanted) < 0, Status.BAD_LENGTH)
    counters = bump(cache.counters, status=status)
    size = config.page_size
    full, swa, slots = freed
    scalars = jnp.stack([full * size, swa * size, slots])
    return dataclasses.replace(cache, counters=counters), EvictResult(scalars)


def evict_full(cache: CacheState, need, bound: int, *, are_given: bool = False):
    """Remove `need` pages, at most the static `bound`, or what is evictable.

    Args:
      cache: the state.
      need: int32 [].
      bound: static.
      are_given: the caller gives all that was evicted to a request at once and says
        so in `owner` itself (static).

    Returns:
      ``(cache, freed)``: entries freed, one int32 [] a component of the cache.
    """
    need = jnp.minimum(need, cache.evictable[ComponentType.FULL])
    if bound <= cache.config.plan_size:
        cache, victims = take_planned(cache, need, bound)
        return remove(cache, victims, are_given)
    return remove_many(cache, need, are_given)


def evict_values(cache: CacheState, rules: Component, need, bound: int):
    """Free `need` values of a component that removes no nodes, or what is evictable.

    Returns:
      ``(cache, values freed)``.
    """
    config = cache.config
    bound = min(bound, config.capacities[rules.type], config.num_nodes)
    need = jnp.minimum(jnp.minimum(need, cache.evictable[rules.type]), bound)
    is_ordered = bound <= config.plan_size
    node = choose_lowest(cache.tree.fields, rules, need, bound, is_ordered)
    return remove_values(cache, rules, node)
