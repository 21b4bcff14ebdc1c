"""Choose victims: the lowest stamps among what is not locked.

A selection over all nodes prepares `victim_plan`, the next FULL victims in order with
their stamps. Stamps only grow, so an entry stays valid as long as its node still
carries that stamp and no lock: the plan is a cache of a selection and gives the
victims that a fresh selection would. `PLAN_LIMIT` is the stamp up to which it is
complete; an unlock that frees an older node lowers it.
"""

import dataclasses
from typing import NamedTuple

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
from .once import once_if
from .reduce import running_sum, running_sum_of_many
from .select import kth_lowest, lowest

_MOST = np.int32(np.iinfo(np.int32).max)

# Rows of an array of victims [rows, lanes]: the nodes, what they hold, and a
# value and a stamp for each component; `NULL` where there is none.
NODE_ROW, PARENT_ROW, _, TABLE_SLOT_ROW, _FIRST_VALUE_ROW = range(5)


def value_row(config: CacheConfig, rules: Component) -> int:
    """The row of a component's values in an array of victims."""
    return _FIRST_VALUE_ROW + 2 * config.components.index(rules.type)


def victim_fields(config: CacheConfig) -> np.ndarray:
    """The field that each row of an array of victims holds, [rows, 1].

    The row of the nodes themselves holds none, and names any.
    """
    names = [PARENT, PARENT, DEPTH, TABLE_SLOT]
    for r in component_rules(config):
        names += [r.value_field, r.stamp_field]
    return np.array(names, np.int32)[:, None]


def read_victims(fields, config: CacheConfig, node):
    """Read what the removal of `node` [lanes] must know: int32 [rows, lanes]."""
    # Rows are told apart by arithmetic: XLA for CPU builds a stack word by word. They
    # are counted in the program, as a call pays for each constant, used or not.
    names = victim_fields(config)
    row = jnp.arange(len(names), dtype=jnp.int32)[:, None]
    node = node[None]
    place = names * num_rows(fields) + jnp.maximum(node, ROOT)
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
        place = jnp.where(is_low, running_sum_of_many(is_low) - 1, NULL)
        every = jnp.arange(stamps.shape[0], dtype=jnp.int32)
        return jnp.full(bound, NULL, jnp.int32).at[place].set(every, **DROP)

    nobody = lambda: jnp.full_like(fields, NULL, shape=(bound,))
    return jax.lax.cond(need > 0, choose, nobody)


class Victims(NamedTuple):
    """FULL victims; arrays have one lane an entry of the plan's next window."""

    held: jax.Array  # [rows, lanes], see `read_victims`; all `NULL` where none is
    rank: jax.Array  # [lanes] victims before it
    count: jax.Array  # []
    plan_head: jax.Array  # [] where the plan goes on behind them


def take_planned(cache: CacheState, need, bound: int):
    """Choose the next `need` victims of the plan, made anew where it runs out.

    Args:
      cache: the state.
      need: int32 [], at most what is evictable and at most `bound`.
      bound: static, at most the plan's size.

    Returns:
      ``(cache, victims)``; who removes them moves the plan's head.
    """
    config, fields = cache.config, cache.tree.fields
    full = component_rules(config)[0]
    size, window = config.plan_size, bound

    def look(fields, plan, counters):
        """Look at the next window: its nodes that are due, and how many up to each."""
        head = counters[Counter.PLAN_HEAD]
        start = jnp.minimum(head, size - window)
        entries = jax.lax.dynamic_slice(plan, (0, start), (2, window))
        node, stamp = entries[PLAN_NODE], entries[PLAN_STAMP]
        safe = jnp.maximum(node, ROOT)
        same = take(fields, full.stamp_field, safe) == stamp
        free = take(fields, full.lock_field, safe) == 0
        is_next = start + jnp.arange(window, dtype=jnp.int32) >= head
        is_next = is_next & (node != NULL) & (stamp <= counters[Counter.PLAN_LIMIT])
        is_due = is_next & same & free
        return jnp.where(is_due, node, NULL), running_sum(is_due)

    def refill(operands):
        """Make the plan anew where it is too short, and look again."""
        fields, plan, counters, is_short, *_ = operands
        stamps, nodes = lowest(evictable(fields, full), size)
        is_real = stamps < _MOST
        stamps = jnp.where(is_real, stamps, NULL)
        # Where fewer remain than fit, everything unlocked up to now is in the plan.
        limit = jnp.where(is_real[-1], stamps[-1], counters[Counter.CLOCK] - 1)
        fresh = jnp.stack([jnp.where(is_real, nodes, NULL), stamps])
        counters = bump(
            counters,
            plan_head=jnp.where(is_short, -counters[Counter.PLAN_HEAD], 0),
            plan_limit=jnp.where(is_short, limit - counters[Counter.PLAN_LIMIT], 0),
        )
        plan = jnp.where(is_short, fresh, plan)
        found = look(fields, plan, counters)
        return fields, plan, counters, jnp.zeros_like(is_short), *found

    plan, counters = cache.victim_plan, cache.counters
    node, number = look(fields, plan, counters)
    operands = (fields, plan, counters, number[-1] < need, node, number)
    operands = once_if(lambda operands: operands[3], refill, operands)
    fields, plan, counters, _, node, number = operands
    is_victim = (node != NULL) & (number <= need)
    held = read_victims(fields, config, jnp.where(is_victim, node, NULL))
    # What is skipped on the way is restamped, or locked: an unlock of such a node
    # lowers the limit, so it cannot be missed.
    head = counters[Counter.PLAN_HEAD]
    behind = jnp.minimum(head, size - window) + running_sum(number < need)[-1] + 1
    head = jnp.where(need > 0, behind, head)
    victims = Victims(held, number - 1, need, head)
    (plan, counters, victims), fields = fence((plan, counters, victims), fields)
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, victim_plan=plan, counters=counters)
    return cache, victims
