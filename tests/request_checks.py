"""What must hold of the cache and the request tables together, on the host.

`check_invariants` looks at the cache; these look at what requests believe of it: their
pages, locks and states. `live` is the running requests by row.
"""

import jax
import numpy as np
from harness import ring_ids
from request_states import same_state

from uhrc_fn import ComponentType
from uhrc_fn.state import Ring
from uhrc_fn.tree_arrays import NULL

FULL, SWA, RECURRENT = ComponentType


def node_keys(cache) -> dict[bytes, int]:
    """The tokens from the root on -> the node, of every live node."""
    tree = cache.tree
    nodes = np.flatnonzero(tree.value[FULL] != NULL)
    keys = {0: b""}
    for node in nodes[np.argsort(tree.depth[nodes])].tolist():
        keys[node] = keys[int(tree.parent[node])] + tree.tokens[node].tobytes()
    return {key: node for node, key in keys.items() if node}


def check_entries(cache, owned) -> None:
    """Active (from the tables) + tree + free are all entries of a pool, each once."""
    for component, ids in zip(ComponentType, owned, strict=True):
        capacity = cache.config.capacities[component]
        value = cache.tree.value[component]
        active, tree = ids[ids != 0], value[value != NULL]
        free = ring_ids(cache, Ring(component))
        assert len(active) + len(tree) + len(free) == capacity
        assert sorted([*active, *tree, *free]) == list(range(1, capacity + 1))


def check_locks(cache, nodes, live) -> None:
    """A page has a lock of each request that shares it, and no other.

    Of RECURRENT there is none between steps: a clone lets go of its snapshot.
    """
    size = cache.config.page_size
    wanted = np.zeros_like(cache.tree.lock_ref)
    for request in live.values():
        last = request.shared // size
        for page in range(last):
            node = nodes[request.tokens[: (page + 1) * size].tobytes()]
            inside = page >= last - cache.config.window_pages
            wanted[FULL, node] += 1
            wanted[SWA, node] += inside and request.has_window
    assert np.array_equal(cache.tree.lock_ref, wanted)
    receipts = cache.config.max_live_receipts - len(ring_ids(cache, Ring.LEDGER))
    assert receipts == len(live)


def check_tables(cache, nodes, tables, live) -> None:
    """Rows say what is written; where a prefix is shared, they hold the tree's pages.

    Whatever the next token attends to has a page.
    """
    size, window = cache.config.page_size, cache.config.sliding_window_size
    for row, request in live.items():
        assert tables.length[row] == request.written
        assert tables.protected_length[row] == request.shared
        for page in range(-(-request.written // size)):
            in_window = bool(window) and (page + 1) * size > request.written - window
            assert tables.pages[row, page] > 0
            assert not in_window or tables.swa_pages[row, page] > 0
            if page * size < request.shared:
                node = nodes[request.tokens[: (page + 1) * size].tobytes()]
                value = cache.tree.value[:, node]
                assert tables.pages[row, page] == value[FULL]
                assert not in_window or tables.swa_pages[row, page] == value[SWA]
    rest = np.array([row not in live for row in range(len(tables.length))])
    assert not any(np.any(leaf[rest]) for leaf in jax.tree.leaves(tables))


def check_snapshots(cache, nodes, tables, states, live) -> None:
    """A snapshot is the state after its node's very tokens, a running slot likewise."""
    for key, node in nodes.items():
        slot = cache.tree.value[RECURRENT, node]
        assert slot == NULL or same_state(states, slot, np.frombuffer(key, np.int32))
    for row, request in live.items():
        written = request.tokens[: request.written]
        assert not len(written) or same_state(states, tables.running_slot[row], written)
