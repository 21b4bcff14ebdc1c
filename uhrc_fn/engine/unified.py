"""`UnifiedRadixCache`: the functional cache behind the interface of engines.

A thin shell. Each rank has a `CacheState`; a method turns tokens into a key, calls one
jitted operation, and turns pages into token locations; see `RankStates`.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from .. import jitted
from .. import params as core
from ..config import CacheConfig
from ..pools.sizing import NUM_TRACK_SLOTS, request_owned_slots
from ..status import describe
from . import packed
from .packed import MATCH_SCALARS
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
from .unified_requests import RowTables


@dataclasses.dataclass(frozen=True, eq=False)
class TreeHandle:
    """A node as an engine holds it: where a match ended, and what locks it."""

    dp_rank: int
    id: int = 0
    """Node of the tree; 0 is the root."""
    generation: int = 0
    """Which use of the node's id it is."""
    words: np.ndarray | None = None
    """Scalars, pages and nodes of the match; `None` for the root."""
    num_pages: int = 0
    """Pages that it has room for."""

    @property
    def match(self) -> core.MatchResult | None:
        """What `inc_lock_ref` of the core takes; `None` for the root."""
        if self.words is None:
            return None
        pages, path = MATCH_SCALARS, MATCH_SCALARS + self.num_pages
        return core.MatchResult(
            device_indices=self.words[pages:path],  # type: ignore[arg-type]
            path=self.words[path : path + self.num_pages],  # type: ignore[arg-type]
            scalars=self.words[:pages],  # type: ignore[arg-type]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeHandle):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[int, int, int]:
        return self.dp_rank, self.id, self.generation


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
        self._structures: dict[tuple, Any] = {}

    # The tree.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix that every component can serve, and refresh it."""
        rank, key = self._key(params.key)
        if key is None:
            return self._no_match(rank, params.req)
        state, seen = packed.match_prefix(
            self.states[rank], key.words, params.full_only
        )
        self._keep(rank, state, key.num_pages)
        seen = np.asarray(seen)
        # In the order of the core's `MatchResult`; each of its properties would cost
        # as much as a transfer.
        scalars = seen[:MATCH_SCALARS].tolist()
        hit, run, node, generation, swa_branching, branching, slot, *lost, _ = scalars
        count = hit // self.page_size
        pages = seen[MATCH_SCALARS:]
        swa = None
        if self.config.has_swa:
            swa = self._tokens(pages[2 * key.num_pages :][:count])
        handle = TreeHandle(rank)
        if node:
            handle = TreeHandle(rank, node, generation, seen, key.num_pages)
        if params.req is not None and params.cow_recurrent:
            params.req.recurrent_cow_src_index = slot
        return MatchResult(
            self._tokens(pages[:count]),
            handle,
            handle,
            handle,
            swa_indices=swa,
            full_kv_hit_length=run,
            swa_branching_seqlen=swa_branching,
            recurrent_branching_seqlen=branching,
            cow_src_slot=slot,
            lost_tokens=tuple(lost),
        )

    def _record(self, kind, fields: dict[str, Any], **static: bool):
        """A record of the core, by a structure that is made once.

        Making one anew costs as much as a dispatch. `fields` come in the record's
        order.
        """
        leaves, inner = jax.tree.flatten(tuple(fields.values()))
        place = (kind, inner, *static.values())
        structure = self._structures.get(place)
        if structure is None:
            structure = jax.tree.structure(kind(**fields, **static))
            self._structures[place] = structure
        return jax.tree.unflatten(structure, leaves)

    def peek_prefix_len(self, key: RadixKey) -> int:
        """Tokens that `match_prefix` would hit; nothing changes."""
        rank, words = self._key(key)
        if words is None:
            return 0
        return int(packed.peek_prefix_len(self.states[rank], words.words)[0])

    def insert(self, params: InsertParams) -> InsertResult:
        """Put a key's whole pages into the tree; nothing is freed.

        It does not wait for the device: the first look into the result does.

        Args:
          params: its locations must come from `alloc`, whole pages in order.
        """
        rank, key = self._key(params.key, rows=1 + self.config.has_swa)
        if key is None:
            return InsertResult()
        words = key.words
        self._write_pages("value", params.value, key.length, key.row(0))
        words[packed.PREV_PREFIX_LEN] = params.prev_prefix_len
        if self.config.has_swa:
            self._write_pages("swa_value", params.swa_value, key.length, key.row(1))
            words[packed.SWA_EVICTED_SEQLEN] = params.swa_evicted_seqlen
        if self.config.has_recurrent:
            words[packed.RECURRENT_VALUE] = params.recurrent_value
        state, scalars = packed.insert(self.states[rank], words)
        self._keep(rank, state, key.num_pages)
        return InsertResult.arriving(scalars)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free exactly so much, rounded up to pages, or all that is not locked."""
        if self.disable:
            return EvictResult()
        self.hicache_write_back(params)
        rank = self._rank(params.dp_rank)
        names = ("num_tokens", "swa_num_tokens", "recurrent_num")
        fields = {name: np.int32(getattr(params, name)) for name in names}
        wanted = self._record(core.EvictParams, fields)
        self.states[rank], result = jitted.evict(self.states[rank], wanted)
        return EvictResult(*np.asarray(result.scalars).tolist())

    def inc_lock_ref(self, node: TreeHandle) -> IncLockRefResult:
        """Lock what a match found."""
        if node.words is None:
            return IncLockRefResult()
        rank = node.dp_rank
        self.states[rank], receipt = jitted.inc_lock_ref(self.states[rank], node.match)
        serial, *_, delta = np.asarray(receipt.scalars).tolist()
        if not serial:
            raise RuntimeError("\n".join(describe(self.take_status(rank))))
        return IncLockRefResult(receipt=receipt, delta=delta)

    def dec_lock_ref(
        self, node: TreeHandle, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Give a lock back by its receipt.

        Raises:
          ValueError: there are no params.
          RuntimeError: the lock has been given back already.
        """
        if params is None and node.words is not None:
            raise ValueError(
                "dec_lock_ref got no params; wanted those of the lock: only they say "
                "what it holds. Pass lock.to_dec_params()."
            )
        if params is None or params.receipt is None:
            return DecLockRefResult()
        rank = node.dp_rank
        self.states[rank], result = jitted.dec_lock_ref(
            self.states[rank], params.receipt
        )
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
            result = InsertResult.arriving(inserted.scalars)
        else:
            state, _ = jitted.abort_req(state, table, row, none)
        self._keep(rank, state, len(key.token_ids) // self.page_size)
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
        self._keep(rank, state, len(key.token_ids) // self.page_size)
        seen = self._tables.read(state, table, published)
        count = req.kv_allocated_len // self.page_size
        swa = None if seen.swa_pages is None else self._tokens(seen.swa_pages[:count])
        self.requests.write(row, 0, self._tokens(seen.pages[:count]), swa)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node, req.lock)
        words = seen.match_words
        node, generation = words[2:4].tolist()
        req.last_node = TreeHandle(rank)
        if node:
            num_pages = (len(words) - MATCH_SCALARS) // 2
            req.last_node = TreeHandle(rank, node, generation, words, num_pages)
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
