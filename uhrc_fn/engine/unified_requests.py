"""One request's row as the core's tables, and back: host in, one array out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import params as core
from ..config import CacheConfig, ComponentType
from ..keys import radix_key
from ..pools.req_to_token import (
    HybridReqToTokenPool,
    ReqToTokenPool,
    RequestConfig,
)
from ..state import CacheState, Owner
from ..tree_arrays import GENERATION, NULL, take
from .packed import MATCH_SCALARS
from .request import Request, RequestTable


class PublishedRow(NamedTuple):
    """What an unfinished request holds after it has published."""

    pages: np.ndarray
    swa_pages: np.ndarray | None
    track_slots: list[int]
    last_track_len: int
    protected_length: int
    match_words: np.ndarray
    """Scalars, pages and nodes of a match of what the tree holds of it."""
    receipt: core.IncLockRefResult


class RowTables:
    """Makes tables of one request (row 1) for the request operations of the core.

    Args:
      config: of the cache.
      num_track_slots: of each request.
      buckets: static sizes.
    """

    def __init__(self, config: CacheConfig, num_track_slots: int, buckets: Any):
        self.buckets = buckets
        self.config = config
        self.num_track_slots = num_track_slots
        self.no_receipt = core.IncLockRefResult(
            path=np.full(1, NULL, np.int32),  # type: ignore[arg-type]
            scalars=np.zeros(6, np.int32),  # type: ignore[arg-type]
        )
        """Locks are given back apart: their paths have sizes of their own."""

    def of(self, requests: RequestTable, req: Request):
        """A request's table and the key of what it has written.

        Returns:
          ``(table, key)``; one static size for both, so that a program serves each.
        """
        row, size = req.req_pool_idx, self.config.page_size
        count = -(-req.kv_allocated_len // size)
        width = self.buckets.of(count)
        pages = self._row(requests.full, row, count, width)
        has_swa = self.config.has_swa
        swa = self._row(requests.swa, row, count, width) if has_swa else pages[:, :0]
        shape = RequestConfig(
            num_requests=1,
            max_pages=width,
            page_size=size,
            has_swa=has_swa,
            num_track_slots=self.num_track_slots,
        )
        common: dict[str, Any] = {
            "pages": pages,
            "swa_pages": swa,
            "length": _one(req.kv_committed_len),
            "protected_length": _one(req.cache_protected_len),
            "config": shape,
        }
        if self.config.has_recurrent:
            slots = [0] * self.num_track_slots
            held = req.recurrent_track_slots or slots
            tracks = np.asarray([slots, held], np.int32)
            table = HybridReqToTokenPool(
                **common,
                running_slot=_one(req.recurrent_pool_idx),  # type: ignore[arg-type]
                track_slots=tracks.reshape(2, -1),  # type: ignore[arg-type]
                next_track=_one(  # type: ignore[arg-type]
                    req.recurrent_next_track_idx
                ),
                last_track_len=_one(  # type: ignore[arg-type]
                    req.recurrent_last_track_seqlen
                ),
            )
        else:
            table = ReqToTokenPool(**common)
        key = req.key(req.kv_committed_len)
        pages_of_key = self.buckets.of_key(count)
        return table, radix_key(
            key.token_ids[: pages_of_key * size],
            self.config,
            extra_key=key.extra_key,
            cache_salt=key.cache_salt,
            num_pages=pages_of_key,
        )

    def _row(self, table, row, count: int, width: int) -> np.ndarray:
        size = self.config.page_size
        rows = np.zeros((2, width), np.int32)
        rows[1, :count] = table[row, : count * size : size] // size
        return rows

    def read(self, state: CacheState, table, published) -> PublishedRow:
        """Bring what a request holds after publishing to the host, in one array."""
        words = np.asarray(_packed(state, table, published.receipt))
        path, words = np.split(words, [published.receipt.path.shape[-1]])
        width = table.pages.shape[1]
        pages, words = words[:width], words[width:]
        swa_pages = None
        if self.config.has_swa:
            swa_pages, words = words[:width], words[width:]
        generation, protected, *words = words.tolist()
        _, _, anchor, _, num_pages, _ = words[:6]
        last_track_len, *track_slots = words[6:] or [0]
        scalars = np.zeros(MATCH_SCALARS, np.int32)
        hit = num_pages * self.config.page_size
        scalars[:4] = hit, hit, anchor, generation
        scalars[-1] = 1  # FULL was asked alone
        # The table is at least as wide as the key.
        match_words = np.concatenate([scalars, pages[: len(path)], path])
        return PublishedRow(
            pages,
            swa_pages,
            track_slots,
            last_track_len,
            protected,
            match_words,
            published.receipt,
        )

    def check_slots(
        self, state: CacheState, dp_rank: int, live_reqs: list[Request] | None
    ) -> int:
        """See `BasePrefixCache.assert_recurrent_slot_ledger`."""
        kind = ComponentType.RECURRENT
        active = int(np.count_nonzero(np.asarray(state.slot_owner) == Owner.REQUEST))
        free = int(state.num_free[kind])
        tree = int(state.evictable[kind] + state.protected[kind])
        total = self.config.num_recurrent_slots
        if active + tree + free != total:
            raise AssertionError(
                f"rank {dp_rank}: {active} active + {tree} tree + {free} free slots of "
                f"{total}; wanted all of them. A slot is lost or owned twice."
            )
        if live_reqs is not None:
            held = [
                slot
                for req in live_reqs
                if req.rank == dp_rank
                for slot in (req.recurrent_pool_idx, *req.recurrent_track_slots)
                if slot
            ]
            if len(set(held)) != len(held) or len(held) != active:
                raise AssertionError(
                    f"rank {dp_rank}: requests hold slots {sorted(held)}, the pool has "
                    f"{active} active; wanted each once. A slot has leaked."
                )
        return active


def _one(value: int) -> np.ndarray:
    return np.asarray([0, value], np.int32)


@jax.jit
def _packed(state: CacheState, table: ReqToTokenPool, receipt):
    """All that `RowTables.read` wants, since each array read costs a transfer."""
    generation = take(state.tree.fields, GENERATION, receipt.anchor)
    parts = [receipt.path, table.pages[1]]
    if table.config.has_swa:
        parts.append(table.swa_pages[1])
    parts += [generation[None], table.protected_length[1:], receipt.scalars]
    if isinstance(table, HybridReqToTokenPool):
        parts += [table.last_track_len[1:], table.track_slots[1]]
    return jnp.concatenate(parts)
