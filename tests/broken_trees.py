"""Ways to break the invariants of the tree, by the name of the invariant."""

import debug_trees
import numpy as np
from debug_trees import add, breaks, edit, edit_all, full_tree, recurrent_tree

from uhrc_fn.config import BUCKETS_PER_ROW, WAYS
from uhrc_fn.state import Counter, Ring
from uhrc_fn.tree_arrays import NULL


def table_place(slot) -> tuple[tuple, tuple]:
    """Where the table holds the fingerprint and the id of a slot."""
    place = int(slot) // WAYS * 2 * WAYS + int(slot) % WAYS
    width = 2 * WAYS * BUCKETS_PER_ROW
    return divmod(place, width), divmod(place + WAYS, width)


def table_places(cache, node: int) -> tuple[tuple, tuple]:
    """Where the table holds a node's fingerprint and its id."""
    return table_place(cache.tree.table_slot[node])


@breaks(full_tree, "head 8, wanted 0 to 7")
def free_rings__head(cache):
    return edit(cache, "counters", Counter.RING_HEAD + Ring.FULL, 8)


@breaks(full_tree, "free list LEDGER has size 4, wanted 0 to 3")
def free_rings__size(cache):
    return edit(cache, "counters", Counter.RING_SIZE + Ring.LEDGER, 4)


@breaks(full_tree, "free list NODES at place 0 has 9, wanted ids from 1 to 8")
def free_rings__range(cache):
    place = debug_trees.ring_place(cache.config, Ring.NODES, cache, 0)
    return edit(cache, "free_ids", place, 9)


@breaks(full_tree, "id 1 is on free list NODES 2 times, wanted once")
def free_rings__twice(cache):
    place = debug_trees.ring_place(cache.config, Ring.NODES, cache, 0)
    return edit(cache, "free_ids", place, 1)


@breaks(full_tree, "free node 8 has 3, wanted -1")
def free_nodes__parent(cache):
    return edit(cache, "tree.parent", 8, 3)


@breaks(full_tree, "node 1 has no parent and is not on the free list")
def free_nodes__lost(cache):
    return add(cache, Counter.RING_SIZE + Ring.NODES, -1)


@breaks(full_tree, "the depth of the root is 1, wanted 0")
def root__depth(cache):
    return edit(cache, "tree.depth", 0, 1)


@breaks(full_tree, "lock of component 0 has 2, wanted 0")
def root__lock(cache):
    return edit(cache, "tree.lock_ref", (0, 0), 2)


@breaks(full_tree, "node 6 has 8, wanted a live parent")
def parents__dead(cache):
    return edit(cache, "tree.parent", 6, 8)


@breaks(full_tree, "node 6 has 9, wanted a live parent")
def parents__outside(cache):
    return edit(cache, "tree.parent", 6, 9)


@breaks(full_tree, "node 4 has 2, wanted 3")
def depths(cache):
    return edit(cache, "tree.depth", 4, 2)


@breaks(full_tree, "node 3 has 1, wanted 2")
def child_counts(cache):
    return edit(cache, "tree.num_children", 3, 1)


@breaks(full_tree, "node 5 has [0, 0, 7, 0], wanted [0, 0, 0, 0] of its parent 3")
def namespaces(cache):
    return edit(cache, "tree.namespace", (5, 2), 7)


@breaks(full_tree, "node 6 has -5, wanted ids of at least 0")
def tokens(cache):
    return edit(cache, "tree.tokens", (6, 1), -5)


@breaks(full_tree, "nodes 4 and 5 under 3 have the same page")
def siblings(cache):
    return edit(cache, "tree.tokens", 5, cache.tree.tokens[4])


@breaks(full_tree, "num_children of free node 8 has 1, wanted 0")
def dead_nodes__children(cache):
    return edit(cache, "tree.num_children", 8, 1)


@breaks(full_tree, "last_access[0] of free node 1 has 3, wanted -1")
def dead_nodes__stamp(cache):
    return edit(cache, "tree.last_access", (0, 1), 3)


@breaks(recurrent_tree, "value[2] of free node 1 has 1, wanted -1")
def dead_nodes__snapshot(cache):
    return edit(cache, "tree.value", (2, 1), 1)


@breaks(full_tree, "has 8, wanted a live node")
def table_entries__dead(cache):
    return edit(cache, "tree.table", table_places(cache, 6)[1], 8)


@breaks(full_tree, "node 6 has")
def table_entries__elsewhere(cache):
    return edit(cache, "tree.table", table_places(cache, 5)[1], 6)


@breaks(full_tree, "has -1, wanted 5")
def table_slots__missing(cache):
    return edit(cache, "tree.table", table_places(cache, 5)[1], NULL)


@breaks(full_tree, "node 5 has -1, wanted a slot of the table")
def table_slots__none(cache):
    cache = edit(cache, "tree.table", table_places(cache, 5)[1], NULL)
    return edit(cache, "tree.table_slot", 5, NULL)


@breaks(full_tree, "more than once")
def table_fingerprints(cache):
    # Six nodes in four buckets: two of them share one.
    bucket = np.asarray(cache.tree.table_slot[2:8]) // WAYS
    twins = 2 + np.flatnonzero(bucket == np.bincount(bucket).argmax())[:2]
    one, other = (table_places(cache, int(node))[0] for node in twins)
    return edit(cache, "tree.table", one, cache.tree.table[other])


@breaks(full_tree, "fingerprint of node 4 has 77, wanted")
def table_hashes__fingerprint(cache):
    return edit(cache, "tree.table", table_places(cache, 4)[0], 77)


@breaks(full_tree, "bucket of node 4 has")
def table_hashes__bucket(cache):
    (row, column), ident = table_places(cache, 4)
    slot = int(cache.tree.table_slot[4])
    other = (
        slot // WAYS + 1
    ) % cache.config.num_buckets * WAYS + 15  # the last way, surely free
    print_at, id_at = table_place(other)
    return edit_all(
        cache,
        ("tree.table", ident, NULL),
        ("tree.table", print_at, cache.tree.table[row, column]),
        ("tree.table", id_at, 4),
        ("tree.table_slot", 4, other),
    )


@breaks(full_tree, "of node 6 has")
def table_hashes__tokens(cache):
    return edit(cache, "tree.tokens", (6, 0), 22)
