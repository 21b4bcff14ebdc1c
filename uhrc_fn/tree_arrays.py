"""The tree as device arrays: topology, keys, recency and component slots.

Axes, once and for all:

- ``nodes``: usable nodes + 1. Row 0 is the root; it holds no page.
- ``page``: tokens of one page. One node holds exactly one page.
- ``rows``: rows of the children table, each four buckets of 16 fingerprints followed
  by 16 node ids, 128 words in all (see `probe`).

Nothing here knows a pool, or a component by name: `component_data` has one row a
component, in the order of `ComponentType`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from .config import (
    BUCKETS_PER_ROW,
    NUM_COMPONENTS,
    WAYS,
    CacheConfig,
)

NULL = -1
ROOT = 0

# Rows of `topology`.
PARENT, DEPTH, NUM_CHILDREN, GENERATION, TABLE_SLOT, NAMESPACE = range(6)
NAMESPACE_WORDS = 4
_TOPOLOGY_ROWS = NAMESPACE + NAMESPACE_WORDS

# Rows of `component_data` come in three groups, one row a component in each.
VALUE, LOCK_REF, LAST_ACCESS = 0, NUM_COMPONENTS, 2 * NUM_COMPONENTS

_BUCKET_WORDS = 2 * WAYS
_ROW_WORDS = BUCKETS_PER_ROW * _BUCKET_WORDS


class TreeArrays(eqx.Module):
    """Nodes, their keys and the table that proposes children; row 0 is the root."""

    topology: Int32[Array, " 10 nodes"]
    """Parent, depth, children, generation, table slot and namespace of each node."""
    component_data: Int32[Array, " 9 nodes"]
    """Value, lock_ref and last_access, three components each."""
    tokens: Int32[Array, " nodes page"]
    """The page's token ids: the exact key."""
    table: Int32[Array, " rows 128"]
    """Fingerprints and node ids by bucket; a node id of `NULL` is a free entry."""

    @property
    def parent(self) -> Int32[Array, " nodes"]:
        """Parent node; the root's is the root, a free node's is `NULL`."""
        return self.topology[..., PARENT, :]

    @property
    def depth(self) -> Int32[Array, " nodes"]:
        """Pages from the root to the end of a node."""
        return self.topology[..., DEPTH, :]

    @property
    def num_children(self) -> Int32[Array, " nodes"]:
        """Live children; 0 on a leaf."""
        return self.topology[..., NUM_CHILDREN, :]

    @property
    def generation(self) -> Int32[Array, " nodes"]:
        """How often a node id has been used; tells a reused id from the old one."""
        return self.topology[..., GENERATION, :]

    @property
    def table_slot(self) -> Int32[Array, " nodes"]:
        """Where the table names a node: bucket * 16 + way."""
        return self.topology[..., TABLE_SLOT, :]

    @property
    def namespace(self) -> Int32[Array, " nodes 4"]:
        """16 bytes that keep tenants and adapters apart."""
        return jnp.swapaxes(self.topology[..., NAMESPACE:, :], -1, -2)

    @property
    def value(self) -> Int32[Array, " 3 nodes"]:
        """FULL page, SWA page, RECURRENT slot; `NULL` is a tombstone."""
        return self.component_data[..., VALUE:LOCK_REF, :]

    @property
    def lock_ref(self) -> Int32[Array, " 3 nodes"]:
        """References by component."""
        return self.component_data[..., LOCK_REF:LAST_ACCESS, :]

    @property
    def last_access(self) -> Int32[Array, " 3 nodes"]:
        """Stamp of the last refresh by component; `NULL` where never stamped."""
        return self.component_data[..., LAST_ACCESS:, :]

    @property
    def host_value(self) -> Int32[Array, " 3 nodes"]:
        """Reserved for a host tier; always `NULL`."""
        return jnp.full_like(self.value, NULL)

    @property
    def host_lock_ref(self) -> Int32[Array, " 3 nodes"]:
        """Reserved for a host tier; always 0."""
        return jnp.zeros_like(self.lock_ref)


def init_tree(config: CacheConfig) -> TreeArrays:
    """Build the arrays of an empty tree: the root alone."""
    nodes = config.num_nodes + 1  # type: ignore[operator]
    topology = jnp.zeros((_TOPOLOGY_ROWS, nodes), jnp.int32)
    topology = topology.at[PARENT, 1:].set(NULL).at[DEPTH, 1:].set(NULL)
    topology = topology.at[TABLE_SLOT].set(NULL)
    component_data = jnp.full((3 * NUM_COMPONENTS, nodes), NULL, jnp.int32)
    component_data = component_data.at[LOCK_REF:LAST_ACCESS].set(0)
    rows = config.num_buckets // BUCKETS_PER_ROW
    return TreeArrays(
        topology=topology,
        component_data=component_data,
        tokens=jnp.zeros((nodes, config.page_size), jnp.int32),
        table=jnp.full((rows, _ROW_WORDS), NULL, jnp.int32),
    )


def take(array, row, index):
    """Read ``array[row, index]``; every index must be a real one (clip first)."""
    # A two-dimensional gather: slicing the row first would copy it whole.
    return array.at[row, index].get(mode="promise_in_bounds")


def put(array, row, index, value, **kwargs):
    """Write ``array[row, index]``; `NULL` and anything out of range is dropped."""
    return array.at[row, index].set(
        value, mode="drop", wrap_negative_indices=False, **kwargs
    )


def at_rows(rows, index):
    """Pair every entry of `index` with each of `rows`, on a new leading axis."""
    rows = jnp.asarray(rows, jnp.int32)
    return jnp.expand_dims(rows, tuple(range(1, index.ndim + 1))), index[None]


def fence(reads, *arrays):
    """Order `reads` before any later write into `arrays`.

    XLA copies an array that one program both reads and scatters into, unless the
    write is known to come last.
    """
    reads, arrays = jax.lax.optimization_barrier((reads, arrays))
    return reads, *arrays


def settle(cache, result):
    """Close an operation: what follows reads and writes only after it.

    Without it, a read of one operation may be moved behind a write of the next one,
    for which XLA keeps a copy of the whole array.
    """
    return jax.lax.optimization_barrier((cache, result))


def probe(table, bucket, fingerprint):
    """Find `fingerprint` in `bucket` and report what the bucket holds.

    Args:
      table: children table.
      bucket: int32 [..., pages].
      fingerprint: int32 [..., pages].

    Returns:
      ``(node, free)``: the proposed node id or `NULL`, and a bit mask of free ways.
    """
    buckets = table.reshape(-1, _BUCKET_WORDS)
    entry = buckets.at[bucket].get(mode="promise_in_bounds")
    prints, ids = entry[..., :WAYS], entry[..., WAYS:]
    # A bucket holds each fingerprint at most once, so a maximum finds it.
    hit = (prints == fingerprint[..., None]) & (ids != NULL)
    node = jnp.max(jnp.where(hit, ids, NULL), axis=-1)
    way = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    free = jnp.where(ids == NULL, jnp.left_shift(1, way), 0)
    free = jnp.sum(free, axis=-1, dtype=jnp.int32)
    return node, free


def entry_index(slot):
    """Place of the fingerprint of table `slot` as ``(row, column)``; the id is 16 on.

    A slot of `NULL` gives a row of `NULL`, which writes drop.
    """
    bucket, way = slot >> 4, slot & (WAYS - 1)
    row = jnp.where(slot < 0, NULL, bucket >> 2)
    return row, (bucket & (BUCKETS_PER_ROW - 1)) * _BUCKET_WORDS + way
