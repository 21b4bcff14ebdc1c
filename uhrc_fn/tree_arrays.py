"""The tree as device arrays: topology, keys, recency and component slots.

Axes, once and for all:

- ``nodes``: usable nodes + 1. Node 0 is the root; it holds no page.
- ``page``: tokens of one page. One node holds exactly one page.
- ``rows``: rows of the children table, each four buckets of 16 fingerprints followed
  by 16 node ids, 128 words in all (see `probe`).

Nothing here knows a pool, or a component by name: values, locks and stamps have one
row a component, in the order of `ComponentType`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from .by_platform import by_platform
from .config import (
    BUCKETS_PER_ROW,
    NUM_COMPONENTS,
    WAYS,
    CacheConfig,
)

NULL = -1
ROOT = 0

# How gathers and scatters treat their indices. -1 would wrap to the last entry unless
# told not to; what must not be written goes past the end, or is `NULL`.
IN_BOUNDS = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
DROP = {"mode": "drop", "wrap_negative_indices": False}

# Fields of a node, in the order in which `TreeArrays.fields` holds them. The last nine
# come in threes, one a component.
PARENT, DEPTH, NUM_CHILDREN, GENERATION, TABLE_SLOT, NAMESPACE = range(6)
NAMESPACE_WORDS = 4
VALUE = NAMESPACE + NAMESPACE_WORDS
LOCK_REF = VALUE + NUM_COMPONENTS
LAST_ACCESS = LOCK_REF + NUM_COMPONENTS
NUM_FIELDS = LAST_ACCESS + NUM_COMPONENTS

_BUCKET_WORDS = 2 * WAYS
_ROW_WORDS = BUCKETS_PER_ROW * _BUCKET_WORDS


class TreeArrays(eqx.Module):
    """Nodes, their keys and the table that proposes children; node 0 is the root."""

    fields: Int32[Array, " fields*nodes"]
    """All fields of all nodes, field by field; read them under their names below.

    One flat vector: gathers and scatters of several fields are then one operation
    with one index each, on every backend.
    """
    tokens: Int32[Array, " nodes page"]
    """The page's token ids: the exact key."""
    table: Int32[Array, " rows 128"]
    """Fingerprints and node ids by bucket; a node id of `NULL` is a free entry."""

    @property
    def by_field(self) -> Int32[Array, " fields nodes"]:
        """`fields` with one row a field."""
        return self.fields.reshape(*self.fields.shape[:-1], NUM_FIELDS, -1)

    @property
    def parent(self) -> Int32[Array, " nodes"]:
        """Parent node; the root's is the root, a free node's is `NULL`."""
        return self.by_field[..., PARENT, :]

    @property
    def depth(self) -> Int32[Array, " nodes"]:
        """Pages from the root to the end of a node."""
        return self.by_field[..., DEPTH, :]

    @property
    def num_children(self) -> Int32[Array, " nodes"]:
        """Live children; 0 on a leaf."""
        return self.by_field[..., NUM_CHILDREN, :]

    @property
    def generation(self) -> Int32[Array, " nodes"]:
        """How often a node id has been used; tells a reused id from the old one."""
        return self.by_field[..., GENERATION, :]

    @property
    def table_slot(self) -> Int32[Array, " nodes"]:
        """Where the table names a node: bucket * 16 + way."""
        return self.by_field[..., TABLE_SLOT, :]

    @property
    def namespace(self) -> Int32[Array, " nodes 4"]:
        """16 bytes that keep tenants and adapters apart."""
        return jnp.swapaxes(self.by_field[..., NAMESPACE:VALUE, :], -1, -2)

    @property
    def value(self) -> Int32[Array, " 3 nodes"]:
        """FULL page, SWA page, RECURRENT slot; `NULL` is a tombstone."""
        return self.by_field[..., VALUE:LOCK_REF, :]

    @property
    def lock_ref(self) -> Int32[Array, " 3 nodes"]:
        """References by component."""
        return self.by_field[..., LOCK_REF:LAST_ACCESS, :]

    @property
    def last_access(self) -> Int32[Array, " 3 nodes"]:
        """Stamp of the last refresh by component; `NULL` where never stamped."""
        return self.by_field[..., LAST_ACCESS:, :]

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
    nodes = config.num_nodes + 1
    fields = np.full((NUM_FIELDS, nodes), NULL, np.int32)
    fields[[NUM_CHILDREN, GENERATION]] = 0
    fields[NAMESPACE:VALUE] = 0
    fields[LOCK_REF:LAST_ACCESS] = 0
    fields[[PARENT, DEPTH], ROOT] = ROOT
    rows = config.num_buckets // BUCKETS_PER_ROW
    return TreeArrays(
        fields=jnp.asarray(fields.reshape(-1)),
        tokens=jnp.zeros((nodes, config.page_size), jnp.int32),
        table=jnp.full((rows, _ROW_WORDS), NULL, jnp.int32),
    )


def num_rows(fields) -> int:
    """Nodes that `fields` has room for, the root included."""
    return fields.shape[0] // NUM_FIELDS


def row_of(fields, field: int):
    """All nodes' values of one field."""
    start = field * num_rows(fields)
    return jax.lax.slice(fields, (start,), (start + num_rows(fields),))


def place_of(fields, field, node):
    """Where `field` of `node` lies in `fields`; past the end for no such node."""
    nodes = num_rows(fields)
    is_node = (node >= 0) & (node < nodes)
    return jnp.where(is_node, field * nodes + node, fields.shape[0])


def take(fields, field, node):
    """Read `field` of `node`; every node must be a real one (clip first)."""
    place = field * num_rows(fields) + node
    return fields.at[place].get(**IN_BOUNDS)


def put_many(fields, names, node, values):
    """Write several fields of each node at once; `values` has one row a name.

    `NULL` and any node out of range is dropped.
    """
    places = jnp.stack([place_of(fields, name, node) for name in names])
    values = jnp.stack([jnp.broadcast_to(v, node.shape) for v in values])
    return fields.at[places].set(values, **DROP)


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
    return _probe(table, bucket, fingerprint)


def _probe_default(table, bucket, fingerprint):
    # Hashes first, then rows, then the comparison: fused, XLA for CPU would compute
    # each hash anew for every way, and run it all word by word.
    bucket, fingerprint = jax.lax.optimization_barrier((bucket, fingerprint))
    buckets = table.reshape(-1, _BUCKET_WORDS)
    entry = jax.lax.optimization_barrier(buckets.at[bucket].get(**IN_BOUNDS))
    prints, ids = entry[..., :WAYS], entry[..., WAYS:]
    # A bucket holds each fingerprint at most once, so a maximum finds it.
    hit = (prints == fingerprint[..., None]) & (ids != NULL)
    node = jnp.max(jnp.where(hit, ids, NULL), axis=-1)
    way = jax.lax.broadcasted_iota(jnp.int32, ids.shape, ids.ndim - 1)
    free = jnp.where(ids == NULL, jnp.left_shift(1, way), 0)
    free = jnp.sum(free, axis=-1, dtype=jnp.int32)
    return node, free


def _probe_tpu(table, bucket, fingerprint):
    """Read whole rows: for rows of one bucket the whole table is laid out anew."""
    row = table.at[bucket >> 2].get(**IN_BOUNDS)
    # Each fingerprint beside its id; every other group of 16 lanes is a bucket's.
    prints, ids = row[..., :-WAYS], row[..., WAYS:]
    lane = np.arange(ids.shape[-1], dtype=np.int32)
    lane = lane.reshape((1,) * (ids.ndim - 1) + lane.shape)
    here = lane // WAYS == 2 * (bucket & (BUCKETS_PER_ROW - 1))[..., None]
    hit = here & (prints == fingerprint[..., None])
    node = jnp.max(jnp.where(hit, ids, NULL), axis=-1)
    free = jnp.where(here & (ids == NULL), np.int32(1) << lane % WAYS, 0)
    return node, jnp.sum(free, axis=-1, dtype=jnp.int32)


_probe = by_platform(_probe_default, tpu=_probe_tpu)


def put_entries(table, slot, is_kept, node, fingerprint):
    """Settle claimed table slots: kept ones name their node, the others are free.

    Args:
      table: children table.
      slot: int32 [...], `NULL` for none.
      is_kept: bool [...].
      node: int32 [...].
      fingerprint: int32 [...].
    """
    row, column = entry_index(slot)
    columns = jnp.stack([column, column + WAYS])
    words = jnp.stack([fingerprint, jnp.where(is_kept, node, NULL)])
    rows = jnp.where(row < 0, table.shape[0], row)
    return table.at[jnp.broadcast_to(rows, columns.shape), columns].set(words, **DROP)


def free_entries(table, slot):
    """Free the entries of table slots; `NULL` is dropped."""
    row, column = entry_index(slot)
    # `NULL` for every slot, worked out: a call pays for each constant of its program.
    return table.at[row, column + WAYS].set(jnp.minimum(slot, NULL), **DROP)


def entry_index(slot):
    """Place of the fingerprint of table `slot` as ``(row, column)``; the id is 16 on.

    A slot of `NULL` gives a row of `NULL`, which writes drop.
    """
    bucket, way = slot >> 4, slot & (WAYS - 1)
    row = jnp.where(slot < 0, NULL, bucket >> 2)
    return row, (bucket & (BUCKETS_PER_ROW - 1)) * _BUCKET_WORDS + way
