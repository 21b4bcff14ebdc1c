"""Caches that cache nothing: pools and request table behind the same interface."""

from typing import Any

from .allocator import SWAPageAllocator
from .host_cache import HostCache
from .params import (
    NO_INDICES,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from .request import Request, RequestTable


class ChunkCache(HostCache):
    """No tree: a request keeps what it computes until it ends."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Nothing is ever found."""
        swa = NO_INDICES if self.supports_swa() else None
        return MatchResult(NO_INDICES, None, None, None, swa_indices=swa)

    def peek_prefix_len(self, key: RadixKey) -> int:
        """0."""
        return 0

    def insert(self, params: InsertParams) -> InsertResult:
        """Nothing goes in: everything stays the caller's."""
        return InsertResult()

    def evict(self, params: EvictParams) -> EvictResult:
        """There is nothing to evict."""
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """There is nothing to lock."""
        return IncLockRefResult()

    def dec_lock_ref(
        self, node: Any, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """There is nothing to unlock."""
        return DecLockRefResult()

    def tree_text(self) -> str:
        """There is no tree."""
        return "no tree"


class SWAChunkCache(ChunkCache):
    """`ChunkCache` for sliding windows: requests let go of pages as they go on.

    Args:
      requests: the request table, with SWA locations.
      allocator: of both pools.
      sliding_window_size: window, in tokens.
    """

    def __init__(
        self,
        requests: RequestTable,
        allocator: SWAPageAllocator,
        *,
        sliding_window_size: int,
    ):
        super().__init__(requests, allocator)
        self.allocator: SWAPageAllocator = allocator
        self.sliding_window_size = sliding_window_size

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the SWA pool."""
        return self.allocator.swa_available_size(dp_rank)

    def evict_req_swa(self, req: Request, num_tokens: int) -> int:
        """Let go of a request's SWA pages behind its window."""
        frontier = self._swa_frontier(num_tokens, self.sliding_window_size)
        return slide(self.allocator, self.requests, req, 0, frontier)


def slide(
    allocator: SWAPageAllocator,
    requests: RequestTable,
    req: Request,
    floor: int,
    frontier: int,
) -> int:
    """Free a request's SWA pages of ``[max(floor, evicted), frontier)``.

    Returns:
      SWA tokens freed.
    """
    start = max(floor, req.swa_evicted_seqlen)
    if req.req_pool_idx is None or frontier <= start:
        return 0
    before = allocator.swa_available_size(req.rank)
    gone = requests.full[req.req_pool_idx, start:frontier]
    allocator.free_swa(gone, req.rank)
    if requests.swa is not None:
        requests.swa[req.req_pool_idx, start:frontier] = 0
    req.swa_evicted_seqlen = frontier
    return allocator.swa_available_size(req.rank) - before
