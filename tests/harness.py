"""A cache, its jitted operations, and the pages that requests hold, under checks.

Arguments are always NumPy int32 of the same shape, so that each operation compiles
once for a config. `check` accounts for every page and asks `check_invariants`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_fn import (
    CacheConfig,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    Status,
    init,
    jitted,
    page_table,
    radix_key,
    stack_keys,
)
from uhrc_fn.debug import check_invariants
from uhrc_fn.state import Counter, Ring, ring_capacity, ring_offset
from uhrc_fn.tree_arrays import NULL

EVERYTHING = np.int32(2**31 - 1)

SMALL = CacheConfig(
    page_size=2, num_pages=16, num_nodes=17, max_prefix_pages=6, max_live_receipts=4
)
"""The config that most tests share, to compile little.

The one node more than pages makes a bad page id the reason of a cut in a full tree too,
where a missing node would be as good a reason.
"""

ONE_TOKEN = CacheConfig(page_size=1, num_pages=24, max_prefix_pages=16)
"""One token a page: what a tree of token edges does, this does."""


def numpy(tree):
    """Bring a result to the host."""
    return jax.tree.map(np.asarray, tree)


def same(left, right) -> bool:
    """Whether two records are equal, leaf by leaf."""
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def ring_ids(cache, ring: Ring) -> list[int]:
    """The ids of a free list, front first."""
    counters = np.asarray(cache.counters)
    capacity = ring_capacity(cache.config, ring)
    places = counters[Counter.RING_HEAD + ring] + np.arange(
        counters[Counter.RING_SIZE + ring]
    )
    places = ring_offset(cache.config, ring) + places % capacity
    return np.asarray(cache.free_ids)[places].tolist()


def tree_pages(cache) -> dict[int, int]:
    """FULL page -> node, of every live node."""
    value = np.asarray(cache.tree.value)[0]
    return {int(value[n]): int(n) for n in np.flatnonzero(value != NULL)}


def node_keys(cache) -> dict[int, tuple]:
    """Each live node's key from the root: its namespace, then its pages."""
    parent = np.asarray(cache.tree.parent)
    tokens = np.asarray(cache.tree.tokens)
    spaces = np.asarray(cache.tree.namespace)
    keys = {}
    for node in tree_pages(cache).values():
        pages, above = [], node
        while above > 0:
            pages.append(tuple(tokens[above].tolist()))
            above = parent[above]
        keys[node] = (tuple(spaces[node].tolist()), *reversed(pages))
    return keys


def with_counter(cache, counter: int, value):
    """Forge one counter."""
    counters = np.array(cache.counters)
    counters[counter] = value
    return dataclasses.replace(cache, counters=jnp.asarray(counters))


def canonical(cache) -> dict:
    """All that operations may depend on; ways of a bucket may be in any order."""
    tree = cache.tree
    live = np.asarray(tree.value)[0] != NULL
    buckets = np.asarray(tree.table).reshape(-1, 2, 16)
    prints, ids = buckets[:, 0], buckets[:, 1]
    entries = [
        sorted((int(i), int(p)) for i, p in zip(*row, strict=True) if i != NULL)
        for row in zip(ids, prints, strict=True)
    ]
    keep = {
        "parent": np.where(live, tree.parent, NULL),
        "depth": np.where(live, tree.depth, NULL),
        "num_children": np.asarray(tree.num_children),
        "generation": np.asarray(tree.generation),
        "tokens": np.where(live[:, None], tree.tokens, 0),
        "namespace": np.where(live[:, None], tree.namespace, 0),
        "value": np.asarray(tree.value),
        "lock_ref": np.asarray(tree.lock_ref),
        "last_access": np.asarray(tree.last_access),
        "owner": np.asarray(cache.owner),
        "ledger": np.asarray(cache.ledger),
    }
    counters = np.asarray(cache.counters)
    numbers = {c.name: counters[c].tolist() for c in Counter}
    # How a free list lies in its ring and what a plan prepared is nobody's business.
    for name in ("PLAN_HEAD", "PLAN_LIMIT", "RING_HEAD"):
        del numbers[name]
    return (
        {name: array.tolist() for name, array in keep.items()}
        | {"table": entries, "vectors": counters[Counter.EVICTABLE :].tolist()}
        | {ring.name: ring_ids(cache, ring) for ring in Ring if ring != Ring.LEDGER}
        | {"free_receipts": sorted(ring_ids(cache, Ring.LEDGER))}
        | numbers
    )


class Harness:
    """One cache with what its requests hold; every call may be followed by `check`."""

    def __init__(self, config: CacheConfig = SMALL, is_checked: bool = True):
        self.config = config
        self.cache = init(config)
        self.held: set[int] = set()
        self.is_checked = is_checked

    # Reading.

    @property
    def size(self) -> int:
        """Tokens in the tree."""
        return len(tree_pages(self.cache)) * self.config.page_size

    @property
    def evictable(self) -> int:
        """Unlocked tokens in the tree."""
        return int(self.cache.evictable[0]) * self.config.page_size

    @property
    def protected(self) -> int:
        """Locked tokens in the tree."""
        return int(self.cache.protected[0]) * self.config.page_size

    @property
    def free(self) -> list[int]:
        """Free pages, next one first."""
        return ring_ids(self.cache, Ring.FULL)

    def key(self, tokens, **names):
        """A key of the one static length of this harness."""
        pages = self.config.max_prefix_pages
        return radix_key(tokens, self.config, num_pages=pages, **names)

    def snapshot(self):
        """Every leaf of the state, on the host."""
        return numpy(self.cache)

    def take_status(self) -> Status:
        """The status bits since the last call."""
        status = Status(int(self.cache.status))
        self.cache = with_counter(self.cache, Counter.STATUS, 0)
        return status

    def check(self) -> None:
        """What every operation ends with."""
        if self.is_checked:
            self.check_now()

    def check_now(self) -> None:
        """Account for every page; then every invariant."""
        host = self.snapshot()
        tree = tree_pages(host)
        pages = [*ring_ids(host, Ring.FULL), *tree, *self.held]
        assert sorted(pages) == list(range(1, self.config.num_pages + 1))
        assert int(host.evictable[0] + host.protected[0]) == len(tree)
        check_invariants(host, {"pages": [sorted(self.held)]})

    # Operations on one request.

    def match(self, tokens, **names):
        params = MatchPrefixParams(key=self.key(tokens, **names))
        self.cache, result = jitted.match_prefix(self.cache, params)
        self.check()
        return numpy(result)

    def peek(self, tokens, **names):
        return numpy(jitted.peek_prefix_len(self.cache, self.key(tokens, **names)))

    def hit(self, tokens, **names) -> int:
        """Tokens that a match would hit; nothing changes."""
        return int(self.peek(tokens, **names).hit_length)

    def lock(self, match):
        self.cache, receipt = jitted.inc_lock_ref(self.cache, match)
        self.check()
        return numpy(receipt)

    def unlock(self, receipt):
        self.cache, result = jitted.dec_lock_ref(self.cache, receipt)
        self.check()
        return numpy(result)

    def alloc(self, num_new: int, partial: bool = False):
        self.cache, result = jitted.alloc_pages(
            self.cache,
            np.int32(num_new),
            max_new=self.config.max_prefix_pages,
            partial=partial,
        )
        result = numpy(result)
        self._hold(result.ids)
        self.check()
        return result

    def _hold(self, ids) -> None:
        ids = [int(i) for i in np.ravel(ids) if i]
        assert len(set(ids)) == len(ids) and not self.held & set(ids)
        self.held |= set(ids)

    def insert(self, tokens, value, prev: int = 0, **names):
        value = pad(value, self.config.max_prefix_pages)
        key = self.key(tokens, **names)
        params = InsertParams(key=key, value=value, prev_prefix_len=np.int32(prev))
        self.cache, result = jitted.insert(self.cache, params)
        result = numpy(result)
        self.held -= set(value[result.adopted()[:, 0]].tolist())
        self.check()
        return result

    def evict(self, num_tokens=EVERYTHING, max_victims: int | None = None) -> int:
        """Evict; returns the tokens freed."""
        params = EvictParams(num_tokens=np.int32(num_tokens))
        self.cache, result = jitted.evict(self.cache, params, max_victims=max_victims)
        self.check()
        return int(result.num_tokens_evicted)

    def free_pages(self, ids) -> None:
        owned = {int(i) for i in ids} & self.held
        ids = pad(ids, self.config.max_prefix_pages)
        self.cache = jitted.free_pages(self.cache, ids)
        self.held -= owned
        self.check()

    def reset(self) -> None:
        self.cache = jitted.reset(self.cache)
        self.held.clear()
        self.check()

    def compact_clock(self) -> None:
        self.cache = jitted.compact_clock(self.cache)
        self.check()

    def publish(self, tokens, **names):
        """Serve a request whole: match, lock, allocate, insert, unlock.

        Returns:
          The insert's result; the request holds nothing after.
        """
        match = self.match(tokens, **names)
        receipt = self.lock(match)
        pages = len(tokens) // self.config.page_size
        alloc = self.alloc(pages - int(match.hit_length) // self.config.page_size)
        assert alloc.ok
        table = np.asarray(page_table(match, alloc))
        result = self.insert(tokens, table, prev=match.hit_length, **names)
        self.unlock(receipt)
        self.free_pages(set(alloc.ids.tolist()) & self.held)
        return result

    # Operations on a batch; the batch's size is static too.

    def keys(self, prompts):
        """Keys of (tokens, names) pairs or of tokens."""
        return stack_keys(
            self.key(p[0], **p[1]) if isinstance(p, tuple) else self.key(p)
            for p in prompts
        )

    def match_batch(self, prompts):
        params = MatchPrefixParams(key=self.keys(prompts))
        self.cache, result = jitted.match_prefix_batch(self.cache, params)
        self.check()
        return numpy(result)

    def peek_batch(self, prompts):
        return numpy(jitted.peek_prefix_len_batch(self.cache, self.keys(prompts)))

    def lock_batch(self, match):
        self.cache, receipt = jitted.inc_lock_ref_batch(self.cache, match)
        self.check()
        return numpy(receipt)

    def unlock_batch(self, receipt):
        self.cache, result = jitted.dec_lock_ref_batch(self.cache, receipt)
        self.check()
        return numpy(result)

    def alloc_batch(self, num_new, partial: bool = False):
        self.cache, result = jitted.alloc_pages_batch(
            self.cache,
            np.asarray(num_new, np.int32),
            max_new=self.config.max_prefix_pages,
            partial=partial,
        )
        result = numpy(result)
        self._hold(result.ids)
        self.check()
        return result

    def insert_batch(self, prompts, values, prevs=None):
        pages = self.config.max_prefix_pages
        value = np.stack([pad(v, pages) for v in values])
        prev = np.zeros(len(value)) if prevs is None else prevs
        params = InsertParams(
            key=self.keys(prompts),
            value=value,
            prev_prefix_len=np.asarray(prev, np.int32),
        )
        self.cache, result = jitted.insert_batch(self.cache, params)
        result = numpy(result)
        self.held -= set(value[result.adopted()[..., 0]].tolist())
        self.check()
        return result


def pad(ids, count: int) -> np.ndarray:
    """Ids as int32 [count], 0-padded."""
    ids = np.asarray([int(i) for i in ids], np.int32)
    return np.pad(ids, (0, count - ids.size))


def stack(records):
    """Single requests' records as one batch."""
    return jax.tree.map(lambda *xs: np.stack(xs), *records)


def row(record, request: int):
    """One request's record out of a batch."""
    return jax.tree.map(lambda x: np.asarray(x)[request], record)
