"""Insert a batch: all pages of all keys are placed at once.

Every page without a node claims a free way of its bucket; equal pages try the same
ways, so they meet, and the first of them leads. Leaders get nodes in sequential
order, are written to their (still free) nodes, and one verification then covers old,
new and shared pages alike. What fails is never committed: its claims are wiped and
its node stays on the free list.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..config import CLOCK_LIMIT, ComponentType
from ..params import InsertParams, InsertResult
from ..state import CacheState, Counter, Owner, Ring, bump, flag, owner_offset
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
    TreeArrays,
    fence,
    place_of,
    put_entries,
    put_many,
    settle,
    take,
)
from .claim import claim
from .insert import check_insert, insert
from .match import refresh
from .path import (
    KeyPages,
    above,
    first_false,
    lane_or,
    page_index,
    propose,
    verify,
)
from .place import place


def insert_batch(
    cache: CacheState, params: InsertParams
) -> tuple[CacheState, InsertResult]:
    """Insert a batch of keys, with exactly the result of one after another.

    Requests go in together up to the first that something keeps from going in whole
    (a bad entry, a full bucket, no node); from that one on they go in one by one,
    which in an ordinary batch is nobody. With SWA or RECURRENT all go one by one.
    """
    check_insert(cache.config, params)
    params = jax.tree.map(jnp.asarray, params)
    num_requests = params.value.shape[0]
    prev = jnp.broadcast_to(params.prev_prefix_len, (num_requests,))
    params = dataclasses.replace(params, prev_prefix_len=prev)
    row_of = lambda request: jax.tree.map(lambda x: x[request], params)
    if num_requests == 1:
        cache, result = insert(cache, row_of(0))
        return cache, jax.tree.map(lambda x: x[None], result)
    if len(cache.config.components) == 1:
        cache, result, num_done = _insert_together(cache, params)
    else:
        _, shapes = jax.eval_shape(insert, cache, row_of(0))
        shape = lambda x: (num_requests, *x.shape)
        empty = lambda x: jnp.zeros_like(cache.counters, x.dtype, shape(x))
        result, num_done = jax.tree.map(empty, shapes), jnp.int32(0)

    def insert_one(request, carry):
        cache, results = carry
        row = row_of(request)
        cache, result = insert(cache, row)
        results = jax.tree.map(lambda xs, x: xs.at[request].set(x), results, result)
        return cache, results

    return jax.lax.fori_loop(num_done, num_requests, insert_one, (cache, result))


class _Plan(NamedTuple):
    """Who takes which way and node; arrays are [requests, pages]."""

    turn: jax.Array  # order of the lane in the batch
    node: jax.Array  # proposed, new or shared node, or NULL
    leads: jax.Array  # lanes whose page would be a new node
    claimed: jax.Array  # table slot that the lane won, or NULL


def _insert_together(cache: CacheState, params: InsertParams):
    """Insert a batch up to its first irregular request.

    Returns:
      ``(cache, result, requests done)``.
    """
    pages = _usable(propose(cache.tree, params.key, cache.config))
    (pages, counters), tree = fence((pages, cache.counters), cache.tree)
    cache = dataclasses.replace(cache, tree=tree, counters=counters)
    table, plan = _plan(cache, pages)
    tree = _write_keys(dataclasses.replace(tree, table=table), plan, pages)
    verdict = _judge(cache, tree, plan, pages, params)
    cache = dataclasses.replace(cache, tree=tree)
    return _commit(cache, plan, pages, verdict, params)


def _usable(pages: KeyPages) -> KeyPages:
    """Cut keys before a page with a token id out of range."""
    page = page_index(pages.node.shape[1])
    bad = jnp.any(lane_or(pages.tokens) < 0, axis=-1)
    bad = bad & (page < pages.num_pages[:, None])
    num_pages = jnp.minimum(pages.num_pages, first_false(~bad))
    status = pages.status | flag(bad, Status.BAD_TOKEN)
    return pages._replace(num_pages=num_pages, status=status)


def _plan(cache: CacheState, pages: KeyPages):
    """Give a table way and a node to every page that has no node.

    Returns:
      ``(table, plan)``.
    """
    turn = jnp.arange(pages.node.size, dtype=jnp.int32).reshape(pages.node.shape)
    wants = (pages.node == NULL) & (
        page_index(pages.node.shape[1]) < pages.num_pages[:, None]
    )
    table, leader, claimed = place(cache.tree.table, pages, wants)
    counters = cache.counters
    leads = leader == turn
    order = jnp.cumsum(leads.reshape(-1), dtype=jnp.int32).reshape(leads.shape) - 1
    leads = leads & (order < free_lists.size(counters, Ring.NODES))
    new = free_lists.front(cache.free_ids, counters, cache.config, Ring.NODES, order)
    new = jnp.where(leads, new, NULL)
    led = new.reshape(-1).at[jnp.maximum(leader, 0)].get(**IN_BOUNDS)
    node = jnp.where(wants, jnp.where(leader == NULL, NULL, led), pages.node)
    return table, _Plan(turn, node, leads, claimed)


def _write_keys(tree: TreeArrays, plan: _Plan, pages: KeyPages) -> TreeArrays:
    """Write keys of new pages to their nodes, which are still on the free list."""
    nodes = tree.tokens.shape[0]
    target = jnp.where(plan.leads, plan.node, nodes + plan.turn)
    tokens = tree.tokens.at[target].set(pages.tokens, unique_indices=True, **DROP)
    space = [pages.namespace[:, k, None] for k in range(NAMESPACE_WORDS)]
    names = [PARENT, *range(NAMESPACE, NAMESPACE + NAMESPACE_WORDS)]
    fields = put_many(tree.fields, names, target, [above(plan.node), *space])
    return dataclasses.replace(tree, tokens=tokens, fields=fields)


class _Verdict(NamedTuple):
    """How much of each key stands, and what a result reports of it."""

    num_done: jax.Array  # requests that are dealt with
    old: jax.Array  # [requests] pages that the tree held before
    cut: jax.Array  # [requests] pages that it will hold
    prev: jax.Array  # [requests] pages that the caller shares already
    kept: jax.Array  # [requests, pages] lanes to commit
    entry: jax.Array  # [requests, pages] owner entries to settle, or past the end
    owner: jax.Array  # the owner table, claims in it
    status: jax.Array
    num_crowded: jax.Array


def _judge(cache, tree, plan: _Plan, pages: KeyPages, params) -> _Verdict:
    """Decide how much of each key stands: its pages, links and the caller's entries."""
    config = cache.config
    page = page_index(plan.node.shape[1])
    ok, _, _ = verify(tree, pages, plan.node)
    value = jnp.asarray(params.value, jnp.int32)
    nowhere = cache.owner.shape[0]
    is_id = (value > 0) & (value <= config.num_pages)
    entry = jnp.where(is_id, owner_offset(config, ComponentType.FULL) + value, nowhere)
    theirs = cache.owner.at[jnp.minimum(entry, nowhere - 1)].get(**IN_BOUNDS)
    is_theirs = is_id & (theirs == Owner.REQUEST)
    entry = jnp.where(plan.leads & is_theirs, entry, nowhere)
    (entry, is_theirs), owner = fence((entry, is_theirs), cache.owner)
    # The second lane of the same id loses. A lane behind the cut may win an id that
    # it will not use, but then every later lane of the key is behind the cut too.
    owner, winner = claim(owner, (entry,), plan.turn)
    entry = jnp.where(winner == plan.turn, entry, nowhere)
    lacks = plan.leads & (entry == nowhere)
    # A page that an earlier request of the batch leads is already there for this one.
    old, cut = first_false(jnp.stack([ok & ~plan.leads, ok & ~lacks]))
    prev = jnp.asarray(params.prev_prefix_len, jnp.int32)
    bad_prev = prev < 0
    prev = jnp.maximum(prev, 0) // config.page_size
    is_stale = old < jnp.minimum(prev, pages.num_pages)
    cut = jnp.where(is_stale, old, cut)
    is_short = cut < pages.num_pages
    request = jnp.arange(cut.shape[0], dtype=jnp.int32)
    num_done = first_false(~is_short)
    done = request < num_done
    short = is_short & ~is_stale & done
    at_cut = page == cut[:, None]
    no_node = (pages.node == NULL) & (plan.node == NULL) & (plan.claimed != NULL)
    # A bad entry is the caller's fault even where no node was left to give it.
    not_owned = (ok & lacks) | (no_node & ~is_theirs)
    not_owned = short & jnp.any(at_cut & not_owned, -1)
    no_node = short & jnp.any(at_cut & no_node, -1) & ~not_owned
    crowded = short & ~no_node & ~not_owned
    status = (
        pages.status
        | flag(is_stale & done, Status.STALE_PREFIX)
        | flag(no_node, Status.NODES_EXHAUSTED)
        | flag(not_owned, Status.NOT_OWNED)
        | flag(crowded, Status.TABLE_FULL)
        | flag(bad_prev & done, Status.BAD_LENGTH)
    )
    kept = plan.leads & (page < cut[:, None]) & done[:, None]
    num_crowded = jnp.sum(crowded, dtype=jnp.int32)
    return _Verdict(num_done, old, cut, prev, kept, entry, owner, status, num_crowded)


def _commit(cache, plan: _Plan, pages: KeyPages, verdict: _Verdict, params):
    """Write everything that stands and report it."""
    config, tree, counters = cache.config, cache.tree, cache.counters
    num_done, old, cut, prev, kept, entry, owner, status, num_crowded = verdict
    num_requests, num_pages = plan.node.shape
    request = jnp.arange(num_requests, dtype=jnp.int32)
    page = page_index(num_pages)
    done = request < num_done
    in_tree = (page < cut[:, None]) & done[:, None]
    path = jnp.where(in_tree, plan.node, NULL)
    value = jnp.asarray(params.value, jnp.int32)
    owner_now = jnp.where(kept, int(Owner.TREE), int(Owner.REQUEST))
    owner = owner.at[entry].set(owner_now, **DROP)
    # The table: kept claims name their node, the others are wiped.
    table = put_entries(tree.table, plan.claimed, kept, plan.node, pages.fingerprint)
    # What does not stand stays free, so it must not keep the parent written to it.
    full = component_rules(config)[0]
    names = [PARENT, DEPTH, TABLE_SLOT, full.value_field]
    parent = above(plan.node)
    record = [parent, jnp.broadcast_to(page + 1, parent.shape), plan.claimed, value]
    record = [jnp.where(kept, x, NULL) for x in record]
    led = jnp.where(plan.leads, plan.node, NULL)
    fields = put_many(tree.fields, names, led, record)
    grown = jnp.stack(
        [
            place_of(fields, GENERATION, jnp.where(kept, plan.node, NULL)),
            place_of(fields, NUM_CHILDREN, jnp.where(kept, parent, NULL)),
        ]
    )
    fields = fields.at[grown].add(1, **DROP)
    held = take(fields, full.value_field, jnp.maximum(path, ROOT))
    held, fields = fence(jnp.where(in_tree, held, NULL), fields)
    clock = counters[Counter.CLOCK] + request * (num_pages + 1)
    hit = jnp.where(done, cut, 0)[:, None]
    fields = refresh(cache, fields, path, hit, {full.type: held}, clock)
    tree = dataclasses.replace(tree, table=table, fields=fields)
    num_new = jnp.sum(kept, dtype=jnp.int32)
    elapsed = num_done * (num_pages + 1)
    high = flag(counters[Counter.CLOCK] + elapsed >= CLOCK_LIMIT, Status.CLOCK_HIGH)
    counters = bump(
        counters,
        clock=elapsed,
        evictable__0=num_new,
        table_overflows=num_crowded,
        status=status | high,
        **free_lists.taken(counters, config, Ring.NODES, num_new),
    )
    duplicate = (
        in_tree & (page >= prev[:, None]) & ~kept & (held != value) & (value > 0)
    )
    result = InsertResult(
        path=path,
        page_table=jnp.where(in_tree, held, value),
        page_flags=kept.astype(jnp.int32) | duplicate.astype(jnp.int32) << 3,
        scalars=jnp.stack(
            [
                old * config.page_size,
                cut * config.page_size,
                jnp.zeros_like(cut),
                jnp.zeros_like(cut),
            ],
            -1,
        ),
    )
    cache = dataclasses.replace(cache, tree=tree, owner=owner, counters=counters)
    cache, (result, num_done) = settle(cache, (result, num_done))
    return cache, result, num_done
