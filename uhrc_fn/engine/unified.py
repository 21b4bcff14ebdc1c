"""`UnifiedRadixCache`: the functional cache behind the interface of engines.

A thin shell. Each rank has a `CacheState`; a method turns tokens into a key, calls one
jitted operation, and turns pages into token locations; see `RankStates`.
"""

import dataclasses
from typing import Any

import numpy as np

from .. import jitted
from .. import params as core
from ..config import CacheConfig
from ..pools.sizing import NUM_TRACK_SLOTS, request_owned_slots
from ..status import describe
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
from .recurrent_slots import RecurrentSlots
from .request import Request, RequestTable
from .unified_requests import RowTables, read_swa_pages


@dataclasses.dataclass(frozen=True, eq=False)
class TreeHandle:
    """A node as an engine holds it: where a match ended, and what locks it."""

    dp_rank: int
    id: int = 0
    """Node of the tree; 0 is the root."""
    match: core.MatchResult | None = None
    """What `inc_lock_ref` of the core takes; `None` for the root."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeHandle):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int, int]:
        generation = 0 if self.match is None else int(self.match.generation)
        return self.dp_rank, self.id, generation


class UnifiedRadixCache(RecurrentSlots):
    """The functional cache, with a tree a rank.

    Args:
      requests: the request table, with SWA locations where the config has SWA.
      config: of each rank's cache.
      dp_size: ranks.
      num_track_slots: of each request, with the extra buffer; see
        `request_owned_slots`.
      disable: publish nothing, hit nothing; pools and tables work as ever.
      min_bucket: pages that short keys and tables are padded to.
    """

    def __init__(
        self,
        requests: RequestTable,
        config: CacheConfig,
        *,
        dp_size: int = 1,
        num_track_slots: int = NUM_TRACK_SLOTS,
        disable: bool = False,
        min_bucket: int = 8,
    ):
        super().__init__(
            requests, config, dp_size=dp_size, disable=disable, min_bucket=min_bucket
        )
        has_tracks = config.enable_recurrent_extra_buffer
        tracks = num_track_slots if has_tracks else 0
        self.owned_slots = 0
        if config.has_recurrent:
            self.owned_slots = request_owned_slots(
                extra_buffer=has_tracks, num_track_slots=num_track_slots
            )
        self._tables = RowTables(config, tracks, self._buckets)

    # The tree.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix that every component can serve, and refresh it."""
        rank, key = self._key(params.key)
        if key is None:
            return self._no_match(rank, params.req)
        wanted = core.MatchPrefixParams(
            key=key,
            full_only=params.full_only,
            cow_recurrent=self.config.has_recurrent and not params.full_only,
        )
        state, found = jitted.match_prefix(self.states[rank], wanted)
        self._keep(rank, state, key)
        scalars = np.asarray(found.scalars)
        host = dataclasses.replace(found, scalars=scalars)
        hit = int(host.hit_length)
        count = hit // self.page_size
        pages = np.asarray(found.device_indices)[:count]
        swa = None
        if self.config.has_swa:
            swa = self._tokens(read_swa_pages(state, found.path)[:count])
        node = int(host.best_match_node)
        handle = TreeHandle(rank, node, host if node else None)
        slot = int(host.cow_src_slot)
        if params.req is not None and params.cow_recurrent:
            params.req.recurrent_cow_src_index = slot
        return MatchResult(
            self._tokens(pages),
            handle,
            handle,
            handle,
            swa_indices=swa,
            full_kv_hit_length=int(host.full_kv_hit_length),
            swa_branching_seqlen=int(host.swa_branching_seqlen),
            recurrent_branching_seqlen=int(host.recurrent_branching_seqlen),
            cow_src_slot=slot,
            lost_tokens=tuple(host.lost_tokens.tolist()),
        )

    def peek_prefix_len(self, key: RadixKey) -> int:
        """Tokens that `match_prefix` would hit; nothing changes."""
        rank, pages = self._key(key)
        if pages is None:
            return 0
        return int(jitted.peek_prefix_len(self.states[rank], pages).hit_length)

    def insert(self, params: InsertParams) -> InsertResult:
        """Put a key's whole pages into the tree; nothing is freed.

        Args:
          params: its locations must come from `alloc`, whole pages in order.
        """
        rank, key = self._key(params.key)
        if key is None:
            return InsertResult()
        size = len(key.token_ids) // self.page_size
        length = key.length
        slot = np.int32(params.recurrent_value)
        has_slot = self.config.has_recurrent
        wanted = core.InsertParams(
            key=key,
            value=self._pages("value", params.value, length, size),
            prev_prefix_len=np.int32(params.prev_prefix_len),
            swa_value=self._pages("swa_value", params.swa_value, length, size)
            if self.config.has_swa
            else None,
            swa_evicted_seqlen=np.int32(params.swa_evicted_seqlen)
            if self.config.has_swa
            else None,
            recurrent_value=slot if has_slot else None,
            recurrent_length=length if has_slot else None,
        )
        state, result = jitted.insert(self.states[rank], wanted)
        self._keep(rank, state, key)
        return host_insert_result(result)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free exactly so much, rounded up to pages, or all that is not locked."""
        if self.disable:
            return EvictResult()
        self.hicache_write_back(params)
        rank = self._rank(params.dp_rank)
        wanted = core.EvictParams(
            num_tokens=np.int32(params.num_tokens),
            swa_num_tokens=np.int32(params.swa_num_tokens),
            recurrent_num=np.int32(params.recurrent_num),
        )
        self.states[rank], result = jitted.evict(self.states[rank], wanted)
        return EvictResult(*np.asarray(result.scalars).tolist())

    def inc_lock_ref(self, node: TreeHandle) -> IncLockRefResult:
        """Lock what a match found."""
        if node.match is None:
            return IncLockRefResult()
        rank = node.dp_rank
        self.states[rank], receipt = jitted.inc_lock_ref(self.states[rank], node.match)
        receipt = dataclasses.replace(receipt, scalars=np.asarray(receipt.scalars))
        if not receipt.serial:
            raise RuntimeError("\n".join(describe(self.take_status(rank))))
        return IncLockRefResult(receipt=receipt, delta=int(receipt.delta))

    def dec_lock_ref(
        self, node: TreeHandle, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Give a lock back by its receipt.

        Raises:
          ValueError: there are no params.
          RuntimeError: the lock has been given back already.
        """
        if params is None and node.match is not None:
            raise ValueError(
                "dec_lock_ref got no params; wanted those of the lock: only they say "
                "what it holds. Pass lock.to_dec_params()."
            )
        if params is None or params.receipt is None:
            return DecLockRefResult()
        rank, receipt = node.dp_rank, params.receipt.to_dec_params()
        self.states[rank], result = jitted.dec_lock_ref(self.states[rank], receipt)
        is_released, delta = np.asarray(result.scalars).tolist()
        if not is_released:
            raise RuntimeError("\n".join(describe(self.take_status(rank))))
        return DecLockRefResult(delta)

    # Requests.

    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        """Publish a request that ends and give back all that it held."""
        if req.req_pool_idx is None:
            return
        rank, result = self._rank(req.dp_rank), InsertResult()
        table, key = self._tables.of(self.requests, req)
        state, row, none = self.states[rank], np.int32(1), self._tables.no_receipt
        if is_insert and not self.disable:
            state, _, inserted = jitted.cache_finished_req(state, table, row, key, none)
            result = host_insert_result(inserted)
        else:
            state, _ = jitted.abort_req(state, table, row, none)
        self._keep(rank, state, key)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock)
        self.requests.free(req)
        req.release()
        self.hicache_write_through(req, result)

    def cache_unfinished_req(self, req: Request) -> None:
        """Publish what a request that goes on has written; its lock moves along."""
        row, length = req.req_pool_idx, req.kv_committed_len
        if row is None:
            return
        if not self.disable:
            self._publish(req, row)
        req.prefix_indices = self.requests.read(row, length)

    def _publish(self, req: Request, row: int) -> None:
        rank = self._rank(req.dp_rank)
        table, key = self._tables.of(self.requests, req)
        state, table, published = jitted.cache_unfinished_req(
            self.states[rank], table, np.int32(1), key, self._tables.no_receipt
        )
        self._keep(rank, state, key)
        seen = self._tables.read(state, table, published)
        count = req.kv_allocated_len // self.page_size
        swa = None if seen.swa_pages is None else self._tokens(seen.swa_pages[:count])
        self.requests.write(row, 0, self._tokens(seen.pages[:count]), swa)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock)
        node = int(seen.match.best_match_node)
        req.last_node = TreeHandle(rank, node, seen.match if node else None)
        req.lock = DecLockRefParams(receipt=seen.receipt)
        req.cache_protected_len = req.last_matched_prefix_len = seen.protected_length
        if req.recurrent_track_slots:
            req.recurrent_track_slots = seen.track_slots
            req.recurrent_last_track_seqlen = seen.last_track_len

    def evict_req_swa(self, req: Request, num_tokens: int) -> int:
        """Let go of a request's own SWA pages behind its window; not the tree's."""
        if not self.config.has_swa or req.req_pool_idx is None:
            return 0
        start = max(req.swa_evicted_seqlen, req.cache_protected_len)
        end = self._swa_frontier(num_tokens, self.config.sliding_window_size)
        if end <= start:
            return 0
        table = self.requests.swa
        assert table is not None
        gone = table[req.req_pool_idx, start:end]
        count = int(np.count_nonzero(gone))
        self.free(NO_INDICES, req.dp_rank, gone.copy())
        table[req.req_pool_idx, start:end] = 0
        req.swa_evicted_seqlen = end
        return count

    def assert_recurrent_slot_ledger(
        self, dp_rank: int = 0, live_reqs: list[Request] | None = None
    ) -> int:
        """Check that active + tree + free slots are the pool, see the base class."""
        return self._tables.check_slots(self.states[dp_rank], dp_rank, live_reqs)

    def _no_match(self, rank: int, req: Any) -> MatchResult:
        root = TreeHandle(rank)
        if req is not None:
            req.recurrent_cow_src_index = 0
        swa = NO_INDICES if self.config.has_swa else None
        return MatchResult(NO_INDICES, root, root, root, swa_indices=swa)


def host_insert_result(result: core.InsertResult) -> InsertResult:
    """An insert's scalars on the host."""
    prefix, inserted, exist, committed = np.asarray(result.scalars).tolist()
    return InsertResult(prefix, inserted, bool(exist), bool(committed))
