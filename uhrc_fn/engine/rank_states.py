"""A `CacheState` for each rank, with its pools and sizes, on the host.

What `UnifiedRadixCache` stands on: tokens in, pages to the core, tokens out. Keys,
tables and allocations are padded to powers of two of pages, so that compilations stay
few.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import jitted, saving
from ..config import CacheConfig, ComponentType
from ..debug import tree_string
from ..state import Counter, init
from ..status import Status, describe
from .base import BasePrefixCache
from .packed import Words, pack_key
from .params import EvictParams, Locations, RadixKey
from .request import RequestTable

FULL, SWA, RECURRENT = ComponentType
# Far enough below 2^30, where the core asks for it.
_COMPACT_AFTER = 1 << 28


class RankStates(BasePrefixCache):
    """States, pools and sizes of a cache with a tree a rank."""

    def __init__(
        self,
        requests: RequestTable,
        config: CacheConfig,
        *,
        dp_size: int = 1,
        disable: bool = False,
        min_bucket: int = 8,
    ):
        super().__init__(
            requests, page_size=config.page_size, dp_size=dp_size, disable=disable
        )
        if config.has_swa and requests.swa is None:
            raise ValueError(
                "a request table without SWA locations for a cache with SWA; wanted "
                "both. Build the table with has_swa=True."
            )
        self.config = config
        self._buckets = Buckets(config, min_bucket)
        self.states = [init(config) for _ in range(dp_size)]
        self._ticks = [0] * dp_size
        # Locations of each page, 4 bytes a token of the pool: to look them up takes
        # half as long as to compute them. Page 0, none, has location 0.
        num_rows = max(config.num_pages, config.num_swa_pages) + 1
        tokens = np.arange(num_rows * config.page_size, dtype=np.int32)
        self._locations = tokens.reshape(num_rows, config.page_size)
        self._locations[0] = 0

    def reset(self) -> None:
        """Forget everything; older handles and locks become stale."""
        self.states = [jitted.reset(state) for state in self.states]
        self._ticks = [0] * self.dp_size
        self.requests.clear()

    def save(self, path: str | os.PathLike, pools: Any = None) -> None:
        """Write the trees, and pools beside them, to a file; see `uhrc_fn.save`."""
        saving.save(path, (self.states, pools))

    def load(self, path: str | os.PathLike, pools: Any = None) -> Any:
        """Take the trees of a saved file, into a cache that nobody uses yet.

        Requests that ran when it was saved are forgotten: what they held is free.

        Args:
          path: the file.
          pools: like those that were saved; their contents do not matter.

        Returns:
          The pools of the file.

        Raises:
          SavedStateError: the file is refused, and nothing changed.
        """
        states, pools = saving.load(path, (self.states, pools))
        self.states = [jitted.drop_requests(state) for state in states]
        self._ticks = [int(state.clock) for state in self.states]
        self.requests.clear()
        return pools

    # Pools.

    def alloc(self, num_tokens: int, dp_rank: int | None = None) -> Locations | None:
        """Give whole pages for so many tokens, evicting exactly what is short."""
        rank = self._rank(dp_rank)
        count = -(-num_tokens // self.page_size)
        wanted = [count, count if self.config.has_swa else 0, 0]
        if not self._has_room(rank, wanted):
            return None
        number, bound = np.int32(count), self._buckets.of(count)
        most = [min(bound, capacity) for capacity in self.config.capacities]
        if not self.config.has_swa:
            self.states[rank], given = jitted.alloc_pages(
                self.states[rank], number, max_new=most[FULL], partial=False
            )
            return Locations(self._tokens(np.asarray(given.ids)[:count]))
        self.states[rank], given = jitted.alloc_request(
            self.states[rank],
            number,
            number,
            np.int32(0),
            max_pages=most[FULL],
            max_swa_pages=most[SWA],
            max_slots=1,
        )
        pages, swa = np.asarray(given.pages.ids), np.asarray(given.swa_pages.ids)
        return Locations(self._tokens(pages[:count]), self._tokens(swa[:count]))

    def _has_room(self, rank: int, wanted: Sequence[int]) -> bool:
        """Whether free and evictable entries cover it; tells the host tier first."""
        counters = self._counters(rank)
        free = counters[Counter.RING_SIZE : Counter.RING_SIZE + 3]
        evictable = counters[Counter.EVICTABLE : Counter.PROTECTED]
        short = np.maximum(np.asarray(wanted) - free, 0)
        if (short > evictable).any():
            return False
        if short.any():
            size, (full, swa, slots) = self.page_size, short.tolist()
            self.hicache_write_back(EvictParams(full * size, swa * size, slots, rank))
        return True

    def free(self, indices, dp_rank: int | None = None, swa_indices=None) -> None:
        """Return pages that a request owns, by their token locations; 0 is padding."""
        rank = self._rank(dp_rank)
        for locations, operation in (
            (indices, jitted.free_pages),
            (swa_indices, jitted.free_swa_pages),
        ):
            if locations is None or not len(locations):
                continue
            pages = np.unique(np.asarray(locations) // self.page_size)
            padded = pad(pages, self._buckets.of(len(pages)))
            self.states[rank] = operation(self.states[rank], padded)

    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the FULL pool."""
        return self._entry(dp_rank, Counter.RING_SIZE, FULL) * self.page_size

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the SWA pool."""
        return self._entry(dp_rank, Counter.RING_SIZE, SWA) * self.page_size

    def recurrent_available_size(self, dp_rank: int = 0) -> int:
        """Free slots of the recurrent pool."""
        return self._entry(dp_rank, Counter.RING_SIZE, RECURRENT)

    # Capabilities and sizes.

    def supports_swa(self) -> bool:
        """Whether the config has SWA."""
        return self.config.has_swa

    def supports_recurrent(self) -> bool:
        """Whether the config has RECURRENT."""
        return self.config.has_recurrent

    def recurrent_extra_buffer_active(self) -> bool:
        """Whether snapshots are published through track slots."""
        return self.config.enable_recurrent_extra_buffer and not self.disable

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked FULL tokens of the tree."""
        return self._entry(dp_rank, Counter.EVICTABLE, FULL) * self.page_size

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Locked FULL tokens of the tree."""
        return self._entry(dp_rank, Counter.PROTECTED, FULL) * self.page_size

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked SWA tokens of the tree."""
        return self._entry(dp_rank, Counter.EVICTABLE, SWA) * self.page_size

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Locked SWA tokens of the tree."""
        return self._entry(dp_rank, Counter.PROTECTED, SWA) * self.page_size

    def recurrent_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked snapshots."""
        return self._entry(dp_rank, Counter.EVICTABLE, RECURRENT)

    def recurrent_protected_size(self, dp_rank: int = 0) -> int:
        """Locked snapshots."""
        return self._entry(dp_rank, Counter.PROTECTED, RECURRENT)

    def tree_text(self) -> str:
        """The trees as text."""
        texts = [f"rank {r}\n{tree_string(s)}" for r, s in enumerate(self.states)]
        return "\n".join(texts)

    def raise_if_bad(self) -> None:
        """Raise if an operation met trouble that no method reported.

        Raises:
          RuntimeError: what happened and what to do.
        """
        lines = [
            f"rank {rank}: {line}"
            for rank, state in enumerate(self.states)
            for line in describe(state.status)
        ]
        if lines:
            raise RuntimeError("The cache met trouble.\n  " + "\n  ".join(lines))

    def take_status(self, dp_rank: int = 0) -> Status:
        """The status bits of a rank since the last call."""
        state = self.states[dp_rank]
        status = Status(int(self._counters(dp_rank)[Counter.STATUS]))
        counters = state.counters.at[int(Counter.STATUS)].set(0)
        self.states[dp_rank] = dataclasses.replace(state, counters=counters)
        return status

    # Between tokens and pages.

    def _key(self, key: Any, rows: int = 0) -> tuple[int, Words | None]:
        """``(rank, the key's words)``; no words where it has no whole page."""
        if not isinstance(key, RadixKey):
            key = RadixKey(key)
        rank = self._rank(key.dp_rank)
        whole = len(key) // self.page_size * self.page_size
        if self.disable or not whole:
            return rank, None
        kept = min(whole, self._buckets.longest)
        bucket = self._buckets.of_key(whole // self.page_size)
        return rank, pack_key(key, kept, self.config, bucket, rows)

    def _tokens(self, pages: np.ndarray) -> np.ndarray:
        """Token locations of pages; page 0, none, has location 0."""
        return self._locations.take(pages, 0).reshape(-1)

    def _write_pages(self, name: str, locations: Any, length: int, row) -> None:
        """Write the pages of token locations to the front of a row.

        Raises:
          ValueError: they are too few, or no whole pages in order.
        """
        if locations is None or len(locations) < length:
            count = 0 if locations is None else len(locations)
            raise ValueError(
                f"{name} has {count} locations for {length} tokens; wanted one each. "
                "Pass the request's row of the table."
            )
        grid = np.asarray(locations, np.int32)[:length].reshape(-1, self.page_size)
        pages = grid[:, 0] // self.page_size
        # What is out of bounds becomes some page, whose locations differ.
        wanted = self._locations.take(pages, 0, mode="wrap")
        if not (wanted == grid).all():
            raise ValueError(
                f"{name} is not made of whole pages in order; wanted locations "
                "page * page_size + offset. Pass what alloc and match_prefix gave."
            )
        row[: len(pages)] = pages

    def _counters(self, rank: int) -> np.ndarray:
        return np.asarray(self.states[rank].counters)

    def _entry(self, rank: int, counter: Counter, component: ComponentType) -> int:
        return int(self._counters(rank)[counter + component])

    def _keep(self, rank: int, state, num_pages: int) -> None:
        """Store a rank's next state; compact its clock long before it is high."""
        # An operation advances the clock by about the pages of its key, twice at most.
        self._ticks[rank] += 4 * (num_pages + 1)
        if self._ticks[rank] > _COMPACT_AFTER:
            state = jitted.compact_clock(state)
            self._ticks[rank] = int(state.clock)
        self.states[rank] = state


class Buckets:
    """Static page counts: powers of two, so that few programs are compiled.

    Args:
      config: bounds those of keys.
      least: the smallest; short keys share a program.
    """

    def __init__(self, config: CacheConfig, least: int = 8):
        self.limit = config.max_prefix_pages
        self.longest = config.max_prefix_pages * config.page_size
        self.least = least

    def of(self, count: int) -> int:
        """Static count for so many pages."""
        return max(1 << max(count - 1, 0).bit_length(), self.least)

    def of_key(self, count: int) -> int:
        """The same for a key; at most the longest."""
        return min(self.of(count), self.limit)


def pad(ids: np.ndarray, size: int) -> np.ndarray:
    """Ids as int32 [size], 0-padded."""
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    return padded
