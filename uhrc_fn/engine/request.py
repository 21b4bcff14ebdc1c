"""What a cache needs to know of a request, and the table of its token locations."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .params import DecLockRefParams, RadixKey


@dataclasses.dataclass(eq=False)
class Request:
    """A request as the caches see it; an engine's own class with these fields will do.

    Lengths are in tokens. A cache keeps the fields below `rid` in step; the engine
    raises `kv_committed_len` as it computes, and appends to `output_ids`.
    """

    origin_input_ids: Sequence[int] | np.ndarray = dataclasses.field(repr=False)
    output_ids: list[int] = dataclasses.field(default_factory=list)
    extra_key: Any = None
    cache_salt: Any = None
    dp_rank: int | None = None
    rid: Any = None

    req_pool_idx: int | None = None
    """Row of the request table; `None` while it has none."""
    kv_committed_len: int = 0
    """Tokens whose KV and state are written: what may be published."""
    kv_allocated_len: int = 0
    """Tokens that have a location, in whole pages."""
    cache_protected_len: int = 0
    """Tokens at the front whose locations are the tree's."""
    last_matched_prefix_len: int = 0
    prefix_indices: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32)
    )
    """Locations of what is written: the next chunk goes on behind them."""
    last_node: Any = None
    """Node that its lock ends at."""
    lock: DecLockRefParams | None = None
    """What gives the lock back."""
    swa_evicted_seqlen: int = 0
    """Tokens at the front whose SWA locations it has let go."""

    recurrent_pool_idx: int = 0
    """Running slot, 0 for none."""
    recurrent_cow_src_index: int = 0
    """Slot to clone before the next forward, 0 for none."""
    recurrent_track_slots: list[int] = dataclasses.field(default_factory=list)
    recurrent_next_track_idx: int = 0
    """Which track slot the next boundary writes."""
    recurrent_last_track_seqlen: int = 0
    """Tokens that the kept snapshot covers, 0 while there is none to publish."""

    @property
    def rank(self) -> int:
        """Rank that serves it."""
        return self.dp_rank or 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.origin_input_ids) + len(self.output_ids)

    def key(self, length: int | None = None) -> RadixKey:
        """Key of its first `length` tokens; `None` for all of them."""
        ids = np.asarray(self.origin_input_ids)
        if self.output_ids and (length is None or length > len(ids)):
            ids = np.concatenate([ids, np.asarray(self.output_ids, ids.dtype)])
        return RadixKey(ids[:length], self.extra_key, self.dp_rank, self.cache_salt)

    def pop_committed_kv_cache(self) -> int:
        """Take `kv_committed_len`; what is published once is not again."""
        length, self.kv_committed_len = self.kv_committed_len, 0
        return length

    def release(self) -> None:
        """Forget what it held, once a cache has given it back; tokens stay."""
        fresh = Request(())
        for field in dataclasses.fields(self):
            if field.name not in _TAGS:
                setattr(self, field.name, getattr(fresh, field.name))


_TAGS = {"origin_input_ids", "output_ids", "rid"}
_TAGS |= {"extra_key", "cache_salt", "dp_rank"}


class RequestTable:
    """Where each token of each running request lies: NumPy, on the host.

    Args:
      num_requests: requests that can run at once, on all ranks together.
      max_tokens: tokens of the longest request, prompt and output.
      page_size: tokens a page; rows are as wide as whole pages.
      has_swa: keep SWA locations too.

    Row 0 is a dummy, for padded lanes of a batch.
    """

    def __init__(
        self,
        num_requests: int,
        max_tokens: int,
        page_size: int = 1,
        has_swa: bool = False,
    ):
        width = -(-max_tokens // page_size) * page_size
        if num_requests < 1 or width < 1:
            raise ValueError(
                f"num_requests={num_requests}, max_tokens={max_tokens}; wanted "
                "positive counts. Size the table by the longest request."
            )
        self.page_size = page_size
        self.full = np.zeros((num_requests + 1, width), np.int32)
        self.swa = np.zeros_like(self.full) if has_swa else None
        self.free_rows: deque[int] = deque()
        self.clear()

    def alloc(self, req: Request) -> bool:
        """Give a request a row, unless it has one; False where none is left."""
        if req.req_pool_idx is not None:
            return True
        if not self.free_rows:
            return False
        req.req_pool_idx = self.free_rows.popleft()
        return True

    def free(self, req: Request) -> None:
        """Take a row back; nothing where there is none."""
        row, req.req_pool_idx = req.req_pool_idx, None
        if row is not None:
            self._check(row)
            self.full[row] = 0
            if self.swa is not None:
                self.swa[row] = 0
            self.free_rows.append(row)

    def read(self, row: int, end: int) -> np.ndarray:
        """A copy of the first `end` FULL locations of a row."""
        return self.full[row, :end].copy()

    def write(self, row: int, start: int, full, swa=None) -> None:
        """Write locations from a token on.

        Raises:
          ValueError: the row is not wide enough.
        """
        end = start + len(full)
        self.check_width(end)
        self.full[row, start:end] = full
        if self.swa is not None:
            self.swa[row, start:end] = 0 if swa is None else swa

    def check_width(self, num_tokens: int) -> None:
        """Refuse what no row can hold.

        Raises:
          ValueError: it is longer than a row.
        """
        if num_tokens > self.full.shape[1]:
            raise ValueError(
                f"{num_tokens} tokens in a row of {self.full.shape[1]}; wanted a "
                "request that fits. Raise max_tokens, or end the request earlier."
            )

    def clear(self) -> None:
        """Empty all rows."""
        self.full[:] = 0
        if self.swa is not None:
            self.swa[:] = 0
        self.free_rows = deque(range(1, len(self.full)))

    def _check(self, row: int) -> None:
        if not 0 < row < len(self.full) or row in self.free_rows:
            raise ValueError(
                f"row {row} was freed and belongs to no request; wanted a row in use. "
                "Free each request once."
            )
