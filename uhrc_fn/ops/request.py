"""The end of a step of a request: publish what it computed, give back the rest.

Rows of the request tables say what a request holds; the cache says who owns it. After
each of these operations the two agree: nothing is lost, nothing is owned twice.
"""

import dataclasses
from typing import Any, NamedTuple, TypeGuard

import jax.numpy as jnp

from ..params import (
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    RadixKey,
)
from ..pools.limits import check_slots
from ..pools.req_to_token import HybridReqToTokenPool, ReqToTokenPool
from ..pools.sizing import request_owned_slots
from ..pools.tracking import (
    Donation,
    no_donation,
    plan_donation,
    settle_finished,
    settle_live,
    wants_replacement,
)
from ..state import CacheState
from ..tree_arrays import NULL, VALUE, take
from .allocate import alloc_slots
from .free import free_pages, free_slots, free_swa_pages
from .insert import insert
from .lock import dec_lock_ref, lock_where
from .match import match_prefix
from .path import first, one


class Published(NamedTuple):
    """What an unfinished request published."""

    insert: InsertResult
    receipt: IncLockRefResult
    """The lock on what the tree now holds of the request; the old one is given back."""


def cache_finished_req(
    cache: CacheState,
    requests: ReqToTokenPool,
    row,
    key: RadixKey,
    receipt: IncLockRefResult,
) -> tuple[CacheState, ReqToTokenPool, InsertResult]:
    """Publish a request that ends, and free whatever the tree did not take.

    Args:
      cache: the state.
      requests: its tables.
      row: int32 [], the request's row; 0 is a padded lane.
      key: its tokens; what counts is at most `requests.length`, the tokens whose KV
        and state are written: prompt and output but for the last token.
      receipt: its lock.

    Returns:
      ``(cache, requests, result)`` with an empty row.

    Raises:
      ValueError: the cache has fewer slots than one request of the tables owns.

    Status:
      that of `insert`, `free_pages` and `dec_lock_ref`.

    Ownership:
      pages, SWA pages and slots are the tree's if adopted, else free: duplicates and
      the unaligned tail too.
    """
    donation, length = _offer(cache, requests, row, key, is_live=False)
    params = _insert_params(cache, requests, row, key, donation, length)
    cache, result = insert(cache, params)
    cache, requests = _give_up(cache, requests, row, result, donation)
    cache, _ = dec_lock_ref(cache, receipt)
    return cache, requests, result


def abort_req(
    cache: CacheState, requests: ReqToTokenPool, row, receipt: IncLockRefResult
) -> tuple[CacheState, ReqToTokenPool]:
    """Drop a request: aborted, cancelled or retracted.

    Args:
      cache: the state.
      requests: its tables.
      row: int32 [], the request's row.
      receipt: its lock.

    Returns:
      ``(cache, requests)`` with an empty row.

    Ownership:
      what it published before stays the tree's, everything private is free. A
      retracted request keeps its tokens with the caller and matches anew.
    """
    cache, requests = _give_up(cache, requests, row, None, no_donation())
    cache, _ = dec_lock_ref(cache, receipt)
    return cache, requests


def cache_unfinished_req(
    cache: CacheState,
    requests: ReqToTokenPool,
    row,
    key: RadixKey,
    receipt: IncLockRefResult,
) -> tuple[CacheState, ReqToTokenPool, Published]:
    """Publish what a request that goes on has written so far.

    Args:
      cache: the state.
      requests: its tables.
      row: int32 [], the request's row; 0 is a padded lane.
      key: its tokens, see `cache_finished_req`.
      receipt: its lock.

    Returns:
      ``(cache, requests, published)``. The row's table points at the tree's pages,
      and the lock has moved to the end of what the tree holds.

    Raises:
      ValueError: the cache has fewer slots than one request of the tables owns.

    Ownership:
      adopted entries are the tree's, duplicates are free, the rest and the unaligned
      tail stay the request's. A snapshot is published only against a slot in exchange;
      where none can be had nothing is, and the next call tries again.
    """
    replacement = jnp.int32(0)
    if _has_tracks(requests):
        tracks = requests.tracks(row)
        written = _written(requests, row, key)
        wants = wants_replacement(tracks, written, cache.config.page_size)
        number = wants.astype(jnp.int32)
        cache, slots = alloc_slots(cache, number, max_new=1, partial=True)
        replacement = slots.ids[0]
    donation, length = _offer(
        cache, requests, row, key, is_live=True, replacement=replacement
    )
    params = _insert_params(cache, requests, row, key, donation, length)
    cache, result = insert(cache, params)
    if _has_tracks(requests):
        tracks, orphan = settle_live(
            requests.tracks(row), donation, result.recurrent_committed, replacement
        )
        requests = requests.put_tracks(row[None], _one(tracks))
        cache = free_slots(cache, orphan)
    cache, requests = _exchange(cache, requests, row, result)
    # With nothing to publish it still shares what it shared before.
    shared = jnp.maximum(result.inserted_len, requests.protected_length[row])
    published = dataclasses.replace(key, length=shared)
    wanted = MatchPrefixParams(key=published, full_only=True)
    cache, match = match_prefix(cache, wanted)
    # The old lock first: the ledger may have no row to spare, and nothing evicts here.
    cache, _ = dec_lock_ref(cache, receipt)
    cache, moved = lock_where(cache, one(match), jnp.asarray(row > 0)[None])
    return cache, requests, Published(result, first(moved))


def _has_tracks(requests: ReqToTokenPool) -> TypeGuard[HybridReqToTokenPool]:
    return requests.config.num_track_slots > 0


def _one(tree):
    return type(tree)(*(jnp.asarray(x)[None] for x in tree))


def _written(requests: ReqToTokenPool, row, key: RadixKey):
    """Tokens whose KV is written and whose ids are known."""
    return jnp.minimum(requests.length[row], jnp.asarray(key.length, jnp.int32))


def _offer(cache, requests, row, key, *, is_live: bool, replacement: Any = 0):
    """The snapshot that goes to the tree, and the tokens to publish.

    Returns:
      ``(donation, length)``.
    """
    size = cache.config.page_size
    written = _written(requests, row, key)
    if _has_tracks(requests):
        tracks = requests.config.num_track_slots
        owned = request_owned_slots(extra_buffer=True, num_track_slots=tracks)
        check_slots(cache.config.num_recurrent_slots, owned)
        donation = plan_donation(
            requests.tracks(row),
            written,
            size,
            is_live=is_live,
            replacement=replacement,
        )
        # Pages past the snapshot could serve nobody: they are not published.
        return donation, donation.length
    if isinstance(requests, HybridReqToTokenPool) and not is_live:
        # The running state itself: it covers what is written, to the token.
        slot = requests.running_slots(row)
        return Donation(slot, written, jnp.zeros_like(slot)), written
    return no_donation(), written // size * size


def _columns(requests: ReqToTokenPool, row, key: RadixKey):
    """The row's tables as wide as the key: ``(pages, swa_pages or None)``.

    Of SWA pages only its own: the tree may have let go of one that it shared.
    """
    size = requests.config.page_size
    wide = key.token_ids.shape[-1] // size
    fit = lambda table: _padded(table[row], wide, 0)
    swa = fit(requests.owned().swa_pages) if requests.config.has_swa else None
    return fit(requests.pages), swa


def _insert_params(cache, requests, row, key, donation, length) -> InsertParams:
    pages, swa_pages = _columns(requests, row, key)
    has_slot = cache.config.has_recurrent
    return InsertParams(
        key=dataclasses.replace(key, length=jnp.where(row > 0, length, 0)),
        value=pages,
        prev_prefix_len=requests.protected_length[row],
        swa_value=swa_pages,
        # A page that slid out of the window is 0 in the table, so it is not offered.
        swa_evicted_seqlen=None if swa_pages is None else jnp.int32(0),
        recurrent_value=donation.slot if has_slot else None,
        recurrent_length=donation.length if has_slot else None,
    )


def _padded(x, wide: int, fill: int):
    return jnp.pad(x, (0, max(wide - x.shape[0], 0)), constant_values=fill)[:wide]


def _taken(requests, result: InsertResult | None, component: int):
    """Which columns of the tables the tree adopted."""
    wide = requests.pages.shape[1]
    if result is None:
        return jnp.zeros((wide,), bool)
    return _padded(result.page_flags >> component & 1, wide, 0) != 0


def _give_up(cache, requests, row, result, donation):
    """Free all that a request owns but for what the tree took, and empty its row."""
    owned = requests.owned()
    own = jnp.where(row > 0, owned.pages[row], 0)
    cache = free_pages(cache, jnp.where(_taken(requests, result, 0), 0, own))
    if requests.config.has_swa:
        own = jnp.where(row > 0, owned.swa_pages[row], 0)
        cache = free_swa_pages(cache, jnp.where(_taken(requests, result, 1), 0, own))
    if isinstance(requests, HybridReqToTokenPool):
        committed = jnp.zeros((), bool)
        if result is not None:
            committed = result.recurrent_committed
        running = requests.running_slots(row)
        is_gone = committed & (running == donation.slot)
        running = jnp.where(is_gone, 0, running)
        _, slots = settle_finished(requests.tracks(row), donation, committed, running)
        cache = free_slots(cache, jnp.where(row > 0, slots, 0))
    return cache, requests.clear_rows(jnp.asarray(row, jnp.int32)[None])


def _exchange(cache, requests, row, result: InsertResult):
    """Point a live request's tables at the tree's pages, and free its duplicates."""
    config = requests.config
    wide = config.max_pages
    column = jnp.arange(wide, dtype=jnp.int32)
    in_tree = column < result.inserted_len // config.page_size
    in_tree = in_tree & (row > 0)
    own = requests.owned()
    table = requests.pages[row]
    tree_page = _padded(result.page_table, wide, 0)
    differs = in_tree & (own.pages[row] > 0) & (tree_page != table)
    cache = free_pages(cache, jnp.where(differs, table, 0))
    put = lambda tables, new: tables.at[row].set(jnp.where(row > 0, new, tables[row]))
    pages = put(requests.pages, jnp.where(in_tree, tree_page, table))
    requests = dataclasses.replace(requests, pages=pages)
    if config.has_swa:
        table = requests.swa_pages[row]
        node = jnp.maximum(_padded(result.path, wide, NULL), 0)
        held = jnp.maximum(take(cache.tree.fields, VALUE + 1, node), 0)
        differs = in_tree & (own.swa_pages[row] > 0) & (held > 0) & (held != table)
        cache = free_swa_pages(cache, jnp.where(differs, table, 0))
        # A page that the tree would not have stays the request's only past the cut.
        lost = in_tree & (own.swa_pages[row] > 0) & (held == 0)
        cache = free_swa_pages(cache, jnp.where(lost, table, 0))
        swa = put(requests.swa_pages, jnp.where(in_tree, held, table))
        requests = dataclasses.replace(requests, swa_pages=swa)
    protected = jnp.maximum(requests.protected_length[row], result.inserted_len)
    rows = jnp.asarray(row, jnp.int32)[None]
    return cache, requests.set_lengths(rows, requests.length[row], protected)
