"""Our legacy caches under the constructors and methods of the peer's.

They stand on the peer's own allocators and request tables, which they know by the few
methods that they use of ours.
"""

from typing import Any

import numpy as np

from uhrc_fn.engine import (
    ChunkCache,
    InsertParams,
    RadixCache,
    RadixKey,
    Request,
    SWAChunkCache,
    SWARadixCache,
)
from uhrc_fn.engine.params import as_key

# The peer's trees take any rank, whatever the allocator has.
_RANKS = 4


class TheirPages:
    """The peer's allocator as ours."""

    def __init__(self, theirs: Any, page_size: int):
        self.theirs = theirs
        self.page_size = page_size
        self.dp_size = max(theirs.dp_size, _RANKS)
        self.supports_swa = hasattr(theirs, "free_swa")

    def clear(self) -> None:
        """The peer's reset leaves its allocator alone."""

    def pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def free(self, indices: Any, dp_rank: int = 0) -> None:
        indices = np.asarray(indices)
        self.theirs.free(indices[indices != 0], dp_rank=dp_rank)

    def _twins(self, dp_rank: int) -> np.ndarray:
        twins = self.theirs.full_to_swa_index_mapping
        return twins if self.theirs.dp_size == 1 else twins[dp_rank]

    def to_swa(self, indices: Any, dp_rank: int = 0) -> np.ndarray:
        return self._twins(dp_rank)[np.asarray(indices, np.int32)]

    def free_swa(self, indices: Any, dp_rank: int = 0) -> None:
        self.theirs.free_swa(np.asarray(indices, np.int32), dp_rank=dp_rank)

    def move_swa(self, source: Any, target: Any, dp_rank: int = 0) -> None:
        twins = self._twins(dp_rank)
        twins[target] = twins[source]
        twins[source] = 0

    def swa_available_size(self, dp_rank: int = 0) -> int:
        return self.theirs.swa_available_size(dp_rank)


class TheirTable:
    """The peer's request table as ours."""

    swa = None

    def __init__(self, theirs: Any, page_size: int):
        self.theirs = theirs
        self.page_size = page_size
        self.full = theirs.req_to_token

    def read(self, row: int, end: int) -> np.ndarray:
        return self.theirs.read(row, end)

    def write(self, row: int, start: int, full: Any, _swa: Any = None) -> None:
        self.theirs.write((row, slice(start, start + len(full))), full)

    def free(self, req: Request) -> None:
        """The peer's scheduler frees the row."""

    def clear(self) -> None:
        """The peer's reset leaves its table alone."""


class _AsPeer(RadixCache):
    """What both trees' adapters share."""

    def insert(self, params: Any) -> Any:
        if isinstance(params, InsertParams):
            return super().insert(params)
        key = as_key(params.key)
        value = None if params.value is None else np.asarray(params.value, np.int32)
        wanted = InsertParams(
            key,
            value,
            prev_prefix_len=params.prev_prefix_len,
            swa_evicted_seqlen=params.swa_evicted_seqlen,
        )
        result = super().insert(wanted)
        self._free_theirs(value, key, params.prev_prefix_len, result)
        return result.prefix_len

    def _free_theirs(self, value, key: RadixKey, shared: int, result) -> None:
        """A tree whose insert frees duplicates does so here."""

    def get_child_key_fn(self, key: RadixKey) -> tuple:
        return self._child_key(key.namespace, as_key(key).token_ids)

    @property
    def full_evictable_size_(self) -> dict[int, int]:
        return dict(enumerate(self._evictable))

    @property
    def full_protected_size_(self) -> dict[int, int]:
        return dict(enumerate(self._protected))

    def cache_unfinished_req(self, req: Any) -> None:
        mine = _request(req, req.fill_ids)
        if not self.disable:
            super().cache_unfinished_req(mine)
            _write_back(req, mine)

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        length = req.pop_committed_kv_cache()
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        super().cache_finished_req(_request(req, tokens), is_insert)


class PeerRadixCache(_AsPeer):
    """What the peer's tests build as `RadixCache`."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        page_size: int = 1,
        disable: bool = False,
        **_shapes: Any,
    ):
        super().__init__(
            TheirTable(req_to_token_pool, page_size),  # type: ignore[arg-type]
            TheirPages(token_to_kv_pool_allocator, page_size),  # type: ignore[arg-type]
            disable=disable,
        )

    def total_size(self, dp_rank: int | None = None) -> int:
        ranks = range(self.dp_size) if dp_rank is None else [dp_rank]
        return sum(super(_AsPeer, self).total_size(rank) for rank in ranks)


class PeerSWARadixCache(_AsPeer, SWARadixCache):
    """What the peer's tests build as `SWARadixCache`."""

    def __init__(
        self,
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        sliding_window_size: int,
        page_size: int = 1,
        disable: bool = False,
    ):
        SWARadixCache.__init__(
            self,
            TheirTable(req_to_token_pool, page_size),  # type: ignore[arg-type]
            TheirPages(token_to_kv_pool_allocator, page_size),  # type: ignore[arg-type]
            sliding_window_size=sliding_window_size,
            disable=disable,
        )

    def _free_theirs(self, value, key: RadixKey, shared: int, result) -> None:
        if self.disable or value is None:
            return
        whole = len(key) // self.page_size * self.page_size
        rank = key.rank
        self.allocator.free(value[shared : max(result.prefix_len, shared)], rank)
        self.allocator.free(value[result.inserted_len : whole], rank)

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]
        full = sum(self._evictable) + sum(self._protected)
        return full, sum(self._swa_evictable) + sum(self._swa_protected)

    @property
    def swa_evictable_size_(self) -> dict[int, int]:
        return dict(enumerate(self._swa_evictable))

    @property
    def swa_protected_size_(self) -> dict[int, int]:
        return dict(enumerate(self._swa_protected))

    def evict_req_swa(self, req: Any, pre_len: int) -> None:  # type: ignore[override]
        mine = Request((), req_pool_idx=req.req_pool_idx, last_node=req.last_node)
        mine.swa_evicted_seqlen = req.swa_evicted_seqlen
        super().evict_req_swa(mine, pre_len)
        req.swa_evicted_seqlen = mine.swa_evicted_seqlen


class PeerChunkCache(ChunkCache):
    """What the peer's registry builds as `ChunkCache`."""

    def __init__(self, req_to_token_pool, token_to_kv_pool_allocator, page_size: int):
        super().__init__(
            TheirTable(req_to_token_pool, page_size),  # type: ignore[arg-type]
            TheirPages(token_to_kv_pool_allocator, page_size),  # type: ignore[arg-type]
        )


class PeerSWAChunkCache(SWAChunkCache):
    """What the peer's registry builds as `SWAChunkCache`."""

    def __init__(
        self,
        req_to_token_pool,
        token_to_kv_pool_allocator,
        page_size: int,
        sliding_window_size: int,
    ):
        super().__init__(
            TheirTable(req_to_token_pool, page_size),  # type: ignore[arg-type]
            TheirPages(token_to_kv_pool_allocator, page_size),  # type: ignore[arg-type]
            sliding_window_size=sliding_window_size,
        )


def _request(req: Any, tokens: list[int]) -> Request:
    return Request(
        tokens,
        extra_key=req.extra_key,
        dp_rank=req.dp_rank,
        req_pool_idx=req.req_pool_idx,
        kv_committed_len=len(tokens),
        kv_allocated_len=len(tokens),
        cache_protected_len=req.cache_protected_len,
        last_node=req.last_node,
    )


def _write_back(req: Any, mine: Request) -> None:
    req.last_node, req.prefix_indices = mine.last_node, mine.prefix_indices
    req.cache_protected_len = mine.cache_protected_len
    req.last_matched_prefix_len = mine.last_matched_prefix_len
