"""Our `UnifiedRadixCache` under the constructor and methods of the peer's.

The peer's pools stay the engine's; ours has its own, so each page of ours stands for
`page_size` locations of the peer's, and each slot for a slot of it. What our cache
frees of pages and slots that its tree or a request owned is freed there too.
"""

import importlib
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from peer_nodes import PeerNode

from uhrc_fn import CacheConfig
from uhrc_fn.config import ComponentType
from uhrc_fn.engine import (
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    Request,
    RequestTable,
    UnifiedRadixCache,
)
from uhrc_fn.engine.unified import TreeHandle
from uhrc_fn.jitted import alloc_slots, free_slots
from uhrc_fn.state import Owner

_PAGES = 256
_ROWS = 16


def _peer(name: str) -> Any:
    return importlib.import_module(f"sgl_jax.srt.mem_cache.{name}")


class WholeKey:
    """The FULL component as tests hook into it: it caps no key."""

    def prepare_for_caching_req(self, req, insert_params, token_ids_len, is_finished):
        """No cap."""

    def cleanup_after_caching_req(self, req, **_kwargs):
        """Nothing to clean up."""


class PeerUnifiedCache:
    """What the peer's tests build as `UnifiedRadixCache`."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int = 1,
        disable: bool = False,
        max_seq_len: int = 4096,
        tree_components: Iterable[int] = (ComponentType.FULL,),
        enable_recurrent_extra_buffer: bool = False,
        recurrent_track_interval: int | None = None,
        **_shapes: Any,
    ):
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.page_size = page_size
        self.disable = disable
        self.tree_components = tuple(tree_components)
        self.enable_recurrent_extra_buffer = enable_recurrent_extra_buffer
        self.recurrent_track_interval = recurrent_track_interval
        ranks = token_to_kv_pool_allocator.dp_size
        settings: dict[str, Any] = {}
        if self.supports_recurrent():
            settings["num_recurrent_slots"] = req_to_token_pool.slots_per_rank
        names = tuple(ComponentType(c).name for c in self.tree_components)
        config = CacheConfig(
            components=names,
            page_size=page_size,
            num_pages=_PAGES,
            max_prefix_pages=min(max_seq_len // page_size, _PAGES),
            **settings,
        )
        table = RequestTable(_ROWS, max_seq_len, page_size)
        self.mine = UnifiedRadixCache(table, config, dp_size=ranks, disable=disable)
        self.components: dict[int, Any] = {self.tree_components[0]: WholeKey()}
        if self.supports_recurrent():
            parts = _peer("unified_cache_components")
            kind = parts.ComponentType.RECURRENT
            self.components[kind] = parts.RecurrentComponent(self, None)
        self.root_node = PeerNode(self, TreeHandle(0), RadixKey([]))
        self._start()

    def _start(self) -> None:
        ranks = range(self.mine.dp_size)
        self._locations: list[dict[int, np.ndarray]] = [{} for _ in ranks]
        self._slots: list[dict[int, int]] = [{} for _ in ranks]
        self._nodes: dict[TreeHandle, PeerNode] = {}
        self._requests: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def reset(self) -> None:
        self.mine.reset()
        self._start()

    # The tree.

    def match_prefix(self, params: Any) -> Any:
        key, _ = self._key(params.key)
        clone = Request(())
        wanted = MatchPrefixParams(key, params.full_only, params.cow_recurrent, clone)
        found = self.mine.match_prefix(wanted)
        rank, handle = found.best_match_node.dp_rank, found.best_match_node
        if params.cow_recurrent and clone.recurrent_cow_src_index:
            slot = self._slots[rank][clone.recurrent_cow_src_index]
            params.req.recurrent_cow_src_index = slot
        node = self._node(handle, key[: found.hit_length])
        return _peer("base_prefix_cache").MatchResult(
            device_indices=self._theirs(rank, found.device_indices),
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def insert(self, params: Any) -> Any:
        key, rank = self._key(params.key)
        result = _peer("unified_cache_components").InsertResult()
        whole = len(key) // self.page_size * self.page_size
        if self.disable or not whole:
            return result
        value = key.token_ids if params.value is None else params.value
        mine = self._stand_ins(rank, np.asarray(value, np.int32)[:whole])
        slot = self._stand_in_slot(rank, params.recurrent_value)
        done = self.mine.insert(InsertParams(key, mine, recurrent_value=slot))
        # What was not adopted stays the caller's: nothing of it is freed there.
        self._forget(rank, self._owned(rank, 0, mine[:: self.page_size]))
        if slot and not done.recurrent_committed:
            self._slots[rank].pop(slot)
            state = self.mine.states[rank]
            self.mine.states[rank] = free_slots(state, np.asarray([slot], np.int32))
        self._settle(rank)
        result.prefix_len = done.prefix_len
        result.recurrent_exist = done.recurrent_exist
        result.recurrent_committed = done.recurrent_committed
        return result

    def evict(self, params: Any) -> Any:
        done = self.mine.evict(params)
        self._settle(params.dp_rank or 0)
        return done

    def inc_lock_ref(self, node: PeerNode) -> Any:
        return self.mine.inc_lock_ref(node.handle)

    def dec_lock_ref(self, node: PeerNode, params: Any = None) -> Any:
        return self.mine.dec_lock_ref(node.handle, params)

    # Requests.

    def cache_unfinished_req(self, req: Any) -> None:
        """Publish by our cache, then put its locations where the peer's stood."""
        tokens = req.fill_ids
        mine, theirs, rank = self._mine(req, tokens)
        params = _peer("base_prefix_cache").InsertParams()
        length = self._cap(req, params, len(tokens), is_finished=False)
        mine.kv_committed_len = length
        self.mine.cache_unfinished_req(mine)
        if not self.disable:
            self._read_back(req, mine, theirs, tokens)
        self._clean_up(req, params, is_finished=False)
        self._settle(rank)

    def _read_back(self, req, mine: Request, theirs, tokens) -> None:
        is_held = mine.last_node is not None and bool(mine.last_node.id)
        shared = mine.cache_protected_len if is_held else 0
        held = self.mine.requests.read(mine.req_pool_idx, len(theirs))
        now = np.concatenate(
            [self._theirs(mine.rank, held[:shared]), theirs[shared:]]
        ).astype(np.int32)
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, len(now))), now)
        req.prefix_indices = now
        if is_held:
            key = RadixKey(tokens[:shared], req.extra_key, req.dp_rank)
            req.last_node = self._node(mine.last_node, key)
            req.last_matched_prefix_len = req.cache_protected_len = shared

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        """Publish or drop by our cache; the row stays the peer's to free."""
        length = req.pop_committed_kv_cache()
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        mine, _, rank = self._mine(req, tokens)
        params = _peer("base_prefix_cache").InsertParams()
        length = self._cap(req, params, length, is_finished=True)
        mine.kv_committed_len = length
        slot = 0
        if is_insert and params.recurrent_value is not None:
            slot = self._stand_in_slot(rank, params.recurrent_value)
            mine.recurrent_pool_idx = slot
        self.mine.cache_finished_req(mine, is_insert=is_insert and length > 0)
        committed = bool(slot) and not self._is_free(
            rank, ComponentType.RECURRENT, slot
        )
        if slot and not committed:
            self._slots[rank].pop(slot)  # the peer's pool frees its own
        self._settle(rank)
        self._clean_up(req, params, is_finished=True, committed=committed)
        self._requests.pop(req, None)

    def _mine(self, req: Any, tokens: list[int]):
        """Our request for theirs, with pages for what it has computed since."""
        rank, length = req.dp_rank or 0, len(tokens)
        mine = self._requests.get(req)
        if mine is None:
            mine = Request(tokens, dp_rank=req.dp_rank, extra_key=req.extra_key)
            assert self.mine.requests.alloc(mine)
            # A prefix that the tree does not hold has no pages of ours.
            shared = req.cache_protected_len
            mine.cache_protected_len = mine.kv_allocated_len = shared
            self._requests[req] = mine
        mine.origin_input_ids = tokens
        theirs = self.req_to_token_pool.read(req.req_pool_idx, length)
        start = mine.kv_allocated_len
        assert self.mine.extend_req(mine, length)
        row = self.mine.requests.full[mine.req_pool_idx]
        for first in range(start, length, self.page_size):
            page = int(row[first]) // self.page_size
            self._locations[rank][page] = theirs[first : first + self.page_size]
        return mine, theirs, rank

    def _cap(self, req, params, length: int, is_finished: bool) -> int:
        """Tokens that every component agrees to publish."""
        if self.disable:
            return length
        caps = [
            part.prepare_for_caching_req(req, params, length, is_finished=is_finished)
            for part in self.components.values()
        ]
        return min([length, *(cap for cap in caps if cap is not None)])

    def _clean_up(self, req, params, is_finished: bool, committed: bool = False):
        result = _peer("unified_cache_components").InsertResult(
            recurrent_committed=committed
        )
        for part in self.components.values():
            part.cleanup_after_caching_req(
                req,
                is_finished=is_finished,
                insert_result=result,
                insert_params=params,
            )

    # Sizes.

    def supports_recurrent(self) -> bool:
        return ComponentType.RECURRENT in self.tree_components

    def evictable_size(self, dp_rank: int = 0) -> int:
        return self.mine.evictable_size(dp_rank)

    def protected_size(self, dp_rank: int = 0) -> int:
        return self.mine.protected_size(dp_rank)

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        return self.mine.recurrent_evictable_size(dp_rank)

    def total_size(self) -> int:
        return sum(self.mine.total_size(rank) for rank in range(self.mine.dp_size))

    @property
    def component_evictable_size_(self) -> dict[int, list[int]]:
        return self._sizes("full_evictable_size", "recurrent_evictable_size")

    @property
    def component_protected_size_(self) -> dict[int, list[int]]:
        return self._sizes("full_protected_size", "recurrent_protected_size")

    def _sizes(self, full: str, recurrent: str) -> dict[int, list[int]]:
        ranks = range(self.mine.dp_size)
        names = {ComponentType.FULL: full, ComponentType.RECURRENT: recurrent}
        return {c: [getattr(self.mine, n)(r) for r in ranks] for c, n in names.items()}

    def assert_recurrent_slot_ledger(self, dp_rank: int = 0, live_reqs=None) -> int:
        """Slots of requests: those that neither the peer's pool nor our tree has."""
        pool = self.req_to_token_pool
        self.mine.assert_recurrent_slot_ledger(dp_rank)
        tree = self.mine.recurrent_total_size(dp_rank)
        active = pool.slots_per_rank - tree - pool.recurrent_available_size(dp_rank)
        assert active >= 0
        if live_reqs is not None:
            held = pool.count_request_owned_recurrent_slots(live_reqs, dp_rank)
            assert held == active, (held, active)
        return active

    def pretty_print(self) -> None:
        self.mine.pretty_print()

    # Between their locations and ours.

    def _key(self, key: Any) -> tuple[RadixKey, int]:
        if not hasattr(key, "token_ids"):
            key = RadixKey(key)
        return RadixKey(key.token_ids, key.extra_key, key.dp_rank), key.dp_rank or 0

    def _node(self, handle: TreeHandle, key: RadixKey) -> PeerNode:
        if not handle.id:
            return self.root_node
        node = self._nodes.setdefault(handle, PeerNode(self, handle, key))
        node.handle = handle
        return node

    def _stand_ins(self, rank: int, theirs: np.ndarray) -> np.ndarray:
        given = self.mine.alloc(len(theirs), rank)
        assert given is not None
        pages = given.full[:: self.page_size] // self.page_size
        rows = theirs.reshape(-1, self.page_size)
        self._locations[rank].update(zip(pages.tolist(), rows, strict=True))
        return given.full

    def _stand_in_slot(self, rank: int, value: Any) -> int:
        if value is None:
            return 0
        state = self.mine.states[rank]
        state, given = alloc_slots(state, np.int32(1), max_new=1, partial=False)
        self.mine.states[rank], slot = state, int(given.ids[0])
        self._slots[rank][slot] = int(value[0])
        return slot

    def _theirs(self, rank: int, ours: np.ndarray) -> np.ndarray:
        size = self.page_size
        parts = [self._locations[rank][int(t) // size] for t in ours[::size]]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def _owner(self, rank: int, component: int) -> np.ndarray:
        state = self.mine.states[rank]
        slots = component == ComponentType.RECURRENT
        return np.asarray(state.slot_owner if slots else state.page_owner)

    def _is_free(self, rank: int, component: int, entry: int) -> bool:
        return self._owner(rank, component)[entry] == Owner.FREE

    def _owned(self, rank: int, component: int, locations: np.ndarray) -> np.ndarray:
        """Those of a request's own locations that no tree took."""
        pages = locations // self.page_size
        mask = self._owner(rank, component)[pages] == Owner.REQUEST
        return locations[mask]

    def _forget(self, rank: int, locations: np.ndarray) -> None:
        self.mine.free(locations, rank)
        for location in locations.tolist():
            self._locations[rank].pop(location // self.page_size)

    def _settle(self, rank: int) -> None:
        """Free with the peer what our cache has freed."""
        pages, slots = self._locations[rank], self._slots[rank]
        for page in [p for p in pages if self._is_free(rank, 0, p)]:
            theirs = pages.pop(page)
            self.token_to_kv_pool_allocator.free(theirs[theirs != 0], dp_rank=rank)
        for slot in [s for s in slots if self._is_free(rank, 2, s)]:
            self.req_to_token_pool.free_recurrent_slot(slots.pop(slot), rank)
