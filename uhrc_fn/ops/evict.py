"""Evict: free what was used longest ago, children before their parents.

Stamps are one total order in which a child is always older than its parent, so the
victims of a phase are simply its lowest stamps: found by selection, not by walking.
A selection over all nodes prepares `victim_plan`, the next victims in order with
their stamps. Stamps only grow, so an entry stays valid as long as its node still
carries that stamp and no lock: the plan is a cache of a selection and gives the
victims that a fresh selection would. `PLAN_LIMIT` is the stamp up to which it is
complete; an unlock that frees an older node lowers it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..config import CacheConfig, ComponentType
from ..params import EvictParams, EvictResult
from ..state import (
    PLAN_NODE,
    PLAN_STAMP,
    CacheState,
    Counter,
    Owner,
    Ring,
    bump,
    flag,
    owner_offset,
)
from ..status import Status
from ..tree_arrays import (
    DEPTH,
    DROP,
    IN_BOUNDS,
    NULL,
    NUM_CHILDREN,
    PARENT,
    ROOT,
    TABLE_SLOT,
    fence,
    free_entries,
    place_of,
    put_many,
    row_of,
    settle,
    take,
)


def evict(
    cache: CacheState, params: EvictParams, *, max_victims: int | None = None
) -> tuple[CacheState, EvictResult]:
    """Free at least what `params` asks for, as far as it is not locked.

    Args:
      cache: the state.
      params: tokens (rounded up to pages) and slots wanted.
      max_victims: static bound on the victims of a component; fewer writes. None
        means no bound. Up to `CacheConfig.victim_plan_size` victims leave in the
        order of their stamps; a larger bound frees the same pages in node order.

    Returns:
      ``(cache, result)``; a shortfall is reported, not asserted.

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
    tokens = jnp.asarray(params.num_tokens, jnp.int32)
    need = -(-jnp.maximum(tokens, 0) // config.page_size)
    cache, count = evict_full(cache, jnp.minimum(need, bound), bound)
    wanted = (params.num_tokens, params.swa_num_tokens, params.recurrent_num)
    negative = jnp.stack([jnp.asarray(w, jnp.int32) < 0 for w in wanted])
    counters = bump(cache.counters, status=flag(negative, Status.BAD_LENGTH))
    none = jnp.zeros_like(count)
    scalars = jnp.stack([count * config.page_size, none, none])
    return dataclasses.replace(cache, counters=counters), EvictResult(scalars)


def evict_full(cache: CacheState, need, bound: int):
    """Free `need` pages, at most the static `bound`, or what is evictable.

    Returns:
      ``(cache, pages freed)``.
    """
    need = jnp.minimum(need, cache.evictable[ComponentType.FULL])
    if bound <= cache.config.plan_size:
        return _remove(*_take_planned(cache, need, bound))
    return _remove_many(cache, need)


def _evictable(fields, config: CacheConfig):
    """Stamps of the unlocked pages; the largest int32 for everything else."""
    full = component_rules(config)[0]
    stamp, lock = row_of(fields, full.stamp_field), row_of(fields, full.lock_field)
    candidate = (lock == 0) & (row_of(fields, full.value_field) != NULL)
    return jnp.where(candidate, stamp, jnp.iinfo(jnp.int32).max)


def _select_lowest(stamps, count: int):
    """The `count` lowest stamps with their places, in order.

    XLA selects in full only floats on CPU; positive floats order as their bits do.
    The offset keeps small stamps clear of denormals, which may be flushed to zero.
    """
    offset = jnp.int32(1 << 23)
    top = jnp.iinfo(jnp.int32).max - (1 << 24)
    bits = jnp.minimum(stamps, top) + offset
    score = -jax.lax.bitcast_convert_type(bits, jnp.float32)
    _, place = jax.lax.top_k(score, count)
    return stamps.at[place].get(**IN_BOUNDS), place.astype(jnp.int32)


class _Victims(NamedTuple):
    """Nodes to remove, in order, with what their removal must know; `NULL` between."""

    node: jax.Array  # [lanes]
    table_slot: jax.Array
    parent: jax.Array
    page: jax.Array


def _victims(fields, config: CacheConfig, node) -> _Victims:
    """Read what the removal of `node` must know."""
    full = component_rules(config)[0]
    names = (TABLE_SLOT, PARENT, full.value_field)
    safe = jnp.maximum(node, ROOT)
    reads = [jnp.where(node == NULL, NULL, take(fields, n, safe)) for n in names]
    return _Victims(node, *reads)


def _take_planned(cache: CacheState, need, bound: int):
    """The next `need` victims from the plan, made anew where it runs out.

    Where nothing is needed, next to nothing is done: all that depends on victims is
    read under the condition.

    Returns:
      ``(cache, victims)``, of `bound` lanes at most.
    """
    config = cache.config
    full = component_rules(config)[0]
    size = config.plan_size
    window = min(size, bound)
    fields = cache.tree.fields
    lane = jnp.arange(window, dtype=jnp.int32)

    def look(plan, head, limit):
        """The next window of the plan: where it starts, its nodes, which are due."""
        start = jnp.minimum(head, size - window)
        entries = jax.lax.dynamic_slice(plan, (0, start), (2, window))
        node, stamp = entries[PLAN_NODE], entries[PLAN_STAMP]
        safe = jnp.maximum(node, ROOT)
        same = take(fields, full.stamp_field, safe) == stamp
        free = take(fields, full.lock_field, safe) == 0
        is_next = (start + lane >= head) & (node != NULL) & (stamp <= limit)
        return start, node, is_next & same & free

    def choose(plan, head, limit, start, node, valid):
        rank = jnp.cumsum(valid, dtype=jnp.int32)
        victim = valid & (rank <= need)
        # What is skipped on the way is restamped, or locked: an unlock of such a node
        # lowers the limit, so it cannot be missed.
        ends = jnp.where(victim, start + lane + 1, 0)
        head = jnp.maximum(head, jnp.max(ends))
        victims = _victims(fields, config, jnp.where(victim, node, NULL))
        return plan, head, limit, victims

    def refill():
        stamps, nodes = _select_lowest(_evictable(fields, config), size)
        is_real = stamps < jnp.iinfo(jnp.int32).max
        stamps = jnp.where(is_real, stamps, NULL)
        # Where fewer remain than fit, everything unlocked up to now is in the plan.
        now = cache.counters[Counter.CLOCK] - 1
        limit = jnp.where(is_real[-1], stamps[-1], now)
        plan = jnp.stack([jnp.where(is_real, nodes, NULL), stamps])
        start = jnp.zeros_like(head)
        return choose(plan, start, limit, *look(plan, start, limit))

    def nobody():
        none = jnp.full_like(seen[1], NULL)
        return plan, head, limit, _Victims(none, none, none, none)

    plan = cache.victim_plan
    head, limit = cache.counters[Counter.PLAN_HEAD], cache.counters[Counter.PLAN_LIMIT]
    seen = look(plan, head, limit)
    enough = jnp.sum(seen[2], dtype=jnp.int32) >= need
    which = jnp.where(need <= 0, 0, jnp.where(enough, 1, 2))
    branches = (nobody, lambda: choose(plan, head, limit, *seen), refill)
    chosen = jax.lax.switch(which, branches)
    chosen, fields, counters = fence(chosen, fields, cache.counters)
    plan, head, limit, victims = chosen
    counters = bump(
        counters,
        plan_head=head - counters[Counter.PLAN_HEAD],
        plan_limit=limit - counters[Counter.PLAN_LIMIT],
    )
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, victim_plan=plan, counters=counters)
    return cache, victims


def _remove(cache: CacheState, victims: _Victims):
    """Remove victims, node and all.

    Returns:
      ``(cache, pages freed)``.
    """
    config, tree = cache.config, cache.tree
    nodes, slot, parent, page = victims
    full = component_rules(config)[0]
    table = free_entries(tree.table, slot)
    fields = tree.fields.at[place_of(tree.fields, NUM_CHILDREN, parent)].add(-1, **DROP)
    names = [PARENT, DEPTH, TABLE_SLOT, full.value_field, full.stamp_field]
    # Children of a victim are victims too, so its own count is zero as it should be.
    fields = put_many(fields, names, nodes, [NULL] * len(names))
    is_victim = nodes != NULL
    place = owner_offset(config, full.type) + page
    place = jnp.where(is_victim, place, cache.owner.shape[0])
    owner = cache.owner.at[place].set(int(Owner.FREE), **DROP)
    rank = jnp.cumsum(is_victim, dtype=jnp.int32) - 1
    count = jnp.sum(is_victim, dtype=jnp.int32)
    back = [
        free_lists.back(cache.counters, config, ring, rank)
        for ring in (Ring.FULL, Ring.NODES)
    ]
    back = jnp.where(is_victim[None], jnp.stack(back), cache.free_ids.shape[0])
    free_ids = cache.free_ids.at[back].set(jnp.stack([page, nodes]), **DROP)
    counters = bump(
        cache.counters,
        evictable__0=-count,
        **free_lists.given(Ring.FULL, count),
        **free_lists.given(Ring.NODES, count),
    )
    tree = dataclasses.replace(tree, table=table, fields=fields)
    cache = dataclasses.replace(
        cache, tree=tree, owner=owner, free_ids=free_ids, counters=counters
    )
    return settle(cache, count)


def _remove_many(cache: CacheState, need):
    """Remove the `need` oldest unlocked pages at a cost that knows no bound."""
    data = cache.tree.fields
    stamps = _evictable(data, cache.config)
    threshold = _kth_lowest(stamps, need)
    victim = (stamps <= threshold) & (need > 0)
    nodes = jnp.where(victim, jnp.arange(victim.shape[0], dtype=jnp.int32), NULL)
    victims, data = fence(_victims(data, cache.config, nodes), data)
    tree = dataclasses.replace(cache.tree, fields=data)
    return _remove(dataclasses.replace(cache, tree=tree), victims)


def _kth_lowest(stamps, k):
    """The k-th lowest of non-negative int32 stamps, by one pass for each bit."""
    stamps = jax.lax.optimization_barrier(stamps)  # else every pass computes it anew
    answer = jnp.int32(0)
    for bit in range(30, -1, -1):
        trial = answer | (1 << bit)
        below = jnp.sum(stamps < trial, dtype=jnp.int32)
        answer = jnp.where(below < k, trial, answer)
    return answer
