"""Choose victims: the lowest stamps among what is not locked.

A selection over all nodes prepares `victim_plan`, the next FULL victims in order with
their stamps. Stamps only grow, so an entry stays valid as long as its node still
carries that stamp and no lock: the plan is a cache of a selection and gives the
victims that a fresh selection would. `PLAN_LIMIT` is the stamp up to which it is
complete; an unlock that frees an older node lowers it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..components import component_rules
from ..components.base import LOW_STAMP, Component
from ..config import CacheConfig
from ..state import PLAN_NODE, PLAN_STAMP, CacheState, Counter, bump
from ..tree_arrays import (
    DEPTH,
    DROP,
    IN_BOUNDS,
    NULL,
    PARENT,
    ROOT,
    TABLE_SLOT,
    fence,
    num_rows,
    row_of,
    take,
)
from .reduce import running_count
from .select import kth_lowest, lowest

_MOST = np.int32(np.iinfo(np.int32).max)

# Rows of an array of victims [rows, lanes]: the nodes in order, what they hold, and a
# value and a stamp for each component; `NULL` where there is none.
NODE_ROW, PARENT_ROW, _, TABLE_SLOT_ROW, _FIRST_VALUE_ROW = range(5)


def value_row(config: CacheConfig, rules: Component) -> int:
    """The row of a component's values in an array of victims."""
    return _FIRST_VALUE_ROW + 2 * config.components.index(rules.type)


def victim_fields(config: CacheConfig) -> np.ndarray:
    """The field that each row of an array of victims holds, [rows, 1]."""
    names = [NULL, PARENT, DEPTH, TABLE_SLOT]
    for r in component_rules(config):
        names += [r.value_field, r.stamp_field]
    return np.array(names, np.int32)[:, None]


def read_victims(fields, config: CacheConfig, node):
    """Read what the removal of `node` [lanes] must know: int32 [rows, lanes]."""
    # Rows are told apart by arithmetic: XLA for CPU builds a stack word by word.
    names = victim_fields(config)
    row = np.arange(len(names), dtype=np.int32)[:, None]
    node = node[None]
    place = np.maximum(names, 0) * num_rows(fields) + jnp.maximum(node, ROOT)
    read = fields.at[place].get(**IN_BOUNDS)
    return jnp.where(node == NULL, NULL, jnp.where(row == NODE_ROW, node, read))


def evictable(fields, rules: Component):
    """Stamps of a component's unlocked values; the largest int32 for all other nodes.

    Lifted above zero where a component has low stamps.
    """
    stamp, lock = row_of(fields, rules.stamp_field), row_of(fields, rules.lock_field)
    candidate = (lock == 0) & (row_of(fields, rules.value_field) != NULL)
    stamp = stamp + (LOW_STAMP if rules.has_tombstones else 0)
    return jnp.where(candidate, stamp, _MOST)


def choose_lowest(fields, rules: Component, need, bound: int, is_ordered: bool):
    """The nodes of the `need` lowest evictable values of a component.

    Args:
      fields: `TreeArrays.fields`.
      rules: the component.
      need: int32 [], at most what is evictable and at most `bound`.
      bound: static.
      is_ordered: in the order of their stamps, at the cost of sorting them, or else in
        the order of the nodes (static).

    Returns:
      int32 [bound], `NULL` past `need`; nothing is looked at where `need` is 0.
    """

    def choose():
        stamps = evictable(fields, rules)
        if is_ordered:
            _, node = lowest(stamps, bound)
            lane = jnp.arange(bound, dtype=jnp.int32)
            return jnp.where(lane < need, node, NULL)
        is_low = stamps <= jnp.minimum(kth_lowest(stamps, need), _MOST - 1)
        place = jnp.where(is_low, running_count(is_low) - 1, NULL)
        every = jnp.arange(stamps.shape[0], dtype=jnp.int32)
        return jnp.full(bound, NULL, jnp.int32).at[place].set(every, **DROP)

    nobody = lambda: jnp.full(bound, NULL, jnp.int32)
    return jax.lax.cond(need > 0, choose, nobody)


def take_planned(cache: CacheState, need, bound: int):
    """The next `need` victims from the plan, made anew where it runs out.

    Where nothing is needed, next to nothing is done: all that depends on victims is
    read under the condition.

    Returns:
      ``(cache, victims)``: see `read_victims`, the first `need` lanes are real.
    """
    config = cache.config
    full = component_rules(config)[0]
    size = config.plan_size
    window = min(size, bound)
    fields, counters = cache.tree.fields, cache.counters
    rows = len(victim_fields(config))

    # Branches take whole arrays and work out small things anew: each scalar that they
    # share would be a kernel of its own before anything is known to be needed.
    def span(counters):
        """Where the next window of the plan begins, and the place of each entry."""
        head = counters[Counter.PLAN_HEAD]
        start = jnp.minimum(head, size - window)
        return head, start, start + jnp.arange(window, dtype=jnp.int32)

    def look(plan, counters):
        """The nodes of the next window, and which of them are due."""
        head, start, place = span(counters)
        entries = jax.lax.dynamic_slice(plan, (0, start), (2, window))
        node, stamp = entries[PLAN_NODE], entries[PLAN_STAMP]
        safe = jnp.maximum(node, ROOT)
        same = take(fields, full.stamp_field, safe) == stamp
        free = take(fields, full.lock_field, safe) == 0
        is_next = (place >= head) & (node != NULL)
        is_next = is_next & (stamp <= counters[Counter.PLAN_LIMIT])
        return node, is_next & same & free

    def choose(plan, counters, node, valid):
        head, _, place = span(counters)
        rank = jnp.cumsum(valid, dtype=jnp.int32) - 1
        victim = valid & (rank < need)
        # What is skipped on the way is restamped, or locked: an unlock of such a node
        # lowers the limit, so it cannot be missed.
        head = jnp.maximum(head, jnp.max(jnp.where(victim, place + 1, 0)))
        lane = jnp.where(victim, rank, window)
        node = jnp.full_like(node, NULL).at[lane].set(node, **DROP)
        moved = bump(counters, plan_head=head - counters[Counter.PLAN_HEAD])
        return plan, moved, read_victims(fields, config, node)

    def refill():
        stamps, nodes = lowest(evictable(fields, full), size)
        is_real = stamps < _MOST
        stamps = jnp.where(is_real, stamps, NULL)
        # Where fewer remain than fit, everything unlocked up to now is in the plan.
        limit = jnp.where(is_real[-1], stamps[-1], counters[Counter.CLOCK] - 1)
        plan = jnp.stack([jnp.where(is_real, nodes, NULL), stamps])
        fresh = bump(
            counters,
            plan_head=-counters[Counter.PLAN_HEAD],
            plan_limit=limit - counters[Counter.PLAN_LIMIT],
        )
        return choose(plan, fresh, *look(plan, fresh))

    def nobody():
        return cache.victim_plan, counters, jnp.full((rows, window), NULL, jnp.int32)

    seen = look(cache.victim_plan, counters)
    enough = jnp.sum(seen[1], dtype=jnp.int32) >= need
    which = jnp.where(need <= 0, 0, jnp.where(enough, 1, 2))
    branches = (nobody, lambda: choose(cache.victim_plan, counters, *seen), refill)
    chosen, fields = fence(jax.lax.switch(which, branches), fields)
    plan, counters, victims = chosen
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, victim_plan=plan, counters=counters)
    return cache, victims
