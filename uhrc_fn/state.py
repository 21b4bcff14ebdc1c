"""`CacheState`: the tree, the free lists, the owners and the receipt ledger.

Dispatch of a jitted call costs about two microseconds a donated array, so small
things share arrays: the five free lists are rings in one vector, the three owner
tables another, and every scalar lives in `counters` under a name.
"""

import dataclasses
import enum

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from .config import CacheConfig, ComponentType
from .tree_arrays import GENERATION, TreeArrays, init_tree


class Owner(enum.IntEnum):
    """Who owns a page or slot; row 0 of a pool is the dummy, nobody's."""

    FREE = 0
    TREE = 1
    REQUEST = 2
    DUMMY = 3


class Ring(enum.IntEnum):
    """Free lists, first in first out; the first three are the components' pools."""

    FULL = 0
    SWA = 1
    RECURRENT = 2
    NODES = 3
    LEDGER = 4


class Counter(enum.IntEnum):
    """Places in `CacheState.counters`; the vectors have one entry a ring, component."""

    CLOCK = 0
    STATUS = 1
    NEXT_SERIAL = 2
    TABLE_OVERFLOWS = 3
    PLAN_HEAD = 4
    PLAN_LIMIT = 5
    RING_HEAD = 6  # 5 rings
    RING_SIZE = 11  # 5 rings
    EVICTABLE = 16  # 3 components, in pool entries
    PROTECTED = 19  # 3 components


_NUM_COUNTERS = 22

# Rows of `ledger`.
SERIAL, ANCHOR, HELD = range(3)

# Rows of `victim_plan`.
PLAN_NODE, PLAN_STAMP = range(2)


class CacheState(eqx.Module):
    """Everything the cache knows, as at most 16 arrays; donate it to every update."""

    tree: TreeArrays
    free_ids: Int32[Array, " rings"]
    """The rings of `Ring`, one after another."""
    owner: Int32[Array, " entries"]
    """`Owner` of each FULL page, SWA page and slot, pools one after another."""
    ledger: Int32[Array, " 3 receipts"]
    """Live lock receipts: serial (0 is none), anchor node, components held (bits)."""
    victim_plan: Int32[Array, " 2 plan"]
    """Nodes in eviction order with the stamps that make the entries valid."""
    counters: Int32[Array, " 22"]
    config: CacheConfig = eqx.field(static=True)

    @property
    def clock(self):
        """Recency tick that the next refresh starts from."""
        return self.counters[..., Counter.CLOCK]

    @property
    def status(self):
        """Sticky `Status` bits."""
        return self.counters[..., Counter.STATUS]

    @property
    def table_overflows(self):
        """Inserts cut because a page could not be indexed in its bucket."""
        return self.counters[..., Counter.TABLE_OVERFLOWS]

    @property
    def evictable(self):
        """[3] unlocked pool entries of the tree, by component."""
        return self.counters[..., Counter.EVICTABLE : Counter.PROTECTED]

    @property
    def protected(self):
        """[3] locked pool entries of the tree, by component."""
        return self.counters[..., Counter.PROTECTED : _NUM_COUNTERS]

    @property
    def num_free(self):
        """[3] free pool entries, by component."""
        start = Counter.RING_SIZE
        return self.counters[..., start : start + len(ComponentType)]

    @property
    def num_live_nodes(self):
        """Nodes in use, the root not counted."""
        size = self.counters[..., Counter.RING_SIZE + Ring.NODES]
        return ring_capacity(self.config, Ring.NODES) - size

    @property
    def page_owner(self):
        """[num_pages + 1] `Owner` of each FULL page."""
        return self._owner_of(ComponentType.FULL)

    @property
    def swa_page_owner(self):
        """[num_swa_pages + 1] `Owner` of each SWA page."""
        return self._owner_of(ComponentType.SWA)

    @property
    def slot_owner(self):
        """[num_recurrent_slots + 1] `Owner` of each recurrent slot."""
        return self._owner_of(ComponentType.RECURRENT)

    def _owner_of(self, component: ComponentType):
        start = owner_offset(self.config, component)
        return self.owner[..., start : start + self.config.capacities[component] + 1]


def ring_capacity(config: CacheConfig, ring: Ring) -> int:
    """Entries that `ring` can hold."""
    sizes = (*config.capacities, config.num_nodes, config.max_live_receipts)
    return sizes[ring]


def ring_offset(config: CacheConfig, ring: Ring) -> int:
    """Where `ring` starts in `CacheState.free_ids`."""
    return sum(ring_capacity(config, Ring(r)) for r in range(ring))


def owner_offset(config: CacheConfig, component: int) -> int:
    """Where a pool starts in `CacheState.owner`; each has a dummy entry first."""
    return sum(config.capacities[c] + 1 for c in range(component))


def owner_entry(config: CacheConfig, component: int, ids):
    """Where `CacheState.owner` keeps ids of a pool: ``(is_id, entry)``.

    What is no id gets the dummy's entry, which no request owns.
    """
    is_id = (ids > 0) & (ids <= config.capacities[component])
    return is_id, owner_offset(config, component) + jnp.where(is_id, ids, 0)


def init(config: CacheConfig) -> CacheState:
    """Build an empty cache.

    Args:
      config: its settings; see `CacheConfig`, which validates them.

    Returns:
      A `CacheState` whose pages, slots, nodes and receipts are all free.

    Raises:
      ValueError: `config` is no `CacheConfig`.
    """
    if not isinstance(config, CacheConfig):
        raise ValueError(
            f"init got {type(config).__name__}; wanted a CacheConfig. "
            "Build one with uhrc_fn.CacheConfig(page_size=..., num_pages=...)."
        )
    sizes = [ring_capacity(config, ring) for ring in Ring]
    # Ledger rows count from 0; every other id leaves 0 to the root or the dummy.
    free = [
        np.arange(n) + (ring != Ring.LEDGER)
        for ring, n in zip(Ring, sizes, strict=True)
    ]
    owner = [
        np.r_[int(Owner.DUMMY), np.zeros(n)].astype(np.int32) for n in config.capacities
    ]
    counters = np.zeros(_NUM_COUNTERS, np.int32)
    counters[Counter.RING_SIZE : Counter.RING_SIZE + len(Ring)] = sizes
    counters[Counter.NEXT_SERIAL] = 1
    counters[Counter.PLAN_LIMIT] = -1
    plan = np.full((2, config.plan_size), -1, np.int32)
    return CacheState(
        tree=init_tree(config),
        free_ids=jnp.asarray(np.concatenate(free), jnp.int32),
        owner=jnp.asarray(np.concatenate(owner)),
        ledger=jnp.zeros((3, config.max_live_receipts), jnp.int32),
        victim_plan=jnp.asarray(plan),
        counters=jnp.asarray(counters),
        config=config,
    )


def reset(cache: CacheState) -> CacheState:
    """Forget everything, locks included; the same buffers when donated.

    Generations and serials go on, so that older matches and receipts are stale.
    """
    fresh = init(cache.config)
    serial = cache.counters[Counter.NEXT_SERIAL]
    counters = fresh.counters.at[int(Counter.NEXT_SERIAL)].set(serial)
    fields = fresh.tree.by_field.at[GENERATION].set(cache.tree.generation)
    tree = dataclasses.replace(fresh.tree, fields=fields.reshape(-1))
    return dataclasses.replace(fresh, tree=tree, counters=counters)


def bump(counters, **changes):
    """Add to counters by name; ``status`` bits are OR-ed instead.

    A value is a scalar, or a vector for `EVICTABLE` and the like; a ``name__k``
    keyword adds to entry k of such a vector. All of it is one elementwise step.
    """
    status = changes.pop("status", None)
    place = jnp.arange(_NUM_COUNTERS, dtype=jnp.int32)
    result = counters
    for name, value in changes.items():
        name, _, entry = name.partition("__")
        start = Counter[name.upper()] + (int(entry) if entry else 0)
        value = jnp.asarray(value, jnp.int32)
        for k in range(value.size):
            change = value if value.ndim == 0 else value[k]
            result = result + jnp.where(place == start + k, change, 0)
    if status is not None:
        bits = jnp.where(place == int(Counter.STATUS), status, 0)
        result = result | bits
    return result


def flag(condition, bit):
    """`bit` where `condition` holds anywhere, else 0."""
    return jnp.where(jnp.any(condition), int(bit), 0).astype(jnp.int32)
