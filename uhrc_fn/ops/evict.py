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

import jax
import jax.numpy as jnp
import numpy as np

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
    num_rows,
    place_of,
    row_of,
    settle,
    take,
)
from .path import page_index
from .reduce import running_count
from .select import kth_lowest, lowest


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


def evict_full(cache: CacheState, need, bound: int, *, are_given: bool = False):
    """Free `need` pages, at most the static `bound`, or what is evictable.

    Args:
      cache: the state.
      need: int32 [].
      bound: static.
      are_given: the caller gives all that was evicted to a request at once and says
        so in `owner` itself (static).

    Returns:
      ``(cache, pages freed)``.
    """
    need = jnp.minimum(need, cache.evictable[ComponentType.FULL])
    if bound <= cache.config.plan_size:
        cache, victims = _take_planned(cache, need, bound)
        return _remove(cache, victims, need, are_given)
    return _remove_many(cache, need, are_given)


def _evictable(fields, config: CacheConfig):
    """Stamps of the unlocked pages; the largest int32 for everything else."""
    full = component_rules(config)[0]
    stamp, lock = row_of(fields, full.stamp_field), row_of(fields, full.lock_field)
    candidate = (lock == 0) & (row_of(fields, full.value_field) != NULL)
    return jnp.where(candidate, stamp, jnp.iinfo(jnp.int32).max)


# Rows of an array of victims [6, lanes]: the nodes to remove, in order, and what they
# hold, `NULL` between them.
_NODE, _PARENT, _DEPTH, _TABLE_SLOT, _PAGE, _STAMP = range(6)


def _victim_fields(config: CacheConfig):
    """The field that each row of an array of victims holds, [6, 1]; none for nodes."""
    full = component_rules(config)[0]
    names = (NULL, PARENT, DEPTH, TABLE_SLOT, full.value_field, full.stamp_field)
    return np.array(names, np.int32)[:, None]


def _victims(fields, config: CacheConfig, node):
    """Read what the removal of `node` must know."""
    # Rows are told apart by arithmetic: XLA for CPU builds a stack word by word.
    names = _victim_fields(config)
    row = np.arange(len(names), dtype=np.int32)[:, None]
    node = node[None]
    place = np.maximum(names, 0) * num_rows(fields) + jnp.maximum(node, ROOT)
    read = fields.at[place].get(**IN_BOUNDS)
    return jnp.where(node == NULL, NULL, jnp.where(row == _NODE, node, read))


def _take_planned(cache: CacheState, need, bound: int):
    """The next `need` victims from the plan, made anew where it runs out.

    Where nothing is needed, next to nothing is done: all that depends on victims is
    read under the condition.

    Returns:
      ``(cache, victims)``, of `bound` lanes at most, the first `need` of them real.
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
        rank = jnp.cumsum(valid, dtype=jnp.int32) - 1
        victim = valid & (rank < need)
        # What is skipped on the way is restamped, or locked: an unlock of such a node
        # lowers the limit, so it cannot be missed.
        ends = jnp.where(victim, start + lane + 1, 0)
        head = jnp.maximum(head, jnp.max(ends))
        place = jnp.where(victim, rank, window)
        node = jnp.full_like(node, NULL).at[place].set(node, **DROP)
        return plan, head, limit, _victims(fields, config, node)

    def refill():
        stamps, nodes = lowest(_evictable(fields, config), size)
        is_real = stamps < jnp.iinfo(jnp.int32).max
        stamps = jnp.where(is_real, stamps, NULL)
        # Where fewer remain than fit, everything unlocked up to now is in the plan.
        now = cache.counters[Counter.CLOCK] - 1
        limit = jnp.where(is_real[-1], stamps[-1], now)
        plan = jnp.stack([jnp.where(is_real, nodes, NULL), stamps])
        start = jnp.zeros_like(head)
        return choose(plan, start, limit, *look(plan, start, limit))

    def nobody():
        return plan, head, limit, jnp.full((6, window), NULL, jnp.int32)

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


def _remove(cache: CacheState, victims, count, are_given: bool):
    """Remove victims, node and all.

    Args:
      cache: the state.
      victims: int32 [6, lanes], the first `count` lanes are real.
      count: int32 [].
      are_given: see `evict_full`.

    Returns:
      ``(cache, count)``.
    """
    config, tree = cache.config, cache.tree
    node, page = victims[_NODE:_PARENT], victims[_PAGE:_STAMP]
    is_victim = node != NULL
    table = free_entries(tree.table, victims[_TABLE_SLOT])
    # One scatter clears the fields and counts children down, so all of it is added.
    # Children of a victim are victims too, so its own count falls to zero.
    nodes, row = num_rows(tree.fields), np.arange(6, dtype=np.int32)[:, None]
    parent_place = NUM_CHILDREN * nodes + victims[_PARENT:_DEPTH]
    place = _victim_fields(config) * nodes + node
    place = jnp.where(row == _NODE, parent_place, place)
    place = jnp.where(is_victim, place, NULL)
    change = jnp.where(row == _NODE, -1, NULL - victims)
    fields = tree.fields.at[place].add(change, **DROP)
    rank = page_index(node.shape[1])
    is_page = np.arange(2, dtype=np.int32)[:, None] == 0
    place = jnp.where(
        is_page,
        free_lists.back(cache.counters, config, Ring.FULL, rank),
        free_lists.back(cache.counters, config, Ring.NODES, rank),
    )
    place = jnp.where(is_victim, place, NULL)
    free_ids = cache.free_ids.at[place].set(jnp.where(is_page, page, node), **DROP)
    tree = dataclasses.replace(tree, table=table, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, free_ids=free_ids)
    return _account(cache, page[0], count, are_given)


def _remove_many(cache: CacheState, need, are_given: bool):
    """Remove the `need` oldest unlocked pages at a cost that knows no bound.

    Returns:
      ``(cache, need)``.
    """
    config, counters = cache.config, cache.counters
    full = component_rules(config)[0]
    fields = cache.tree.fields
    stamps = _evictable(fields, config)
    victim = (stamps <= kth_lowest(stamps, need)) & (need > 0)
    node = jnp.where(victim, jnp.arange(victim.shape[0], dtype=jnp.int32), NULL)
    names = (PARENT, TABLE_SLOT, full.value_field, DEPTH, full.stamp_field)
    held = [jnp.where(victim, row_of(fields, name), NULL) for name in names[:3]]
    (held, node), fields = fence((held, node), fields)
    parent, slot, page = held
    place = place_of(fields, NUM_CHILDREN, parent)
    fields = fields.at[place].add(-1, **DROP)
    # Field by field: one scatter of them all would work out each word's field anew.
    for name in names:
        fields = fields.at[place_of(fields, name, node)].set(NULL, **DROP)
    free_ids, rank = cache.free_ids, running_count(node != NULL) - 1
    for ring, ids in ((Ring.FULL, page), (Ring.NODES, node)):
        place = free_lists.back(counters, config, ring, rank)
        place = jnp.where(node == NULL, NULL, place)
        free_ids = free_ids.at[place].set(ids, **DROP)
    table = free_entries(cache.tree.table, slot)
    tree = dataclasses.replace(cache.tree, table=table, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, free_ids=free_ids)
    return _account(cache, page, need, are_given)


def _account(cache: CacheState, page, count, are_given: bool):
    """Settle who owns the pages that went, and count them."""
    owner = cache.owner
    if not are_given:
        offset = owner_offset(cache.config, ComponentType.FULL)
        place = jnp.where(page == NULL, NULL, offset + page)
        owner = owner.at[place].set(int(Owner.FREE), **DROP)
    counters = bump(
        cache.counters,
        evictable__0=-count,
        **free_lists.given(Ring.FULL, count),
        **free_lists.given(Ring.NODES, count),
    )
    cache = dataclasses.replace(cache, owner=owner, counters=counters)
    return settle(cache, count)
