"""The harness for caches of several components: SWA pages and slots are held too."""

import numpy as np
from harness import Harness, numpy, pad, ring_ids, stack

from uhrc_fn import (
    CacheConfig,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    page_table,
)
from uhrc_fn import jitted as ops
from uhrc_fn.config import ComponentType
from uhrc_fn.debug import check_invariants
from uhrc_fn.state import Ring
from uhrc_fn.tree_arrays import NULL

FULL, SWA, RECURRENT = ComponentType
ALLOCATE = {FULL: ops.alloc_pages, SWA: ops.alloc_swa_pages, RECURRENT: ops.alloc_slots}
FREE = {FULL: ops.free_pages, SWA: ops.free_swa_pages, RECURRENT: ops.free_slots}


class HybridHarness(Harness):
    """One cache with what its requests hold of every pool."""

    def __init__(self, config: CacheConfig, is_checked: bool = True):
        super().__init__(config, is_checked)
        self.owned: dict[ComponentType, set[int]] = {c: set() for c in ComponentType}
        self.held = self.owned[FULL]

    # Reading; counts are in pool entries.

    def num_evictable(self, component) -> int:
        return int(self.cache.evictable[component])

    def num_protected(self, component) -> int:
        return int(self.cache.protected[component])

    def num_free(self, component) -> int:
        return int(self.cache.num_free[component])

    def in_tree(self, component) -> set[int]:
        """Ids of a component that nodes hold."""
        value = np.asarray(self.cache.tree.value)[component]
        return set(value[value != NULL].tolist())

    def ring(self, component) -> list[int]:
        """Free entries of a pool, next one first."""
        return ring_ids(self.cache, Ring(component))

    def check_now(self) -> None:
        host = self.snapshot()
        value = host.tree.value
        for c in ComponentType:
            tree = value[c][value[c] != NULL].tolist()
            everything = [*ring_ids(host, Ring(c)), *tree, *self.owned[c]]
            assert sorted(everything) == list(range(1, self.config.capacities[c] + 1))
            assert int(host.evictable[c] + host.protected[c]) == len(tree)
        pages, swa_pages, slots = ([sorted(self.owned[c])] for c in ComponentType)
        check_invariants(host, {"pages": pages, "swa_pages": swa_pages, "slots": slots})

    # Operations.

    def match(self, tokens, full_only: bool = False, **names):
        params = MatchPrefixParams(
            key=self.key(tokens, **names), full_only=full_only, cow_recurrent=True
        )
        self.cache, result = ops.match_prefix(self.cache, params)
        self.check()
        return numpy(result)

    def release_window(self, receipt):
        self.cache, receipt = ops.release_window(self.cache, receipt)
        self.check()
        return numpy(receipt)

    def alloc_of(self, component, count: int, partial: bool = False):
        """Allocate from one pool; the result's length is `alloc_bound`."""
        self.cache, result = ALLOCATE[component](
            self.cache,
            np.int32(count),
            max_new=self.alloc_bound(component),
            partial=partial,
        )
        result = numpy(result)
        self._hold_of(component, result)
        self.check()
        return result

    def alloc_bound(self, component) -> int:
        """Static length of what one allocation gives."""
        return min(self.config.max_prefix_pages, self.config.capacities[component])

    def take(self, component, count: int) -> list[int]:
        """Allocate so many entries; they must be there."""
        result = self.alloc_of(component, count)
        assert result.ok
        return result.ids[:count].tolist()

    def _hold_of(self, component, result) -> None:
        ids = [int(i) for i in result.ids if i]
        assert len(ids) == int(result.count) == len(set(ids))
        assert not self.owned[component] & set(ids)
        self.owned[component].update(ids)

    def alloc_request(self, num_pages: int, num_swa_pages: int = 0, num_slots: int = 0):
        counts = (num_pages, num_swa_pages, num_slots)
        bounds = [max(self.alloc_bound(c), 1) for c in ComponentType]
        self.cache, result = ops.alloc_request(
            self.cache,
            *(np.int32(n) for n in counts),
            max_pages=bounds[FULL],
            max_swa_pages=bounds[SWA],
            max_slots=bounds[RECURRENT],
        )
        result = numpy(result)
        for c, part in zip(ComponentType, parts(result), strict=True):
            self._hold_of(c, part)
        self.check()
        return result

    def free_of(self, component, ids) -> None:
        """Free entries of one pool; at most `max_prefix_pages` of them."""
        mine = {int(i) for i in ids} & self.owned[component]
        ids = pad(ids, self.config.max_prefix_pages)
        self.cache = FREE[component](self.cache, ids)
        self.owned[component] -= mine
        self.check()

    def insert(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens,
        value,
        prev: int = 0,
        *,
        swa=(),
        evicted: int = 0,
        slot: int = 0,
        slot_length: int | None = None,
        **names,
    ):
        """Insert; `slot_length` is the prompt's length unless given."""
        params = self._insert_params(
            tokens, value, prev, swa, evicted, slot, slot_length, **names
        )
        self.cache, result = ops.insert(self.cache, params)
        result = numpy(result)
        self._give_up(params, result)
        self.check()
        return result

    def _insert_params(
        self, tokens, value, prev, swa, evicted, slot, slot_length, **names
    ):
        pages = self.config.max_prefix_pages
        extra = {}
        if self.config.has_swa:
            extra["swa_value"] = pad(swa, pages)
            extra["swa_evicted_seqlen"] = np.int32(evicted)
        if self.config.has_recurrent:
            extra["recurrent_value"] = np.int32(slot)
            length = len(tokens) if slot_length is None else slot_length
            extra["recurrent_length"] = np.int32(length)
        return InsertParams(
            key=self.key(tokens, **names),
            value=pad(value, pages),
            prev_prefix_len=np.int32(prev),
            **extra,
        )

    def insert_many(self, requests):
        """Insert a batch: a tuple of the arguments of `insert` for each, and names."""
        rows = [self._insert_params(*args, **names) for args, names in requests]
        params = stack(rows)
        self.cache, result = ops.insert_batch(self.cache, params)
        result = numpy(result)
        self._give_up(params, result)
        self.check()
        return result

    def release_window_batch(self, receipts):
        self.cache, receipts = ops.release_window_batch(self.cache, receipts)
        self.check()
        return numpy(receipts)

    def _give_up(self, params, result) -> None:
        """What an insert adopted is no longer a request's."""
        adopted = result.adopted()
        self.held.difference_update(params.value[adopted[..., FULL]].tolist())
        if self.config.has_swa:
            mine = params.swa_value[adopted[..., SWA]].tolist()
            self.owned[SWA].difference_update(mine)
        if self.config.has_recurrent:
            slots = params.recurrent_value[result.recurrent_committed]
            self.owned[RECURRENT].difference_update(np.ravel(slots).tolist())

    def evict_all_of(self, full=0, swa=0, recurrent=0, max_victims: int | None = None):
        """Evict tokens, SWA tokens and slots; returns what went of each."""
        params = EvictParams(
            num_tokens=np.int32(full),
            swa_num_tokens=np.int32(swa),
            recurrent_num=np.int32(recurrent),
        )
        self.cache, result = ops.evict(self.cache, params, max_victims=max_victims)
        self.check()
        return (
            int(result.num_tokens_evicted),
            int(result.swa_num_tokens_evicted),
            int(result.recurrent_num_evicted),
        )

    def reset(self) -> None:
        for ids in self.owned.values():
            ids.clear()
        super().reset()

    def publish(self, tokens, *, evicted: int = 0, has_slot: bool = True, **names):
        """Serve a request whole: it keeps nothing.

        Args:
          tokens: the prompt.
          evicted: tokens whose SWA pages it lets go on the way.
          has_slot: whether it offers a snapshot of its end (RECURRENT).
          **names: `extra_key`, `cache_salt`.
        """
        size = self.config.page_size
        before = {c: set(ids) for c, ids in self.owned.items()}
        match = self.match(tokens, **names)
        receipt = self.lock(match)
        hit, count = int(match.hit_length) // size, len(tokens) // size
        alloc = self.alloc(count - hit)
        assert alloc.ok
        swa, slot = [0] * count, 0
        if self.config.has_swa:
            first = max(evicted // size, hit)
            swa[first:] = self.take(SWA, count - first)
        if self.config.has_recurrent and has_slot:
            (slot,) = self.take(RECURRENT, 1)
        result = self.insert(
            tokens,
            np.asarray(page_table(match, alloc)),
            int(match.hit_length),
            swa=swa,
            evicted=evicted,
            slot=slot,
            **names,
        )
        self.unlock(receipt)
        for c in self.config.components:
            self.free_of(c, sorted(self.owned[c] - before[c]))
        return result


def parts(result):
    """The pools' results of `alloc_request`, in the order of `ComponentType`."""
    return result.pages, result.swa_pages, result.slots
