"""Locks by receipt: what is locked is neither evicted nor counted evictable.

A receipt names a row of the ledger. The row, not the receipt, says what is held; a
serial that is not live changes nothing, so a lock can never be given back twice or by
somebody else's receipt.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..config import NUM_COMPONENTS, CacheConfig, ComponentType
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
from .reduce import sum_and_min


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
    return lock_where(cache, match, jnp.ones_like(match.hit_length, bool))


def lock_where(
    cache: CacheState, match: MatchResult, asked
) -> tuple[CacheState, IncLockRefResult]:
    """Lock those matches of a batch for which `asked` (bool [requests]) holds."""
    config, counters = cache.config, cache.counters
    anchor, generation = match.best_match_node, match.generation
    node, words = _read_path(config, cache.tree.fields, match.path, anchor)
    words, fields = fence(words, cache.tree.fields)
    reads = _reads(config, node, words)
    is_alive = reads.anchor[PARENT] != NULL
    fresh = is_alive & (reads.anchor[GENERATION] == generation) & asked
    order = jnp.cumsum(fresh, dtype=jnp.int32) - 1
    granted = fresh & (order < free_lists.size(counters, Ring.LEDGER))
    row = free_lists.front(cache.free_ids, counters, config, Ring.LEDGER, order)
    serial = jnp.where(granted, counters[Counter.NEXT_SERIAL] + order, 0)
    count = jnp.sum(granted, dtype=jnp.int32)
    num_pages = jnp.where(granted, match.hit_length // config.page_size, 0)
    rules = component_rules(config)
    every = sum(1 << r.type for r in rules)
    # A running request that asked FULL alone resumes from its own state.
    by_page = sum(1 << r.type for r in rules if r.entry_is_page)
    held = jnp.where(match.is_full_only != 0, by_page, every)
    held = jnp.where(granted, held, 0)
    path = jnp.where(granted[:, None], match.path, NULL)
    fields, moved, _ = _add(config, fields, reads, path, num_pages, held, 1)
    record = jnp.stack([serial, anchor, held])
    row = jnp.where(granted, row, cache.ledger.shape[1])
    ledger = cache.ledger.at[:, row].set(record, **DROP)
    counters = bump(
        counters,
        next_serial=count,
        evictable=-moved.sum(0),
        protected=moved.sum(0),
        status=flag(asked & ~fresh, Status.STALE_MATCH)
        | flag(fresh & ~granted, Status.LEDGER_FULL),
        **free_lists.taken(counters, config, Ring.LEDGER, count),
    )
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, ledger=ledger, counters=counters)
    delta = -moved[:, 0] * config.page_size
    anchor = jnp.where(granted, anchor, ROOT)
    row = jnp.where(granted, row, 0)
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
    cache, live, row, moved, _, _ = _give_back(cache, receipt, keep=0)
    place = jnp.where(live, row, cache.ledger.shape[1])
    ledger = cache.ledger.at[SERIAL, place].set(0, **DROP)
    free_ids, count = free_lists.push(
        cache.free_ids, cache.counters, cache.config, Ring.LEDGER, row, live
    )
    counters = bump(cache.counters, **free_lists.given(Ring.LEDGER, count))
    cache = dataclasses.replace(
        cache, ledger=ledger, free_ids=free_ids, counters=counters
    )
    delta = moved[:, 0] * cache.config.page_size
    scalars = jnp.stack([live.astype(jnp.int32), delta], -1)
    return settle(cache, DecLockRefResult(scalars))


def release_window(
    cache: CacheState, receipt: IncLockRefResult
) -> tuple[CacheState, IncLockRefResult]:
    """Give the SWA and RECURRENT parts of a lock back early; FULL stays locked.

    For a request that has decoded past its window, or has cloned its snapshot.

    Args:
      cache: the state.
      receipt: a live receipt of `inc_lock_ref`.

    Returns:
      ``(cache, receipt)``: the new receipt holds FULL alone, the old one is stale. A
      refused receipt comes back with a serial of 0.

    Status:
      STALE_RECEIPT: the serial is not live; nothing changed.
    """
    cache, receipt = release_window_batch(cache, one(receipt))
    return cache, first(receipt)


def release_window_batch(
    cache: CacheState, receipt: IncLockRefResult
) -> tuple[CacheState, IncLockRefResult]:
    """Release the windows of a batch of receipts, as if one after another."""
    keep = 1 << ComponentType.FULL
    cache, live, row, _, kept, anchor = _give_back(cache, receipt, keep)
    counters = cache.counters
    order = jnp.cumsum(live, dtype=jnp.int32) - 1
    serial = jnp.where(live, counters[Counter.NEXT_SERIAL] + order, 0)
    place = jnp.where(live, row, cache.ledger.shape[1])
    ledger = cache.ledger.at[:, place].set(jnp.stack([serial, anchor, kept]), **DROP)
    counters = bump(counters, next_serial=jnp.sum(live, dtype=jnp.int32))
    cache = dataclasses.replace(cache, ledger=ledger, counters=counters)
    entries = [serial, row, anchor, kept, receipt.num_pages, receipt.delta]
    scalars = jnp.where(live[:, None], jnp.stack(entries, -1), 0)
    path = jnp.where(live[:, None], receipt.path, NULL)
    return settle(cache, IncLockRefResult(path=path, scalars=scalars))


def _give_back(cache: CacheState, receipt, keep: int):
    """Take back what receipts hold, but for the components of `keep` (bits).

    Returns:
      ``(cache, live, row, moved, kept, anchor)``: which receipts were live, their rows
      of the ledger, entries by component that became evictable, the bits still held,
      and the ledger's anchors.
    """
    config, counters = cache.config, cache.counters
    num_requests = receipt.path.shape[0]
    row = jnp.clip(receipt.ledger_row, 0, config.max_live_receipts - 1)
    asked = receipt.serial != 0
    # The ledger's anchor is believed; the receipt's path must lead there.
    record = cache.ledger.at[:, row].get(**IN_BOUNDS)
    node, words = _read_path(config, cache.tree.fields, receipt.path, record[ANCHOR])
    (record, words), ledger, fields = fence(
        (record, words), cache.ledger, cache.tree.fields
    )
    reads = _reads(config, node, words)
    depth = receipt.num_pages
    live = asked & (record[SERIAL] == receipt.serial)
    live = live & _leads_to(reads, depth, record[ANCHOR])
    if num_requests > 1:  # the same receipt twice in a batch: the first one counts
        turn = jnp.arange(num_requests, dtype=jnp.int32)
        place = jnp.where(live, row, ledger.shape[1])
        place = (jnp.full_like(row, ANCHOR), place)
        ledger, is_first = first_touch(ledger, place, turn)
        live = live & is_first
    held = jnp.where(live, record[HELD], 0)
    path = jnp.where(live[:, None], receipt.path, NULL)
    num_pages = jnp.where(live, depth, 0)
    fields, moved, oldest = _add(
        config, fields, reads, path, num_pages, held & ~keep, -1
    )
    limit = jnp.minimum(counters[Counter.PLAN_LIMIT], oldest - 1)
    counters = bump(
        counters,
        evictable=moved.sum(0),
        protected=-moved.sum(0),
        plan_limit=limit - counters[Counter.PLAN_LIMIT],
        status=flag(asked & ~live, Status.STALE_RECEIPT),
    )
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, ledger=ledger, counters=counters)
    return cache, live, row, moved, held & keep, record[ANCHOR]


class _Reads(NamedTuple):
    """What locks ask of a batch of paths."""

    node: jax.Array  # [requests, pages], in range
    parent: jax.Array  # [requests, pages]
    by_component: dict  # type -> (lock, value, stamp), [requests, pages] each
    anchor: dict  # field -> [requests]


def _read_path(config: CacheConfig, fields, path, anchor):
    """Read all of it in one gather: ``(nodes in range, words)``, see `_reads`."""
    nodes = num_rows(fields)
    node = jnp.clip(path, ROOT, nodes - 1)
    anchor = jnp.clip(anchor, ROOT, nodes - 1)[:, None]
    place = [name * nodes + node for name in _path_fields(config)]
    place += [name * nodes + anchor for name in _ANCHOR_FIELDS]
    return node, fields.at[jnp.concatenate(place, axis=1)].get(**IN_BOUNDS)


_ANCHOR_FIELDS = (PARENT, GENERATION)


def _path_fields(config: CacheConfig) -> list[int]:
    rules = component_rules(config)
    by_component = [(r.lock_field, r.value_field, r.stamp_field) for r in rules]
    return [PARENT, *(name for fields in by_component for name in fields)]


def _reads(config: CacheConfig, node, words) -> _Reads:
    """Name the words that `_read_path` read."""
    length, count = node.shape[1], len(_path_fields(config))
    columns = [words[:, k * length : (k + 1) * length] for k in range(count)]
    last = words[:, count * length :]
    rules = enumerate(component_rules(config))
    return _Reads(
        node=node,
        parent=columns[0],
        by_component={r.type: columns[3 * k + 1 : 3 * k + 4] for k, r in rules},
        anchor={name: last[:, k] for k, name in enumerate(_ANCHOR_FIELDS)},
    )


def _leads_to(reads: _Reads, num_pages, anchor):
    """Whether the first `num_pages` nodes of a path are the ancestors of `anchor`."""
    page = page_index(reads.node.shape[1])
    strays = (page < num_pages[:, None]) & (reads.parent != above(reads.node))
    misses = (page == num_pages[:, None] - 1) & (reads.node != anchor[:, None])
    at_root = (num_pages <= 0) & (anchor != ROOT)
    too_long = num_pages > reads.node.shape[1]
    return ~jnp.any(strays | misses, -1) & ~at_root & ~too_long


def _add(config: CacheConfig, fields, reads: _Reads, path, num_pages, held, step: int):
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
        before, value, stamp = reads.by_component[r.type]
        has = (held >> r.type) & 1 != 0
        locked = r.locks(page, num_pages[:, None]) & has[:, None] & (path != NULL)
        place = place_of(fields, r.lock_field, jnp.where(locked, path, NULL))
        if num_requests == 1:  # a path holds a node once
            after = before + step
            fields = fields.at[place].set(after, **DROP)
            edge = locked & ((before == 0) != (after == 0))
        else:  # a shared page crosses once: at its first lock, its last unlock
            fields = fields.at[place].add(step, **DROP)
            after, fields = fence(take(fields, r.lock_field, reads.node), fields)
            order = turn if step > 0 else path.size - 1 - turn
            fields, is_first = first_touch(fields, (place,), order)
            edge = locked & ((before == 0) != (after == 0)) & is_first
        crossed = (edge & (value != NULL)).astype(jnp.int32)
        if r.removes_node and step < 0:
            stamp = jnp.where(edge, stamp, oldest)
            moved[r.type], oldest = sum_and_min(crossed, stamp)
            oldest = jnp.min(oldest)
        else:
            moved[r.type] = jnp.sum(crossed, -1, dtype=jnp.int32)
    return fields, jnp.stack(moved, -1), oldest
