"""Invariants of the tree: free lists, topology, keys and the children table."""

import jax.numpy as jnp
import numpy as np

from ..config import WAYS
from ..ops.hashing import chain_hashes
from ..state import Counter, Ring
from ..tree_arrays import NULL, ROOT
from .differences import differences, offenders, repeated
from .host import HostCache

# Tokens that are hashed at once, which bounds the memory of a check.
_HASH_TOKENS = 1 << 22


def free_rings(c: HostCache):
    """Each free list holds ids of its range, each once; head and size fit the ring."""
    for ring in Ring:
        name, capacity = f"free list {ring.name}", len(c.rings[ring])
        head = c.counter(Counter.RING_HEAD + ring)
        size = c.counter(Counter.RING_SIZE + ring)
        if not 0 <= head < max(capacity, 1):
            yield f"{name} has head {head}, wanted 0 to {capacity - 1}"
        if not 0 <= size <= capacity:
            yield f"{name} has size {size}, wanted 0 to {capacity}"
        ids = c.free(ring)
        first = int(ring != Ring.LEDGER)
        is_bad = (ids < first) | (ids >= first + capacity)
        wanted = f"wanted ids from {first} to {first + capacity - 1}"
        yield from offenders(f"{name} at place", np.arange(size), is_bad, ids, wanted)
        yield from repeated("id", ids, f"on {name}")


def free_nodes(c: HostCache):
    """A node has no parent exactly when it is on the free list."""
    listed = np.zeros(c.parent.shape, bool)
    listed[c.free(Ring.NODES)] = True
    nodes = np.flatnonzero(listed & c.alive)
    yield from differences("free node", nodes, c.parent[nodes], NULL)
    for node in np.flatnonzero(~listed & ~c.alive):
        yield f"node {node} has no parent and is not on the free list"


def root(c: HostCache):
    """The root is its own parent at depth 0; it holds no value and no lock."""
    yield from differences("root", [ROOT], c.parent[:1], ROOT)
    facts = (
        ("depth of the root", c.depth[ROOT], 0),
        ("table slot of the root", c.table_slot[ROOT], NULL),
    )
    for what, found, wanted in facts:
        if found != wanted:
            yield f"the {what} is {found}, wanted {wanted}"
    components = range(len(c.value))
    yield from differences("value of component", components, c.value[:, ROOT], NULL)
    yield from differences("lock of component", components, c.lock_ref[:, ROOT], 0)


def parents(c: HostCache):
    """The parent of a live node is alive."""
    nodes = c.live_nodes
    above = c.parent[nodes]
    outside = (above < 0) | (above >= len(c.parent))
    is_bad = outside | ~c.alive[np.where(outside, ROOT, above)]
    yield from offenders("node", nodes, is_bad, above, "wanted a live parent")


def depths(c: HostCache):
    """A node is one page deeper than its parent."""
    nodes = c.live_nodes
    yield from differences("node", nodes, c.depth[nodes], c.depth[c.parent[nodes]] + 1)


def child_counts(c: HostCache):
    """`num_children` equals the count of live children."""
    nodes = np.flatnonzero(c.alive)
    count = np.bincount(c.parent[c.live_nodes], minlength=len(c.parent))
    yield from differences("node", nodes, c.num_children[nodes], count[nodes])


def namespaces(c: HostCache):
    """A node is in its parent's namespace."""
    nodes = c.live_nodes[c.depth[c.live_nodes] > 1]
    other = c.namespace[nodes] != c.namespace[c.parent[nodes]]
    for node in nodes[other.any(1)]:
        yield (
            f"node {node} has {c.namespace[node].tolist()}, wanted "
            f"{c.namespace[c.parent[node]].tolist()} of its parent {c.parent[node]}"
        )


def tokens(c: HostCache):
    """Token ids of live nodes are in [0, 2^31)."""
    nodes = c.live_nodes
    lowest = c.tokens[nodes].min(1, initial=0)
    yield from offenders("node", nodes, lowest < 0, lowest, "wanted ids of at least 0")


def siblings(c: HostCache):
    """No two live siblings have equal tokens and namespace."""
    nodes = c.live_nodes
    parts = (c.parent[nodes, None], c.namespace[nodes], c.tokens[nodes])
    keys = np.concatenate(parts, axis=1)
    _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    twin_of = nodes[first[group.ravel()]] if nodes.size else nodes
    for node, twin in zip(nodes, twin_of, strict=True):
        if node != twin:
            yield f"nodes {twin} and {node} under {c.parent[node]} have the same page"


def dead_nodes(c: HostCache):
    """A free node holds nothing: no depth, child, table slot, value, lock or stamp."""
    nodes = np.flatnonzero(~c.alive)
    fields = (
        ("depth", c.depth, NULL),
        ("num_children", c.num_children, 0),
        ("table_slot", c.table_slot, NULL),
        *((f"value[{k}]", row, NULL) for k, row in enumerate(c.value)),
        *((f"lock_ref[{k}]", row, 0) for k, row in enumerate(c.lock_ref)),
        *((f"last_access[{k}]", row, NULL) for k, row in enumerate(c.last_access)),
    )
    for name, row, wanted in fields:
        yield from differences(f"{name} of free node", nodes, row[nodes], wanted)


def table_entries(c: HostCache):
    """The children table names live nodes only, each where its node says."""
    slot = np.flatnonzero(c.entries.ravel() != NULL)
    node = c.entries.ravel()[slot]
    outside = (node <= ROOT) | (node >= len(c.parent))
    is_bad = outside | ~c.alive[np.where(outside, ROOT, node)]
    yield from offenders("table slot", slot, is_bad, node, "wanted a live node")
    yield from differences("node", node, c.table_slot[node], slot)


def table_slots(c: HostCache):
    """Every live node but the root stands in the children table."""
    nodes = c.live_nodes
    slot = c.table_slot[nodes]
    outside = (slot < 0) | (slot >= c.entries.size)
    yield from offenders("node", nodes, outside, slot, "wanted a slot of the table")
    yield from differences("table slot", slot, c.entries.ravel()[slot], nodes)


def table_fingerprints(c: HostCache):
    """A bucket holds each fingerprint at most once."""
    bucket, way = np.nonzero(c.entries != NULL)
    pairs = np.stack([bucket, c.fingerprints[bucket, way]], 1)
    values, counts = np.unique(pairs, axis=0, return_counts=True)
    for place, fingerprint in values[counts > 1]:
        yield f"bucket {place} holds fingerprint {fingerprint} more than once"


def table_hashes(c: HostCache):
    """Every live node is found under the chained hash of its own key."""
    nodes = c.live_nodes
    slot = c.table_slot[nodes]
    bucket, fingerprint = _hashes(c)
    yield from differences("bucket of node", nodes, slot // WAYS, bucket[nodes])
    found = c.fingerprints.ravel()[slot]
    yield from differences("fingerprint of node", nodes, found, fingerprint[nodes])


def _hashes(c: HostCache) -> np.ndarray:
    """[2, nodes] bucket and fingerprint of every live node, computed afresh."""
    found = np.zeros((2, len(c.parent)), np.int64)
    leaves = c.live_nodes[c.num_children[c.live_nodes] == 0]
    # Powers of two, so that the shapes that JAX compiles stay few.
    pages = _power_of_two(int(c.depth[leaves].max(initial=1)))
    most = max(1, _HASH_TOKENS // (pages * c.config.page_size))
    lanes = min(_power_of_two(leaves.size), _power_of_two(most))
    for start in range(0, leaves.size, lanes):
        some = leaves[start : start + lanes]
        path = np.full((lanes, pages), ROOT)
        node, row = some, np.arange(some.size)
        while node.size:  # one step up for all leaves at once
            path[row, c.depth[node] - 1] = node
            node = c.parent[node]
            row, node = row[node != ROOT], node[node != ROOT]
        space = np.zeros((lanes, 4), np.int32)
        space[: some.size] = c.namespace[some]
        keys = jnp.asarray(c.tokens[path])
        hashes = chain_hashes(keys, jnp.asarray(space), c.config)
        found[:, path] = np.stack([np.asarray(h) for h in hashes])
    return found


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


INVARIANTS = (
    free_rings,
    free_nodes,
    root,
    parents,
    depths,
    child_counts,
    namespaces,
    tokens,
    siblings,
    dead_nodes,
    table_entries,
    table_slots,
    table_fingerprints,
    table_hashes,
)
