"""`HostCache`: what the legacy caches share, pools and the life of a request."""

import numpy as np

from .allocator import PageAllocator
from .base import BasePrefixCache
from .params import (
    EvictParams,
    InsertParams,
    InsertResult,
    Locations,
    MatchPrefixParams,
)
from .request import Request, RequestTable


class HostCache(BasePrefixCache):
    """A cache in plain host Python, with free lists in an allocator.

    Args:
      requests: the request table.
      allocator: of the pools.
      disable: publish nothing, hit nothing.
      num_recurrent_slots: running slots of each rank, where the model has recurrent
        state; a legacy cache holds no snapshots.
    """

    def __init__(
        self,
        requests: RequestTable,
        allocator: PageAllocator,
        *,
        disable: bool = False,
        num_recurrent_slots: int = 0,
    ):
        super().__init__(
            requests,
            page_size=allocator.page_size,
            dp_size=allocator.dp_size,
            disable=disable,
        )
        self.allocator = allocator
        self.slots = None
        if num_recurrent_slots:
            ranks = allocator.dp_size
            self.slots = PageAllocator(num_recurrent_slots, dp_size=ranks)

    def reset(self) -> None:
        """Forget everything: tree, locks, pools and request table."""
        self.allocator.clear()
        if self.slots:
            self.slots.clear()
        self.requests.clear()

    def supports_swa(self) -> bool:
        """Whether sliding-window layers have a pool of their own."""
        return self.allocator.supports_swa

    def alloc(self, num_tokens: int, dp_rank: int | None = None) -> Locations | None:
        """Give whole pages for so many tokens, evicting exactly what is short."""
        rank = self._rank(dp_rank)
        full, swa = self.allocator.deficit(num_tokens, rank)
        if full or swa:
            if full > self.full_evictable_size(rank):
                return None
            if swa > self.swa_evictable_size(rank):
                return None
            params = EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank)
            self.evict(params)
        return self.allocator.alloc(num_tokens, rank)

    def free(self, indices, dp_rank: int | None = None, swa_indices=None) -> None:
        """Return pages that a request owns, and what they have of SWA."""
        del swa_indices
        self.allocator.free(indices, self._rank(dp_rank))

    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the FULL pool."""
        return self.allocator.available_size(dp_rank)

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free slots of the recurrent pool."""
        return self.slots.available_size(dp_rank) if self.slots else 0

    def _take_slots(self, req: Request) -> bool:
        if self.slots is None or req.recurrent_pool_idx:
            return True
        given = self.slots.alloc(1, req.rank)
        req.recurrent_pool_idx = 0 if given is None else int(given.full[0])
        return given is not None

    def assert_recurrent_slot_ledger(
        self, dp_rank: int = 0, live_reqs: list[Request] | None = None
    ) -> int:
        """Check that running + free slots are the pool, see the base class."""
        if self.slots is None:
            return 0
        active = self.slots.num_pages - self.slots.available_size(dp_rank)
        if live_reqs is not None:
            held = [r.recurrent_pool_idx for r in live_reqs if r.rank == dp_rank]
            if sorted(held) != sorted(set(held)) or len(held) != active:
                raise AssertionError(
                    f"rank {dp_rank}: requests hold slots {sorted(held)}, the pool has "
                    f"{active} active; wanted each once. A slot has leaked."
                )
        return active

    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        """Publish a request that ends and give back all that it held."""
        length = req.pop_committed_kv_cache()
        if req.req_pool_idx is None:
            return
        owned = self.requests.read(req.req_pool_idx, req.kv_allocated_len)
        shared = req.cache_protected_len
        result = InsertResult(shared, shared)
        if is_insert and length > shared:
            result = self._publish(req, length, owned)
        self._free_duplicates(req, owned, shared, result)
        self.free(owned[max(result.inserted_len, shared) :], req.dp_rank)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock)
        if self.slots and req.recurrent_pool_idx:
            self.slots.free([req.recurrent_pool_idx], req.rank)
        self.requests.free(req)
        req.release()
        self.hicache_write_through(req, result)

    def cache_unfinished_req(self, req: Request) -> None:
        """Publish what a request that goes on has written; its lock moves along."""
        row, length = req.req_pool_idx, req.kv_committed_len
        if row is None:
            return
        owned = self.requests.read(row, req.kv_allocated_len)
        shared = req.cache_protected_len
        result = self._publish(req, length, owned)
        self._free_duplicates(req, owned, shared, result)
        key = req.key(length)[: max(result.inserted_len, shared)]
        match = self.match_prefix(MatchPrefixParams(key, full_only=True))
        self.requests.write(row, 0, match.device_indices, match.swa_indices)
        node = match.last_device_node
        lock = self.inc_lock_ref(node).to_dec_params()
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock)
        req.last_node, req.lock = node, lock
        req.cache_protected_len = req.last_matched_prefix_len = match.hit_length
        req.prefix_indices = self.requests.read(row, length)

    def _publish(self, req: Request, length: int, owned: np.ndarray) -> InsertResult:
        return self.insert(
            InsertParams(
                req.key(length),
                owned[:length],
                prev_prefix_len=req.cache_protected_len,
                swa_evicted_seqlen=req.swa_evicted_seqlen,
            )
        )

    def _free_duplicates(self, req, owned, shared: int, result: InsertResult) -> None:
        """What the tree held before, past what the request shared already."""
        self.free(owned[shared : max(result.prefix_len, shared)], req.dp_rank)
