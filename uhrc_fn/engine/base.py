"""`BasePrefixCache`: what an engine may ask of a cache, whatever its kind.

An engine asks for capabilities (`supports_swa`, `supports_recurrent`, ...), never for a
class. A cache also owns the pools' free lists and the request table, so that one
object knows who owns a location.
"""

import abc
from typing import Any

from .params import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    Locations,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from .request import Request, RequestTable


class HostTierHooks:
    """Where a host tier would hook in: nothing happens here, a subclass may fill it."""

    def hicache_prefetch(self, req: Request, match: MatchResult) -> None:
        """A request arrived: fetch what only the host holds."""

    def hicache_write_through(self, req: Request, result: InsertResult) -> None:
        """A request finished: copy what it published to the host."""

    def hicache_write_back(self, params: EvictParams) -> None:
        """An eviction is about to begin: save what it would lose."""


class BasePrefixCache(HostTierHooks, abc.ABC):
    """A prefix cache of `dp_size` ranks; rank `None` is rank 0.

    Sizes are in tokens, of recurrent state in slots, and always of one rank.

    A request's life, the same for every cache::

        match = cache.start_req(req)              # None: wait
        ok = cache.extend_req(req, num_tokens)    # locations for the next forward
        req.kv_committed_len = num_tokens         # after it
        cache.cache_unfinished_req(req)           # between chunks
        cache.cache_finished_req(req)             # or is_insert=False: abort, retract
    """

    def __init__(
        self,
        requests: RequestTable,
        *,
        page_size: int = 1,
        dp_size: int = 1,
        disable: bool = False,
    ):
        if requests.page_size != page_size:
            raise ValueError(
                f"a request table of page_size={requests.page_size} for a cache of "
                f"page_size={page_size}; wanted the same. Build both from one setting."
            )
        self.requests = requests
        self.page_size = page_size
        self.dp_size = dp_size
        self.disable = disable

    # The tree.

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything: tree, locks, pools and request table."""

    @abc.abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix and refresh it; whole pages only."""

    @abc.abstractmethod
    def peek_prefix_len(self, key: RadixKey) -> int:
        """Tokens that `match_prefix` would hit; nothing changes."""

    @abc.abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Put a key's whole pages into the tree; nothing is freed."""

    @abc.abstractmethod
    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least so much of a rank's unlocked entries, oldest first."""

    @abc.abstractmethod
    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock the path to a node that a match returned.

        Raises:
          RuntimeError: the node has been evicted since.
        """

    @abc.abstractmethod
    def dec_lock_ref(
        self, node: Any, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Give a lock back; `params` are its own `to_dec_params()`."""

    # Pools.

    @abc.abstractmethod
    def alloc(self, num_tokens: int, dp_rank: int | None = None) -> Locations | None:
        """Give whole pages for so many tokens, evicting what is short.

        Returns:
          None where free and evictable together are short: then nothing has changed.
        """

    @abc.abstractmethod
    def free(self, indices, dp_rank: int | None = None, swa_indices=None) -> None:
        """Return pages that a request owns, by their token locations; 0 is padding.

        Args:
          indices: FULL locations.
          dp_rank: their rank.
          swa_indices: SWA locations. Legacy caches know them by the FULL ones.
        """

    @abc.abstractmethod
    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the FULL pool."""

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the SWA pool."""
        return 0

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free slots of the recurrent pool."""
        return 0

    # Requests.

    def start_req(self, req: Request) -> MatchResult | None:
        """Seat a request: row, match, lock, slots.

        Returns:
          the match, of all tokens but one, which is left to compute; or None, and no
          change but recency, where rows or slots are short.
        """
        if not self.requests.alloc(req):
            return None
        key = req.key(max(req.num_tokens - 1, 0))
        params = MatchPrefixParams(key, cow_recurrent=True, req=req)
        match = self.match_prefix(params)
        self.hicache_prefetch(req, match)
        lock = self._admit(req, match)
        if lock is None:
            self.requests.free(req)
            req.recurrent_cow_src_index = 0
            return None
        self._seat(req, match, lock)
        return match

    def _admit(self, req: Request, match: MatchResult) -> DecLockRefParams | None:
        """Lock a match and take slots; None, and no change, where they are short."""
        node = match.last_device_node
        lock = self.inc_lock_ref(node).to_dec_params()
        if self._take_slots(req):
            return lock
        self.dec_lock_ref(node, lock)
        return None

    def _seat(self, req: Request, match: MatchResult, lock: DecLockRefParams) -> None:
        assert req.req_pool_idx is not None
        hit = match.hit_length
        self.requests.write(
            req.req_pool_idx, 0, match.device_indices, match.swa_indices
        )
        req.last_node, req.lock = match.last_device_node, lock
        req.prefix_indices = match.device_indices
        req.cache_protected_len = req.last_matched_prefix_len = hit
        req.kv_committed_len = req.kv_allocated_len = hit
        req.swa_evicted_seqlen = 0

    def _take_slots(self, req: Request) -> bool:
        """Give a request its recurrent slots; False where they are short."""
        return True

    def extend_req(self, req: Request, num_tokens: int) -> bool:
        """Give a request locations for its first `num_tokens` tokens.

        Returns:
          False, and no change, where free and evictable pages are short.

        Raises:
          ValueError: the request is longer than the table is wide.
        """
        start = req.kv_allocated_len
        if num_tokens <= start:
            return True
        self.requests.check_width(num_tokens)
        given = self.alloc(num_tokens - start, req.dp_rank)
        if given is None:
            return False
        assert req.req_pool_idx is not None
        self.requests.write(req.req_pool_idx, start, given.full, given.swa)
        req.kv_allocated_len = start + len(given.full)
        return True

    @abc.abstractmethod
    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        """Publish a request that ends and give back all that it held, its row too.

        Args:
          req: with `kv_committed_len` tokens written.
          is_insert: False drops it: aborted, cancelled or retracted.
        """

    @abc.abstractmethod
    def cache_unfinished_req(self, req: Request) -> None:
        """Publish what a request that goes on has written; its lock moves along."""

    def evict_req_swa(self, req: Request, num_tokens: int) -> int:
        """Let go of a request's own SWA pages behind its window.

        Args:
          req: the request.
          num_tokens: tokens written; the window ends there.

        Returns:
          SWA tokens freed.
        """
        return 0

    def _swa_frontier(self, num_tokens: int, window: int) -> int:
        """Whole pages behind the window and one page more, in tokens."""
        size = self.page_size
        kept = -(-window // size) + 1
        return max(num_tokens // size - kept, 0) * size

    # Capabilities.

    def supports_swa(self) -> bool:
        """Whether sliding-window layers have a pool of their own."""
        return False

    def supports_recurrent(self) -> bool:
        """Whether snapshots of recurrent state are cached."""
        return False

    def recurrent_extra_buffer_active(self) -> bool:
        """Whether prefill is cut at track boundaries, for snapshots by track slots."""
        return False

    # Sizes.

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked FULL tokens of the tree."""
        return 0

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Locked FULL tokens of the tree."""
        return 0

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked SWA tokens of the tree."""
        return 0

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Locked SWA tokens of the tree."""
        return 0

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked snapshots."""
        return 0

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """Locked snapshots."""
        return 0

    def evictable_size(self, dp_rank: int = 0) -> int:
        """Tokens that eviction could give: with SWA, of both pools."""
        full = self.full_evictable_size(dp_rank)
        return (
            min(full, self.swa_evictable_size(dp_rank)) if self.supports_swa() else full
        )

    def protected_size(self, dp_rank: int = 0) -> int:
        """Locked FULL tokens."""
        return self.full_protected_size(dp_rank)

    def total_size(self, dp_rank: int = 0) -> int:
        """FULL tokens in the tree."""
        return self.full_evictable_size(dp_rank) + self.full_protected_size(dp_rank)

    def swa_total_size(self, dp_rank: int = 0) -> int:
        """SWA tokens in the tree."""
        return self.swa_evictable_size(dp_rank) + self.swa_protected_size(dp_rank)

    def recurrent_total_size(self, dp_rank: int = 0) -> int:
        """Snapshots in the tree."""
        evictable = self.recurrent_evictable_size(dp_rank)
        return evictable + self.recurrent_protected_size(dp_rank)

    def assert_recurrent_slot_ledger(
        self, dp_rank: int = 0, live_reqs: list[Request] | None = None
    ) -> int:
        """Check that active + tree + free slots are the pool.

        Args:
          dp_rank: the rank.
          live_reqs: its running requests; their slots are then counted too.

        Returns:
          slots that requests own; 0 without recurrent state.

        Raises:
          AssertionError: a slot is lost, or owned twice.
        """
        return 0

    # For people.

    @abc.abstractmethod
    def tree_text(self) -> str:
        """The tree as text, a line a node."""

    def pretty_print(self) -> None:
        """Print the tree and its sizes."""
        print(self.tree_text())
        for rank in range(self.dp_size):
            print(
                f"rank {rank}: {self.total_size(rank)} tokens, "
                f"{self.full_evictable_size(rank)} evictable, "
                f"{self.full_protected_size(rank)} protected"
            )

    def _rank(self, dp_rank: int | None) -> int:
        rank = dp_rank or 0
        if not 0 <= rank < self.dp_size:
            raise ValueError(
                f"dp_rank={dp_rank} of {self.dp_size}; wanted 0 to {self.dp_size - 1}. "
                "Route the request to a rank of this cache."
            )
        return rank
