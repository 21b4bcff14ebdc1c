"""Insert: the tree adopts a key's new pages.

All pages of all requests are placed at once. Every page without a node claims a free
way of its bucket; equal pages try the same ways, so they meet, and the first of them
leads. Leaders get nodes in sequential order, are written to their (still free) nodes,
and one verification then covers old, new and shared pages alike. What fails is never
committed: its claims are wiped and its node stays on the free list.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import free_lists
from ..components import component_rules
from ..config import CLOCK_LIMIT, WAYS, CacheConfig, ComponentType
from ..params import InsertParams, InsertResult
from ..state import CacheState, Counter, Owner, Ring, bump, flag, owner_offset
from ..status import Status
from ..tree_arrays import (
    DEPTH,
    GENERATION,
    NAMESPACE,
    NAMESPACE_WORDS,
    NULL,
    NUM_CHILDREN,
    PARENT,
    ROOT,
    TABLE_SLOT,
    TreeArrays,
    at_rows,
    entry_index,
    fence,
    put,
    settle,
    take,
)
from .claim import claim
from .match import refresh
from .path import (
    KeyPages,
    check_key,
    first,
    first_false,
    one,
    page_index,
    propose,
    verified_run,
)
from .place import place


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
    _check(cache.config, params)
    cache, result, _ = _insert_together(cache, one(params))
    return cache, first(result)


def insert_batch(
    cache: CacheState, params: InsertParams
) -> tuple[CacheState, InsertResult]:
    """Insert a batch of keys, with exactly the result of one after another.

    Requests go in together up to the first that something keeps from going in whole
    (a bad entry, a full bucket, no node); from that one on they go in one by one,
    which in an ordinary batch is nobody.
    """
    _check(cache.config, params)
    params = jax.tree.map(jnp.asarray, params)
    num_requests = params.value.shape[0]
    prev = jnp.broadcast_to(params.prev_prefix_len, (num_requests,))
    params = dataclasses.replace(params, prev_prefix_len=prev)
    if num_requests == 1:
        cache, result, _ = _insert_together(cache, params)
        return cache, result
    cache, result, num_done = _insert_together(cache, params)

    def insert_one(request, carry):
        cache, results = carry
        row = jax.tree.map(lambda x: x[request], params)
        cache, result = insert(cache, row)
        results = jax.tree.map(lambda xs, x: xs.at[request].set(x), results, result)
        return cache, results

    return jax.lax.fori_loop(num_done, num_requests, insert_one, (cache, result))


def _check(config: CacheConfig, params: InsertParams) -> None:
    check_key(params.key, config)
    pages = params.key.token_ids.shape[-1] // config.page_size
    wanted = (*params.key.token_ids.shape[:-1], pages)
    if jnp.shape(params.value) != wanted:
        raise ValueError(
            f"value has shape {jnp.shape(params.value)}; wanted {wanted}, one FULL "
            "page for each page of the key. Use page_table(match, alloc)."
        )


class _Plan(NamedTuple):
    """Who takes which way and node; arrays are [requests, pages]."""

    turn: jax.Array  # order of the lane in the batch
    node: jax.Array  # proposed, new or shared node, or NULL
    leads: jax.Array  # lanes whose page would be a new node
    claimed: jax.Array  # table slot that the lane won, or NULL


def _insert_together(cache: CacheState, params: InsertParams):
    """Insert a batch up to its first irregular request (a single one: as it goes).

    Returns:
      ``(cache, result, requests done)``.
    """
    config, tree = cache.config, cache.tree
    pages = propose(tree, params.key, config)
    (pages, counters), table, tokens, topology = fence(
        (pages, cache.counters), tree.table, tree.tokens, tree.topology
    )
    table, plan = _plan(cache, table, pages, counters)
    tree = dataclasses.replace(tree, table=table, tokens=tokens, topology=topology)
    tree = _write_keys(tree, plan, pages)
    cut, owner, kept, facts = _cut(cache, tree, plan, pages, params)
    cache = dataclasses.replace(cache, tree=tree, owner=owner, counters=counters)
    return _commit(cache, plan, pages, cut, kept, facts, params)


def _plan(cache: CacheState, table, pages: KeyPages, counters):
    """Give a table way and a node to every page that has no node.

    Returns:
      ``(table, plan)``.
    """
    turn = jnp.arange(pages.node.size, dtype=jnp.int32).reshape(pages.node.shape)
    wants = (pages.node == NULL) & (
        page_index(pages.node.shape[1]) < pages.num_pages[:, None]
    )
    table, leader, claimed = place(table, pages, wants)
    leads = leader == turn
    order = jnp.cumsum(leads.reshape(-1), dtype=jnp.int32).reshape(leads.shape) - 1
    leads = leads & (order < free_lists.size(counters, Ring.NODES))
    new = free_lists.front(cache.free_ids, counters, cache.config, Ring.NODES, order)
    new = jnp.where(leads, new, NULL)
    led = new.reshape(-1).at[jnp.maximum(leader, 0)].get(mode="promise_in_bounds")
    node = jnp.where(wants, jnp.where(leader == NULL, NULL, led), pages.node)
    return table, _Plan(turn, node, leads, claimed)


def _write_keys(tree: TreeArrays, plan: _Plan, pages: KeyPages) -> TreeArrays:
    """Write keys of new pages to their nodes, which are still on the free list."""
    nodes = tree.tokens.shape[0]
    target = jnp.where(plan.leads, plan.node, nodes + plan.turn).reshape(-1)
    tokens = tree.tokens.at[target].set(
        pages.tokens.reshape(-1, pages.tokens.shape[-1]),
        mode="drop",
        unique_indices=True,
        wrap_negative_indices=False,
    )
    parent = _shift(plan.node).reshape(-1)
    rows = [PARENT, *range(NAMESPACE, NAMESPACE + NAMESPACE_WORDS)]
    space = jnp.broadcast_to(pages.namespace[:, None], (*plan.node.shape, 4))
    space = jnp.moveaxis(space, -1, 0).reshape(4, -1)
    topology = put(
        tree.topology,
        *at_rows(rows, target),
        jnp.concatenate([parent[None], space]),
        unique_indices=True,
    )
    return dataclasses.replace(tree, tokens=tokens, topology=topology)


def _shift(node):
    """The node above each page: the root first."""
    return jnp.concatenate([jnp.zeros_like(node[:, :1]), node[:, :-1]], axis=1)


def _cut(cache, tree, plan: _Plan, pages: KeyPages, params: InsertParams):
    """Decide how much of each key stands: verify, then ask for ownership.

    Returns:
      ``(cut, owner, kept, facts)``: pages of each key that will be in the tree, the
      owner table with claims wiped, lanes to commit, and what a result reports.
    """
    config = cache.config
    page = page_index(plan.node.shape[1])
    run = verified_run(tree, pages, plan.node)
    # A page that an earlier request of the batch leads is already there for this one.
    old = jnp.minimum(run, first_false(~plan.leads))
    prev = jnp.asarray(params.prev_prefix_len, jnp.int32)
    bad_prev = prev < 0
    prev = jnp.maximum(prev, 0) // config.page_size
    is_stale = old < jnp.minimum(prev, pages.num_pages)
    value = jnp.asarray(params.value, jnp.int32)
    start = owner_offset(config, ComponentType.FULL)
    wanted = plan.leads & (page < run[:, None]) & ~is_stale[:, None]
    is_id = (value > 0) & (value <= config.num_pages)
    entry = jnp.where(wanted & is_id, start + value, NULL)
    theirs = cache.owner.at[jnp.maximum(entry, 0)].get(mode="promise_in_bounds")
    owned = (entry != NULL) & (theirs == Owner.REQUEST)
    entry = jnp.where(owned, entry, NULL)
    (entry, owned), owner = fence((entry, owned), cache.owner)
    owner, winner = claim(owner, (entry,), plan.turn)
    # The second lane of the same id loses, and wherever a lane is cut, so are those
    # after it: only then may an id seem taken by a lane that goes nowhere.
    owned = owned & (winner == plan.turn)
    lacks = wanted & ~owned
    cut = jnp.minimum(run, first_false(~lacks))
    cut = jnp.where(is_stale, old, cut)
    is_whole = (cut == pages.num_pages) & ~is_stale
    request = jnp.arange(cut.shape[0], dtype=jnp.int32)
    if cut.shape[0] == 1:
        num_done = jnp.int32(1)
    else:
        num_done = first_false(is_whole)
    kept = plan.leads & (page < cut[:, None]) & (request < num_done)[:, None]
    owner = owner.at[jnp.where(owned, entry, NULL)].set(
        jnp.where(kept, int(Owner.TREE), int(Owner.REQUEST)),
        mode="drop",
        wrap_negative_indices=False,
    )
    short = (cut < pages.num_pages) & ~is_stale & (request < num_done)
    at_cut = page == cut[:, None]
    no_node = short & jnp.any(
        at_cut & (pages.node == NULL) & (plan.node == NULL) & (plan.claimed != NULL), -1
    )
    not_owned = short & jnp.any(at_cut & lacks, -1)
    crowded = short & ~no_node & ~not_owned
    done = request < num_done
    status = (
        flag(is_stale & done, Status.STALE_PREFIX)
        | flag(no_node, Status.NODES_EXHAUSTED)
        | flag(not_owned, Status.NOT_OWNED)
        | flag(crowded, Status.TABLE_FULL)
        | flag(bad_prev & done, Status.BAD_LENGTH)
    )
    overflows = jnp.sum(crowded, dtype=jnp.int32)
    return cut, owner, kept, (num_done, old, prev, status, overflows)


def _commit(cache, plan: _Plan, pages: KeyPages, cut, kept, facts, params):
    """Write everything that stands and report it."""
    config, tree = cache.config, cache.tree
    num_done, old, prev, status, overflows = facts
    num_requests, num_pages = plan.node.shape
    request = jnp.arange(num_requests, dtype=jnp.int32)
    page = page_index(num_pages)
    in_tree = (page < cut[:, None]) & (request < num_done)[:, None]
    path = jnp.where(in_tree, plan.node, NULL)
    value = jnp.asarray(params.value, jnp.int32)
    nodes = tree.tokens.shape[0]
    target = jnp.where(kept, plan.node, nodes + plan.turn)

    # The table: kept claims name their node, the others are wiped.
    row, column = entry_index(plan.claimed)
    table = put(tree.table, row, column + WAYS, jnp.where(kept, plan.node, NULL))
    kept_row = jnp.where(kept, row, NULL)
    table = put(table, kept_row, column, pages.fingerprint)

    # What does not stand stays free, so it must not keep the parent written to it.
    led = jnp.where(plan.leads, plan.node, nodes + plan.turn)
    depth = jnp.broadcast_to(page + 1, led.shape)
    record = jnp.stack([_shift(plan.node), depth, plan.claimed])
    topology = put(
        tree.topology,
        *at_rows([PARENT, DEPTH, TABLE_SLOT], led),
        jnp.where(kept, record, NULL),
    )
    parent = jnp.where(kept, _shift(plan.node), nodes)
    topology = topology.at[
        at_rows([GENERATION, NUM_CHILDREN], target)[0], jnp.stack([target, parent])
    ].add(1, mode="drop", wrap_negative_indices=False)
    full = component_rules(config)[0]
    data = put(tree.component_data, full.value_row, target, value)
    held = take(data, full.value_row, jnp.maximum(path, ROOT))
    held = jnp.where(in_tree, held, NULL)
    (held, counters), data = fence((held, cache.counters), data)
    clock = counters[Counter.CLOCK] + request * (num_pages + 1)
    data = refresh(
        cache,
        data,
        path,
        jnp.where(request < num_done, cut, 0)[:, None],
        {full.type: held},
        clock,
    )
    tree = dataclasses.replace(
        tree, table=table, topology=topology, component_data=data
    )
    num_new = jnp.sum(kept, dtype=jnp.int32)
    elapsed = num_done * (num_pages + 1)
    high = flag(counters[Counter.CLOCK] + elapsed >= CLOCK_LIMIT, Status.CLOCK_HIGH)
    counters = bump(
        counters,
        clock=elapsed,
        evictable__0=num_new,
        table_overflows=overflows,
        status=pages.status | status | high,
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
    cache = dataclasses.replace(cache, tree=tree, counters=counters)
    cache, (result, num_done) = settle(cache, (result, num_done))
    return cache, result, num_done
