"""Locks by receipt: what is locked is neither evicted nor counted evictable.

A receipt names a row of the ledger. The row, not the receipt, says what is held; a
serial that is not live changes nothing, so a lock can never be given back twice or by
somebody else's receipt.
"""

import dataclasses

import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..config import NUM_COMPONENTS, CacheConfig
from ..params import DecLockRefParams, DecLockRefResult, IncLockRefResult, MatchResult
from ..state import (
    ANCHOR,
    HELD,
    SERIAL,
    CacheState,
    Counter,
    Ring,
    bump,
    flag,
)
from ..status import Status
from ..tree_arrays import (
    DROP,
    GENERATION,
    IN_BOUNDS,
    NULL,
    PARENT,
    ROOT,
    fence,
    num_rows,
    place_of,
    settle,
    take,
)
from .claim import first_touch
from .path import above, first, one, page_index


def inc_lock_ref(
    cache: CacheState, match: MatchResult
) -> tuple[CacheState, IncLockRefResult]:
    """Lock what a match found, from the root to its anchor.

    Args:
      cache: the state.
      match: a result of `match_prefix`, of this state or an earlier one.

    Returns:
      ``(cache, receipt)``. A lock on the root holds nothing but is a live receipt.

    Status:
      LEDGER_FULL, STALE_MATCH: nothing was locked and the receipt's serial is 0.
    """
    cache, receipt = inc_lock_ref_batch(cache, one(match))
    return cache, first(receipt)


def inc_lock_ref_batch(
    cache: CacheState, match: MatchResult
) -> tuple[CacheState, IncLockRefResult]:
    """Lock a batch of matches, as if one after another."""
    config, tree = cache.config, cache.tree
    counters = cache.counters
    anchor, generation = match.best_match_node, match.generation
    safe = jnp.clip(anchor, ROOT, num_rows(tree.fields) - 1)
    is_alive = take(tree.fields, PARENT, safe) != NULL
    fresh = is_alive & (take(tree.fields, GENERATION, safe) == generation)
    fresh, fields = fence(fresh, tree.fields)
    tree = dataclasses.replace(tree, fields=fields)
    order = jnp.cumsum(fresh, dtype=jnp.int32) - 1
    granted = fresh & (order < free_lists.size(counters, Ring.LEDGER))
    row = free_lists.front(cache.free_ids, counters, config, Ring.LEDGER, order)
    row = jnp.where(granted, row, NULL)
    serial = jnp.where(granted, counters[Counter.NEXT_SERIAL] + order, 0)
    count = jnp.sum(granted, dtype=jnp.int32)
    num_pages = jnp.where(granted, match.hit_length // config.page_size, 0)
    held_bits = sum(1 << r.type for r in component_rules(config))
    held = jnp.where(granted, held_bits, 0)
    path = jnp.where(granted[:, None], match.path, NULL)
    fields, moved, _ = _add(config, fields, path, num_pages, held, 1)
    record = jnp.stack([serial, anchor, held])
    ledger = cache.ledger.at[:, _or_nowhere(row, granted, cache.ledger)].set(
        record, **DROP
    )
    counters = bump(
        counters,
        next_serial=count,
        evictable=-moved.sum(0),
        protected=moved.sum(0),
        status=flag(~fresh, Status.STALE_MATCH)
        | flag(fresh & ~granted, Status.LEDGER_FULL),
        **free_lists.taken(counters, config, Ring.LEDGER, count),
    )
    tree = dataclasses.replace(tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, ledger=ledger, counters=counters)
    delta = -moved[:, 0] * config.page_size
    anchor = jnp.where(granted, anchor, ROOT)
    row = jnp.maximum(row, 0)
    scalars = jnp.stack([serial, row, anchor, held, num_pages, delta], -1)
    return settle(cache, IncLockRefResult(path=path, scalars=scalars))


def dec_lock_ref(
    cache: CacheState, receipt: IncLockRefResult | DecLockRefParams
) -> tuple[CacheState, DecLockRefResult]:
    """Give a lock back by its receipt.

    Args:
      cache: the state.
      receipt: what `inc_lock_ref` returned; a serial of 0 is nothing to give back.

    Returns:
      ``(cache, result)``.

    Status:
      STALE_RECEIPT: the serial is not live; nothing changed.
    """
    cache, result = dec_lock_ref_batch(cache, one(receipt))
    return cache, first(result)


def dec_lock_ref_batch(
    cache: CacheState, receipt: IncLockRefResult | DecLockRefParams
) -> tuple[CacheState, DecLockRefResult]:
    """Give a batch of locks back, as if one after another."""
    config, tree = cache.config, cache.tree
    counters = cache.counters
    num_requests = receipt.path.shape[0]
    turn = jnp.arange(num_requests, dtype=jnp.int32)
    row = jnp.clip(receipt.ledger_row, 0, config.max_live_receipts - 1)
    asked = receipt.serial != 0
    ledger = cache.ledger
    anchor = _of_row(ledger, ANCHOR, row)
    # The ledger's anchor is believed; the receipt's path must lead there.
    depth = receipt.num_pages
    live = asked & (_of_row(ledger, SERIAL, row) == receipt.serial)
    live = live & _leads_to(tree.fields, receipt.path, depth, anchor)
    if num_requests > 1:  # the same receipt twice in a batch: the first one counts
        place = (jnp.full_like(row, ANCHOR), _or_nowhere(row, live, ledger))
        (place, anchor), ledger = fence((place, anchor), ledger)
        ledger, is_first = first_touch(ledger, place, turn)
        live = live & is_first
    held = jnp.where(live, _of_row(ledger, HELD, row), 0)
    path = jnp.where(live[:, None], receipt.path, NULL)
    reads, ledger, fields = fence((live, held, path, row), ledger, tree.fields)
    live, held, path, row = reads
    ledger = ledger.at[SERIAL, _or_nowhere(row, live, ledger)].set(0, **DROP)
    fields, moved, oldest = _add(
        config, fields, path, jnp.where(live, depth, 0), held, -1
    )
    free_ids, count = free_lists.push(
        cache.free_ids, counters, config, Ring.LEDGER, row, live
    )
    limit = jnp.minimum(counters[Counter.PLAN_LIMIT], oldest - 1)
    counters = bump(
        counters,
        evictable=moved.sum(0),
        protected=-moved.sum(0),
        plan_limit=limit - counters[Counter.PLAN_LIMIT],
        status=flag(asked & ~live, Status.STALE_RECEIPT),
        **free_lists.given(Ring.LEDGER, count),
    )
    tree = dataclasses.replace(tree, fields=fields)
    cache = dataclasses.replace(
        cache, tree=tree, ledger=ledger, free_ids=free_ids, counters=counters
    )
    delta = moved[:, 0] * config.page_size
    scalars = jnp.stack([live.astype(jnp.int32), delta], -1)
    return settle(cache, DecLockRefResult(scalars))


def _of_row(ledger, record, row):
    """Read one record of ledger rows; every row must be a real one."""
    return ledger.at[record, row].get(**IN_BOUNDS)


def _or_nowhere(row, is_meant, ledger):
    """Ledger rows to write; past the end where nothing is meant."""
    return jnp.where(is_meant, row, ledger.shape[1])


def _leads_to(fields, path, num_pages, anchor):
    """Whether the first `num_pages` nodes of a path are the ancestors of `anchor`."""
    page = page_index(path.shape[1])
    inside = page < num_pages[:, None]
    safe = jnp.clip(path, ROOT, num_rows(fields) - 1)
    linked = jnp.where(inside, take(fields, PARENT, safe) == above(safe), True)
    last = jnp.sum(jnp.where(page == num_pages[:, None] - 1, safe, 0), -1)
    return jnp.all(linked, -1) & (last == anchor)


def _add(config: CacheConfig, fields, path, num_pages, held, step: int):
    """Add `step` to the locks that `held` names along each path.

    Returns:
      ``(fields, moved, oldest)``: moved is int32 [requests, 3], entries that
      went from evictable to protected or back; oldest is the lowest FULL stamp among
      them, or the largest int32.
    """
    num_requests, length = path.shape
    page = page_index(length)
    turn = jnp.arange(path.size, dtype=jnp.int32).reshape(path.shape)
    moved = [jnp.zeros((num_requests,), jnp.int32)] * NUM_COMPONENTS
    oldest = jnp.int32(jnp.iinfo(jnp.int32).max)
    for r in component_rules(config):
        has = (held >> r.type) & 1 != 0
        locked = r.locks(page, num_pages[:, None]) & has[:, None] & (path != NULL)
        node = jnp.where(locked, path, NULL)
        safe = jnp.maximum(node, ROOT)
        before = take(fields, r.lock_field, safe)
        present = take(fields, r.value_field, safe) != NULL
        stamp = take(fields, r.stamp_field, safe)
        (before, present, stamp), fields = fence((before, present, stamp), fields)
        place = place_of(fields, r.lock_field, node)
        fields = fields.at[place].add(step, **DROP)
        after, fields = fence(take(fields, r.lock_field, safe), fields)
        edge = locked & ((before == 0) != (after == 0))
        if num_requests > 1:  # a shared page crosses once: first lock, last unlock
            order = turn if step > 0 else path.size - 1 - turn
            fields, is_first = first_touch(fields, (place,), order)
            edge = edge & is_first
        moved[r.type] = jnp.sum(edge & present, -1, dtype=jnp.int32)
        if r.removes_node:
            oldest = jnp.min(jnp.where(edge, stamp, oldest))
    return fields, jnp.stack(moved, -1), oldest
