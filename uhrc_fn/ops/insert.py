"""Insert: the tree adopts a key's new pages.

A key is judged before anything is written: which pages the tree holds, how many of
the others have a way in their bucket, a node and an entry of the caller's. What
stands is then written once. `insert_batch` does the same for many keys.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import free_lists
from ..components import component_rules
from ..config import CLOCK_LIMIT, CacheConfig, ComponentType
from ..params import InsertParams, InsertResult
from ..state import CacheState, Counter, Owner, Ring, bump, flag, owner_entry
from ..status import Status
from ..tree_arrays import (
    DEPTH,
    DROP,
    GENERATION,
    IN_BOUNDS,
    NAMESPACE,
    NAMESPACE_WORDS,
    NULL,
    NUM_CHILDREN,
    PARENT,
    ROOT,
    TABLE_SLOT,
    fence,
    num_rows,
    put_entries,
    settle,
)
from .adopt import adopt, extra_fields, settle_owner
from .claim import first_touch
from .path import (
    KeyPages,
    above,
    check_key,
    first,
    one,
    page_index,
    propose,
    verify,
)
from .place import place_key
from .reduce import first_two


def insert(cache: CacheState, params: InsertParams) -> tuple[CacheState, InsertResult]:
    """Insert a key: its new whole pages become the tree's.

    Args:
      cache: the state.
      params: key and the FULL page of each of its pages.

    Returns:
      ``(cache, result)``.

    Status:
      STALE_PREFIX: the tree lost pages under `prev_prefix_len`; nothing went in.
      NOT_OWNED: cut at an entry that no request owns. NODES_EXHAUSTED, TABLE_FULL:
      the longest insertable prefix went in. BAD_LENGTH, BAD_TOKEN, CLOCK_HIGH.

    Ownership:
      adopted entries become the tree's. Duplicates, what lies past `inserted_len` and
      the partial tail page stay the caller's; insert frees nothing.
    """
    check_insert(cache.config, params)
    params = one(params)
    pages = propose(cache.tree, params.key, cache.config)
    reads = _read(cache, pages, jnp.asarray(params.value, jnp.int32))
    reads, tree, owner = fence(reads, cache.tree, cache.owner)
    cache = dataclasses.replace(cache, tree=tree, owner=owner)
    cache, verdict = _judge(cache, reads, pages, params)
    cache, result = _commit(cache, reads, pages, verdict, params)
    return settle(cache, first(result))


def check_insert(config: CacheConfig, params: InsertParams) -> None:
    """Refuse parameters of a wrong shape while tracing.

    Raises:
      ValueError: the key's shape is wrong, or `value` does not fit it.
    """
    check_key(params.key, config)
    pages = params.key.token_ids.shape[-1] // config.page_size
    wanted = (*params.key.token_ids.shape[:-1], pages)
    if jnp.shape(params.value) != wanted:
        raise ValueError(
            f"value has shape {jnp.shape(params.value)}; wanted {wanted}, one FULL "
            "page for each page of the key. Use page_table(match, alloc)."
        )


class _Reads(NamedTuple):
    """All that is read before the first write; arrays are [1, pages] unless noted."""

    tree: jax.Array  # [2]: pages that the tree holds, pages before a bad token
    node: jax.Array  # proposed nodes
    free_ways: jax.Array  # bit mask of each page's bucket
    held: jax.Array  # FULL pages of the proposed nodes
    extra: dict  # field -> what else they hold, see `adopt`
    fresh: jax.Array  # free nodes, for the new pages in order
    owner: jax.Array  # who owns the caller's entries
    generation: jax.Array  # of the free nodes
    num_children: jax.Array  # [1, 1] of the node that the new pages hang on


class _Verdict(NamedTuple):
    """How much of a key stands; arrays are [1, 1] unless noted."""

    old: jax.Array  # pages that the tree holds
    cut: jax.Array  # pages that it will hold
    prev: jax.Array  # pages that the caller shares already
    attach: jax.Array  # node that the new pages hang on
    is_stale: jax.Array  # the tree lost pages that the caller shares
    node: jax.Array  # [1, pages] old and new nodes
    slot: jax.Array  # [1, pages] table slot for each new page, or NULL
    status: jax.Array  # []


def _read(cache: CacheState, pages: KeyPages, value) -> _Reads:
    """Read whatever the insert depends on."""
    config, tree, counters = cache.config, cache.tree, cache.counters
    full = component_rules(config)[0]
    length = pages.node.shape[1]
    page = page_index(length)
    names = extra_fields(config)
    also = [full.value_field, *names]
    ok, bad_token, (held, *extra) = verify(tree, pages, pages.node, also)
    old, before_bad = first_two(~ok, bad_token)
    # New nodes in the order of the pages: the k-th new page takes the k-th free node.
    rank = jnp.clip(page - old, 0, length - 1)
    fresh = free_lists.front(cache.free_ids, counters, config, Ring.NODES, rank)
    attach = jnp.where(old > 0, _pick(pages.node, old - 1), ROOT)
    nodes = num_rows(tree.fields)
    places = [GENERATION * nodes + fresh, NUM_CHILDREN * nodes + attach]
    read = tree.fields.at[jnp.concatenate(places, axis=1)].get(**IN_BOUNDS)
    entry = _entry(config, value)
    return _Reads(
        tree=jnp.concatenate([old, before_bad], axis=1),
        node=pages.node,
        free_ways=pages.free_ways,
        held=held,
        extra=dict(zip(names, extra, strict=True)),
        fresh=fresh,
        owner=cache.owner.at[entry].get(**IN_BOUNDS),
        generation=read[:, :-1],
        num_children=read[:, -1:],
    )


def _pick(x, place):
    """One entry of [1, pages] as [1, 1]."""
    place = jnp.clip(place[0, 0], 0, x.shape[1] - 1)
    return jax.lax.dynamic_slice(x, (jnp.int32(0), place), (1, 1))


def _entry(config: CacheConfig, value):
    """Owner entries of FULL pages."""
    return owner_entry(config, ComponentType.FULL, value)[1]


def _judge(cache: CacheState, reads: _Reads, pages: KeyPages, params: InsertParams):
    """Decide how much of the key stands.

    Returns:
      ``(cache, verdict)``; claims may be left in the table, see `place_key`.
    """
    config, counters = cache.config, cache.counters
    page = page_index(reads.node.shape[1])
    value = jnp.asarray(params.value, jnp.int32)
    num_pages = jnp.minimum(pages.num_pages[:, None], reads.tree[:, 1:])
    old = jnp.minimum(reads.tree[:, :1], num_pages)
    is_new = (page >= old) & (page < num_pages)
    wants = is_new & (reads.node == NULL)
    pages = pages._replace(node=reads.node, free_ways=reads.free_ways)
    table, slot, is_twin, is_second = place_key(cache.tree.table, pages, wants, value)
    theirs = reads.owner == Owner.REQUEST
    owner = cache.owner
    if is_second is None:  # too many pages to compare all pairs
        place = jnp.where(is_new & theirs, _entry(config, value), owner.shape[0])
        owner, is_first = first_touch(owner, (place,), page)
        is_second = ~is_first
    theirs = theirs & ~is_second
    has_way = wants & (slot != NULL) & ~is_twin
    has_node = page - old < free_lists.size(counters, Ring.NODES)
    # The first page that fails says why: the lowest code is the first page's.
    reason = jnp.where(~has_way, _CROWDED, jnp.where(~theirs, _NOT_OWNED, _NO_NODE))
    fails = is_new & ~(has_way & theirs & has_node)
    code = jnp.min(jnp.where(fails, page * 4 + reason, num_pages * 4), -1)[:, None]
    prev = jnp.asarray(params.prev_prefix_len, jnp.int32).reshape(1, 1)
    prev_pages = jnp.maximum(prev, 0) // config.page_size
    is_stale = old < jnp.minimum(prev_pages, num_pages)
    cut = jnp.where(is_stale, old, code >> 2)
    reason = jnp.where(is_stale, 0, code & 3)
    attach = jnp.where(old > 0, _pick(reads.node, old - 1), ROOT)
    status = (
        pages.status
        | flag(reason == _CROWDED, Status.TABLE_FULL)
        | flag(reason == _NOT_OWNED, Status.NOT_OWNED)
        | flag(reason == _NO_NODE, Status.NODES_EXHAUSTED)
        | flag(num_pages < pages.num_pages[:, None], Status.BAD_TOKEN)
        | flag(is_stale, Status.STALE_PREFIX)
        | flag(prev < 0, Status.BAD_LENGTH)
    )
    # Computed once: XLA would do it anew for each of the many values to write.
    bounds = jnp.concatenate([old, cut, attach], axis=1)
    bounds = jax.lax.optimization_barrier(bounds)
    old, cut, attach = bounds[:, :1], bounds[:, 1:2], bounds[:, 2:]
    node = jnp.where(page < old, reads.node, reads.fresh)
    tree = dataclasses.replace(cache.tree, table=table)
    cache = dataclasses.replace(cache, tree=tree, owner=owner)
    verdict = _Verdict(old, cut, prev_pages, attach, is_stale, node, slot, status)
    return cache, verdict


# Why a page does not go in; 0 is no reason.
_CROWDED, _NOT_OWNED, _NO_NODE = 1, 2, 3


def _commit(cache: CacheState, reads: _Reads, pages, verdict: _Verdict, params):
    """Write everything that stands, once, and report it."""
    config, counters, tree = cache.config, cache.counters, cache.tree
    page = page_index(reads.node.shape[1])
    value = jnp.asarray(params.value, jnp.int32)
    in_tree = page < verdict.cut
    kept = in_tree & (page >= verdict.old)
    node = verdict.node
    bounds = (verdict.old, verdict.cut, verdict.prev, verdict.is_stale)
    cache, adoptions = adopt(cache, reads.extra, params, bounds, params.key.length)
    target = jnp.where(kept, node, tree.tokens.shape[0] + page)
    tree = dataclasses.replace(
        tree,
        fields=_put_fields(cache, reads, pages, verdict, value, adoptions),
        tokens=tree.tokens.at[target].set(pages.tokens, unique_indices=True, **DROP),
        table=put_entries(tree.table, verdict.slot, kept, node, pages.fingerprint),
    )
    entry = jnp.where(kept, _entry(config, value), cache.owner.shape[0])
    owner = cache.owner.at[entry].set(int(Owner.TREE), **DROP)
    owner = settle_owner(owner, adoptions)
    status = verdict.status
    counts = {}
    for adoption in adoptions:
        status = status | adoption.status
        counts |= adoption.counts
    num_new = (verdict.cut - verdict.old)[0, 0]
    elapsed = page.shape[1] + 1
    high = counters[Counter.CLOCK] + elapsed >= CLOCK_LIMIT
    counters = bump(
        counters,
        clock=elapsed,
        evictable__0=num_new,
        table_overflows=(verdict.status & int(Status.TABLE_FULL) != 0),
        status=status | flag(high, Status.CLOCK_HIGH),
        **counts,
        **free_lists.taken(counters, config, Ring.NODES, num_new),
    )
    ours = jnp.where(page < verdict.old, reads.held, value)
    duplicate = in_tree & (page >= verdict.prev) & (ours != value) & (value > 0)
    flags = kept.astype(jnp.int32) | duplicate.astype(jnp.int32) << 3
    exists = committed = jnp.zeros_like(verdict.old)
    for adoption in adoptions:
        bit = int(adoption.rules.type)
        flags = flags | adoption.taken.astype(jnp.int32) << bit
        flags = flags | adoption.duplicate.astype(jnp.int32) << (bit + 3)
        if not adoption.rules.entry_is_page:
            exists = adoption.exists.astype(jnp.int32)
            committed = jnp.any(adoption.taken, -1, keepdims=True).astype(jnp.int32)
    size = config.page_size
    scalars = [verdict.old * size, verdict.cut * size, exists, committed]
    result = InsertResult(
        path=jnp.where(in_tree, node, NULL),
        page_table=jnp.where(in_tree, ours, value),
        page_flags=flags,
        scalars=jnp.concatenate(scalars, axis=1),
    )
    cache = dataclasses.replace(cache, tree=tree, owner=owner, counters=counters)
    return cache, result


def _put_fields(cache, reads: _Reads, pages, verdict: _Verdict, value, adoptions):
    """Write the fields of new nodes, and the recency of all, in one scatter."""
    full = component_rules(cache.config)[0]
    fields = cache.tree.fields
    nodes, length = num_rows(fields), reads.node.shape[1]
    page = page_index(length)
    node, old, cut = verdict.node, verdict.old, verdict.cut
    clock = cache.counters[Counter.CLOCK].reshape(1, 1)
    kept = (page >= old) & (page < cut)
    record = {
        PARENT: above(node),
        DEPTH: page + 1,
        NUM_CHILDREN: (page + 1 < cut).astype(jnp.int32),  # new pages are a chain
        GENERATION: reads.generation + 1,
        TABLE_SLOT: verdict.slot,
        full.value_field: value,
    }
    for k in range(NAMESPACE_WORDS):
        record[NAMESPACE + k] = pages.namespace[:, k, None]
    rows = [(name, kept, x) for name, x in record.items()]
    rows.append((full.stamp_field, page < cut, full.stamps(clock, length)))
    for adoption in adoptions:
        rows += adoption.rows
    # The node that the first new page hangs on has one more child: the last row.
    rows.append((NUM_CHILDREN, (page == 0) & (cut > old), reads.num_children + 1))
    names = np.array([name for name, _, _ in rows], np.int32)[:, None]
    row = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    written = kept
    for k, (_, mask, _) in enumerate(rows):
        if mask is not kept:
            written = jnp.where(row == k, mask, written)
    place = jnp.where(row == len(rows) - 1, verdict.attach, node)
    place = names * nodes + place
    nowhere = fields.shape[0] + row * length + page
    place = jnp.where(written, place, nowhere)
    values = [jnp.broadcast_to(x, page.shape) for _, _, x in rows]
    # Pieces of a few rows: XLA for CPU fuses no longer concatenation.
    pieces = [jnp.concatenate(values[i : i + 4]) for i in range(0, len(values), 4)]
    values = jnp.concatenate(jax.lax.optimization_barrier(pieces))
    return fields.at[place].set(values, unique_indices=True, **DROP)
