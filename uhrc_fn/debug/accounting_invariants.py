"""Invariants of what is owned, locked, counted and next to go."""

import numpy as np

from ..config import NUM_COMPONENTS, ComponentType
from ..state import (
    ANCHOR,
    HELD,
    PLAN_NODE,
    PLAN_STAMP,
    SERIAL,
    Counter,
    Owner,
    Ring,
)
from ..tree_arrays import NULL, ROOT
from .differences import differences, offenders, repeated
from .host import HostCache

_POOLS = ("FULL page", "SWA page", "slot")
FULL = ComponentType.FULL


def values(c: HostCache):
    """Live nodes hold a FULL page, and only values of the cache's components."""
    nodes = c.live_nodes
    for k in ComponentType:
        value = c.value[k, nodes]
        what = f"{k.name} value of node"
        if k not in c.config.components:
            yield from differences(what, nodes, value, NULL)
            continue
        capacity = c.config.capacities[k]
        is_bad = (value < 1) | (value > capacity)
        if k != FULL:
            is_bad &= value != NULL
        yield from offenders(what, nodes, is_bad, value, f"wanted 1 to {capacity}")


def tree_entries(c: HostCache):
    """No page or slot is on two nodes."""
    for k in ComponentType:
        yield from repeated(_POOLS[k], c.value[k, c.held(k)], "in the tree")


def pool_totals(c: HostCache):
    """Free, tree and request entries of each pool add up to its capacity."""
    for k in ComponentType:
        free = c.counter(Counter.RING_SIZE + k)
        tree = len(c.held(k))
        if c.requests is None:
            requests = int(np.sum(c.owners[k] == Owner.REQUEST))
        else:
            requests = len(c.requests[k])
        if free + tree + requests != c.config.capacities[k]:
            yield (
                f"{k.name} has {free} free + {tree} tree + {requests} request, wanted "
                f"{c.config.capacities[k]} in all"
            )


def owners(c: HostCache):
    """The owner table says FREE for free entries and TREE for those on nodes."""
    for k in ComponentType:
        wanted = np.full(c.config.capacities[k] + 1, int(Owner.REQUEST))
        wanted[c.free(Ring(k))] = Owner.FREE
        wanted[c.value[k, c.held(k)]] = Owner.TREE
        wanted[0] = Owner.DUMMY
        for i in np.flatnonzero(c.owners[k] != wanted):
            found = c.owners[k][i]
            name = Owner(found).name if found in list(Owner) else found
            yield f"{_POOLS[k]} {i} has {name}, wanted {Owner(wanted[i]).name}"


def request_entries(c: HostCache):
    """Requests own exactly what the owner table gives them, each entry once."""
    for k in ComponentType if c.requests is not None else ():
        ids = c.requests[k]  # type: ignore[index]
        capacity = c.config.capacities[k]
        outside = (ids < 1) | (ids > capacity)
        lane = np.arange(len(ids))
        what = f"{_POOLS[k]} of requests at place"
        yield from offenders(what, lane, outside, ids, f"wanted 1 to {capacity}")
        yield from repeated(_POOLS[k], ids, "with requests")
        for i in ids[c.owners[k][ids] != Owner.REQUEST]:
            name = Owner(c.owners[k][i]).name
            yield f"{_POOLS[k]} {i} of a request has owner {name}, wanted REQUEST"


def lock_signs(c: HostCache):
    """Locks are never negative."""
    nodes = c.live_nodes
    for k in ComponentType:
        lock = c.lock_ref[k, nodes]
        yield from offenders(
            f"{k.name} lock of node", nodes, lock < 0, lock, "wanted at least 0"
        )


def lock_nesting(c: HostCache):
    """A parent, but for the root, has at least the FULL lock of each child."""
    nodes = c.live_nodes[c.depth[c.live_nodes] > 1]
    lock, above = c.lock_ref[FULL, nodes], c.lock_ref[FULL, c.parent[nodes]]
    for i in np.flatnonzero(above < lock):
        yield (
            f"node {nodes[i]} has {lock[i]} locks, its parent "
            f"{c.parent[nodes[i]]} {above[i]}"
        )


def lock_covers(c: HostCache):
    """The FULL lock of a node is at least any other lock of it."""
    nodes = c.live_nodes
    for k in ComponentType:
        lock, full = c.lock_ref[k, nodes], c.lock_ref[FULL, nodes]
        wanted = "wanted at most its FULL lock"
        yield from offenders(f"{k.name} lock of node", nodes, lock > full, lock, wanted)


def ledger(c: HostCache):
    """A ledger row is free, or a receipt with a serial given once and a live anchor."""
    serial = c.ledger[SERIAL]
    is_free = np.zeros(serial.shape, bool)
    is_free[c.free(Ring.LEDGER)] = True
    rows = np.arange(len(serial))
    yield from differences("serial of free row", rows[is_free], serial[is_free], 0)
    rows, serial = rows[~is_free], serial[~is_free]
    following = c.counter(Counter.NEXT_SERIAL)
    is_bad = (serial < 1) | (serial >= following)
    yield from offenders(
        "serial of row", rows, is_bad, serial, f"wanted 1 to {following - 1}"
    )
    yield from repeated("serial", serial, "in the ledger")
    anchor, held = c.ledger[ANCHOR, rows], c.ledger[HELD, rows]
    outside = (anchor < 0) | (anchor >= len(c.parent))
    is_bad = outside | ~c.alive[np.where(outside, ROOT, anchor)]
    yield from offenders("anchor of row", rows, is_bad, anchor, "wanted a live node")
    known = sum(1 << k for k in c.config.components)
    yield from offenders(
        "components of row", rows, held & ~known != 0, held, f"wanted bits of {known}"
    )


def receipts(c: HostCache):
    """The live receipts explain every lock, exactly."""
    nodes = np.arange(len(c.parent))
    explained = _receipt_locks(c)
    for k in ComponentType:
        yield from differences(
            f"{k.name} lock of node", nodes, c.lock_ref[k], explained[k]
        )


def _receipt_locks(c: HostCache) -> np.ndarray:
    """[3, nodes] locks that the ledger's rows amount to."""
    # Pages that a lock holds, counted from its anchor upwards.
    reach = (len(c.parent), c.config.window_pages, 1)
    count = np.zeros((NUM_COMPONENTS, len(c.parent)), np.int64)
    rows = np.flatnonzero(c.ledger[SERIAL] != 0)
    for k in ComponentType:
        holds = (c.ledger[HELD, rows] >> k) & 1 != 0
        node = c.ledger[ANCHOR, rows[holds]]
        for _ in range(reach[k]):  # one step up for all receipts at once
            node = node[node != ROOT]
            if not node.size:
                break
            np.add.at(count[k], node, 1)
            node = c.parent[node]
    return count


def tree_sizes(c: HostCache):
    """Evictable and protected add up to what the tree owns, by component."""
    total = c.by_component(Counter.EVICTABLE) + c.by_component(Counter.PROTECTED)
    owned = [np.sum(c.owners[k] == Owner.TREE) for k in ComponentType]
    names = [k.name for k in ComponentType]
    yield from differences("evictable + protected of", names, total, owned)


def evictable_sizes(c: HostCache):
    """Evictable counts unlocked values of the tree, protected counts locked ones."""
    names = [k.name for k in ComponentType]
    is_locked = [c.lock_ref[k, c.held(k)] > 0 for k in ComponentType]
    evictable = c.by_component(Counter.EVICTABLE)
    yield from differences(
        "evictable of", names, evictable, [np.sum(~x) for x in is_locked]
    )
    protected = c.by_component(Counter.PROTECTED)
    yield from differences(
        "protected of", names, protected, [np.sum(x) for x in is_locked]
    )


def stamps(c: HostCache):
    """Every value is stamped, before the clock, and no two of a component alike."""
    for k in ComponentType:
        nodes = c.held(k)
        stamp = c.last_access[k, nodes]
        is_bad = (stamp == NULL) | (stamp >= c.clock)
        wanted = f"wanted a stamp below the clock {c.clock}"
        yield from offenders(f"{k.name} stamp of node", nodes, is_bad, stamp, wanted)
        yield from repeated(f"{k.name} stamp", stamp, "in the tree")


def stamp_order(c: HostCache):
    """A parent has a higher FULL stamp than its child, which goes before it."""
    nodes = c.live_nodes[c.depth[c.live_nodes] > 1]
    stamp, above = c.last_access[FULL, nodes], c.last_access[FULL, c.parent[nodes]]
    for i in np.flatnonzero(above <= stamp):
        yield (
            f"node {nodes[i]} has stamp {stamp[i]}, its parent "
            f"{c.parent[nodes[i]]} {above[i]}"
        )


def victim_plan(c: HostCache):
    """Every unlocked page stamped up to the plan's limit is planned, in stamp order."""
    head, limit = c.counter(Counter.PLAN_HEAD), c.counter(Counter.PLAN_LIMIT)
    if not 0 <= head <= c.victim_plan.shape[1]:
        yield f"head has {head}, wanted 0 to {c.victim_plan.shape[1]}"
    stamp = c.last_access[FULL]
    nodes = c.live_nodes
    due = nodes[(c.lock_ref[FULL, nodes] == 0) & (stamp[nodes] <= limit)]
    due = due[np.argsort(stamp[due])]
    node, planned = c.victim_plan[PLAN_NODE, head:], c.victim_plan[PLAN_STAMP, head:]
    inside = (node > ROOT) & (node < len(stamp))
    node, planned = node[inside], planned[inside]
    is_due = np.isin(node, due) & (planned == stamp[node])
    node = node[is_due]
    for missing in due[~np.isin(due, node)]:
        yield f"node {missing}, stamp {stamp[missing]}, is not planned from {head} on"
    if len(node) != len(due) or np.any(node != due):
        yield f"the plan has nodes {node.tolist()}, wanted {due.tolist()}"


INVARIANTS = (
    values,
    tree_entries,
    pool_totals,
    owners,
    request_entries,
    lock_signs,
    lock_nesting,
    lock_covers,
    ledger,
    receipts,
    tree_sizes,
    evictable_sizes,
    stamps,
    stamp_order,
    victim_plan,
)
