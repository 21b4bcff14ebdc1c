"""Remove victims: whole nodes, or the values of one component."""

import dataclasses

import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..components.base import Component
from ..state import CacheState, Counter, Owner, Ring, bump, owner_offset
from ..tree_arrays import (
    DEPTH,
    DROP,
    NULL,
    NUM_CHILDREN,
    PARENT,
    TABLE_SLOT,
    fence,
    free_entries,
    num_rows,
    place_of,
    row_of,
    settle,
    take,
)
from .reduce import running_sum_of_many
from .select import kth_lowest
from .victims import (
    NODE_ROW,
    PARENT_ROW,
    TABLE_SLOT_ROW,
    Victims,
    evictable,
    value_row,
    victim_fields,
)


def remove(cache: CacheState, victims: Victims, are_given: bool):
    """Remove victims, node and all; what they hold of any component is freed.

    Args:
      cache: the state.
      victims: see `take_planned`.
      are_given: the FULL pages go straight to a request, which says so in `owner`.

    Returns:
      ``(cache, freed)``: entries freed, one int32 [] a component.
    """
    config, tree = cache.config, cache.tree
    full, *others = component_rules(config)
    held = victims.held
    node = held[NODE_ROW : NODE_ROW + 1]
    page_row = value_row(config, full)
    page = held[page_row : page_row + 1]
    is_victim = node != NULL
    table = free_entries(tree.table, held[TABLE_SLOT_ROW])
    # One scatter clears the fields and counts children down, so all of it is added.
    # Children of a victim are victims too, so its own count falls to zero.
    names = victim_fields(config)
    nodes, row = num_rows(tree.fields), jnp.arange(len(names), dtype=jnp.int32)[:, None]
    parent_place = NUM_CHILDREN * nodes + held[PARENT_ROW : PARENT_ROW + 1]
    place = jnp.where(row == NODE_ROW, parent_place, names * nodes + node)
    place = jnp.where(is_victim, place, NULL)
    change = jnp.where(row == NODE_ROW, -1, NULL - held)
    fields = tree.fields.at[place].add(change, **DROP)
    rank = victims.rank[None]
    is_page = jnp.arange(2, dtype=jnp.int32)[:, None] == 0
    place = jnp.where(
        is_page,
        free_lists.back(cache.counters, config, Ring.FULL, rank),
        free_lists.back(cache.counters, config, Ring.NODES, rank),
    )
    place = jnp.where(is_victim, place, NULL)
    free_ids = cache.free_ids.at[place].set(jnp.where(is_page, page, node), **DROP)
    tree = dataclasses.replace(tree, table=table, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, free_ids=free_ids)
    values = [held[value_row(config, r)] for r in others]
    step = victims.plan_head - cache.counters[Counter.PLAN_HEAD]
    return _account(cache, page[0], values, victims.count, are_given, step)


def remove_many(cache: CacheState, need, are_given: bool):
    """Remove the `need` oldest unlocked pages at a cost that knows no bound.

    Returns:
      ``(cache, freed)``, see `remove`.
    """
    config, counters = cache.config, cache.counters
    full, *others = component_rules(config)
    fields = cache.tree.fields
    stamps = evictable(fields, full)
    victim = (stamps <= kth_lowest(stamps, need)) & (need > 0)
    node = jnp.where(victim, jnp.arange(victim.shape[0], dtype=jnp.int32), NULL)
    names = [PARENT, TABLE_SLOT, full.value_field, *(r.value_field for r in others)]
    held = [jnp.where(victim, row_of(fields, name), NULL) for name in names]
    (held, node), fields = fence((held, node), fields)
    parent, slot, page, *values = held
    place = place_of(fields, NUM_CHILDREN, parent)
    fields = fields.at[place].add(-1, **DROP)
    # Field by field: one scatter of them all would work out each word's field anew.
    stamps = [r.stamp_field for r in (full, *others)]
    for name in (*names, DEPTH, *stamps):
        fields = fields.at[place_of(fields, name, node)].set(NULL, **DROP)
    free_ids, rank = cache.free_ids, running_sum_of_many(node != NULL) - 1
    for ring, ids in ((Ring.FULL, page), (Ring.NODES, node)):
        place = free_lists.back(counters, config, ring, rank)
        place = jnp.where(node == NULL, NULL, place)
        free_ids = free_ids.at[place].set(ids, **DROP)
    table = free_entries(cache.tree.table, slot)
    tree = dataclasses.replace(cache.tree, table=table, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, free_ids=free_ids)
    return _account(cache, page, values, need, are_given, 0)


def _account(cache, page, values, count, are_given: bool, plan_step):
    """Settle who owns what went, and count it; the plan moves on by `plan_step`."""
    config = cache.config
    full, *others = component_rules(config)
    if not are_given:
        cache = _free_owner(cache, full, page)
    counters = bump(
        cache.counters,
        evictable__0=-count,
        plan_head=plan_step,
        **free_lists.given(Ring.FULL, count),
        **free_lists.given(Ring.NODES, count),
    )
    cache = dataclasses.replace(cache, counters=counters)
    freed = [count]
    for r, value in zip(others, values, strict=True):
        cache, number = _free_values(cache, r, value)
        freed.append(number)
    return settle(cache, tuple(freed))


def _free_owner(cache: CacheState, rules: Component, value) -> CacheState:
    offset = owner_offset(cache.config, rules.type)
    place = jnp.where(value == NULL, NULL, offset + value)
    owner = cache.owner.at[place].set(int(Owner.FREE), **DROP)
    return dataclasses.replace(cache, owner=owner)


def _free_values(cache: CacheState, rules: Component, value):
    """Free the values that are not `NULL`: ``(cache, how many)``."""
    ring = Ring(int(rules.type))
    cache = _free_owner(cache, rules, value)
    free_ids, count = free_lists.push(
        cache.free_ids, cache.counters, cache.config, ring, value, value != NULL
    )
    name = f"evictable__{int(rules.type)}"
    counters = bump(cache.counters, **{name: -count}, **free_lists.given(ring, count))
    return dataclasses.replace(cache, free_ids=free_ids, counters=counters), count


def remove_values(cache: CacheState, rules: Component, node):
    """Leave tombstones: free a component's values, the nodes stay.

    Args:
      cache: the state.
      rules: the component.
      node: int32 [lanes] nodes that hold one, or `NULL`.

    Returns:
      ``(cache, how many)``.
    """
    fields = cache.tree.fields
    value = take(fields, rules.value_field, jnp.maximum(node, 0))
    value = jnp.where(node == NULL, NULL, value)
    (value, node), fields = fence((value, node), fields)
    for name in (rules.value_field, rules.stamp_field):
        fields = fields.at[place_of(fields, name, node)].set(NULL, **DROP)
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree)
    cache, count = _free_values(cache, rules, value)
    return settle(cache, count)
