"""A cache as NumPy arrays under the names that the debugging tools use."""

import dataclasses

import jax
import numpy as np

from ..config import NUM_COMPONENTS, WAYS, CacheConfig, ComponentType
from ..state import CacheState, Counter, Ring, owner_offset, ring_capacity, ring_offset
from ..status import Status
from ..tree_arrays import NULL


@dataclasses.dataclass(frozen=True)
class HostCache:
    """One cache, read once; every array is NumPy's."""

    config: CacheConfig
    parent: np.ndarray
    depth: np.ndarray
    num_children: np.ndarray
    table_slot: np.ndarray
    namespace: np.ndarray  # [nodes, 4]
    tokens: np.ndarray  # [nodes, page]
    value: np.ndarray  # [3, nodes]
    lock_ref: np.ndarray  # [3, nodes]
    last_access: np.ndarray  # [3, nodes]
    fingerprints: np.ndarray  # [buckets, ways]
    entries: np.ndarray  # [buckets, ways] node ids
    rings: tuple[np.ndarray, ...]  # whole rings, in the order of `Ring`
    owners: tuple[np.ndarray, ...]  # by component
    ledger: np.ndarray  # [3, receipts]
    victim_plan: np.ndarray  # [2, plan]
    counters: np.ndarray
    requests: tuple[np.ndarray, ...] | None = None  # ids of each pool, padding gone

    @property
    def alive(self) -> np.ndarray:
        """[nodes] whether a node is in the tree, the root included."""
        return self.parent != NULL

    @property
    def live_nodes(self) -> np.ndarray:
        """Live nodes but for the root, by id."""
        return np.flatnonzero(self.alive[1:]) + 1

    @property
    def clock(self) -> int:
        """Recency tick that the next refresh starts from."""
        return self.counter(Counter.CLOCK)

    @property
    def status(self) -> list[str]:
        """Names of the sticky status bits."""
        bits = self.counter(Counter.STATUS)
        return [str(s.name) for s in Status if s and bits & s]

    def counter(self, which: int) -> int:
        """One counter."""
        return int(self.counters[which])

    def by_component(self, first: int) -> np.ndarray:
        """[3] counters from `first` on."""
        return self.counters[first : first + NUM_COMPONENTS]

    def held(self, component: int) -> np.ndarray:
        """Nodes but for the root that hold a value of `component`."""
        nodes = self.live_nodes
        return nodes[self.value[component, nodes] != NULL]

    def free(self, ring: Ring) -> np.ndarray:
        """Ids on a free list, in the order in which they will be taken."""
        capacity = len(self.rings[ring])
        head = self.counter(Counter.RING_HEAD + ring)
        size = self.counter(Counter.RING_SIZE + ring)
        return self.rings[ring][(head + np.arange(size)) % max(capacity, 1)]


def read(cache: CacheState, requests=None) -> list[HostCache]:
    """Read a cache, or each of a stack of caches, off the device in one go.

    Args:
      cache: a `CacheState`, or a stack of them (a leading rank axis).
      requests: what requests own; for a stack a sequence of those, one a rank.

    Raises:
      ValueError: `cache` is no cache, or `requests` does not fit it.
    """
    if not isinstance(cache, CacheState):
        raise ValueError(
            f"got a {type(cache).__name__}; wanted a CacheState, as uhrc_fn.init and "
            "every operation return it (operations return a pair: take its first)."
        )
    state = jax.device_get(cache)
    if state.counters.ndim == 1:
        return [_host(state, _owned(requests))]
    if state.counters.ndim != 2:
        raise ValueError(
            f"the cache has {state.counters.ndim - 1} leading axes; wanted none, or "
            "one axis of ranks. Index the others away first."
        )
    ranks = state.counters.shape[0]
    if requests is None:
        requests = [None] * ranks
    elif not isinstance(requests, list | tuple) or len(requests) != ranks:
        raise ValueError(
            f"requests is a {type(requests).__name__} for a stack of {ranks} caches; "
            "wanted a list with one record a rank."
        )
    rows = [jax.tree.map(lambda x, r=r: x[r], state) for r in range(ranks)]
    return [_host(s, _owned(q)) for s, q in zip(rows, requests, strict=True)]


def read_one(cache: CacheState, caller: str) -> HostCache:
    """Read a single cache.

    Raises:
      ValueError: it is a stack.
    """
    hosts = read(cache)
    if np.ndim(cache.counters) != 1:
        raise ValueError(
            f"{caller} got a stack of {len(hosts)} caches; wanted one. "
            "Take a rank: jax.tree.map(lambda x: x[rank], cache)."
        )
    return hosts[0]


def _owned(requests) -> tuple[np.ndarray, ...] | None:
    if requests is None:
        return None
    names = ("pages", "swa_pages", "slots")
    as_dict = getattr(requests, "_asdict", None)
    record = as_dict() if as_dict else requests
    if not isinstance(record, dict) or set(record) - set(names):
        came = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"requests is {came}; wanted a dict or NamedTuple with any of "
            f"{', '.join(names)}, each the ids that requests own."
        )
    return tuple(_flat_ids(record.get(name, ())) for name in names)


def _flat_ids(arrays) -> np.ndarray:
    parts = [np.ravel(np.asarray(a)) for a in arrays]
    ids = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    return ids[ids != 0]


def _host(state: CacheState, requests) -> HostCache:
    config, tree = state.config, state.tree
    buckets = np.asarray(tree.table).reshape(-1, 2 * WAYS)
    free_ids, owner = np.asarray(state.free_ids), np.asarray(state.owner)

    def cut(array, start, length):
        return array[start : start + length]

    return HostCache(
        config=config,
        parent=np.asarray(tree.parent),
        depth=np.asarray(tree.depth),
        num_children=np.asarray(tree.num_children),
        table_slot=np.asarray(tree.table_slot),
        namespace=np.asarray(tree.namespace),
        tokens=np.asarray(tree.tokens),
        value=np.asarray(tree.value),
        lock_ref=np.asarray(tree.lock_ref),
        last_access=np.asarray(tree.last_access),
        fingerprints=buckets[:, :WAYS],
        entries=buckets[:, WAYS:],
        rings=tuple(
            cut(free_ids, ring_offset(config, r), ring_capacity(config, r))
            for r in Ring
        ),
        owners=tuple(
            cut(owner, owner_offset(config, c), config.capacities[c] + 1)
            for c in ComponentType
        ),
        ledger=np.asarray(state.ledger),
        victim_plan=np.asarray(state.victim_plan),
        counters=np.asarray(state.counters),
        requests=requests,
    )
