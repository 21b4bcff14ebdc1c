"""Replay steps of hybrid caches: sliding windows, and snapshots of recurrent layers."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..config import CacheConfig
from ..ops.allocate import alloc_slots, alloc_swa_pages
from ..ops.free import free_pages, free_slots, free_swa_pages
from ..ops.insert import insert
from ..ops.lock import dec_lock_ref
from ..params import InsertParams
from ..state import CacheState
from .request import Requests, begin
from .workload import Workload

CHECKPOINTS = ("ends", "branches")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Which components a replay uses beside FULL.

    Args:
      components: names, as `CacheConfig` takes them.
      window: sliding window in tokens of the trace (SWA).
      checkpoints: `ends` leaves a snapshot at the last full block of each input,
        `branches` also at the branching length that the match reported (RECURRENT).
      capacity_swa_pages: pages of the SWA pool; 0 is as many as FULL has (SWA).
      capacity_slots: slots for snapshots; 0 is enough for everything (RECURRENT).
    """

    components: tuple[str, ...] = ("FULL",)
    window: int = 0
    checkpoints: str = "ends"
    capacity_swa_pages: int = 0
    capacity_slots: int = 0

    def __post_init__(self):
        has_swa, has_recurrent = "SWA" in self.components, self.has_recurrent
        if has_swa != (self.window > 0):
            raise ValueError(
                f"window={self.window} with components={self.components}; wanted a "
                "positive window with SWA and none without. Set --window."
            )
        if self.checkpoints not in CHECKPOINTS:
            raise ValueError(
                f"checkpoints={self.checkpoints!r}; wanted one of {CHECKPOINTS}."
            )
        if self.capacity_slots < 0 or (self.capacity_slots and not has_recurrent):
            raise ValueError(
                f"capacity_slots={self.capacity_slots} with components="
                f"{self.components}; slots are for RECURRENT, 0 or more of them."
            )

        if self.capacity_swa_pages < 0 or (self.capacity_swa_pages and not has_swa):
            raise ValueError(
                f"capacity_swa_pages={self.capacity_swa_pages} with components="
                f"{self.components}; SWA pages are for SWA, 0 or more of them."
            )

    @property
    def has_recurrent(self) -> bool:
        """Whether snapshots are kept."""
        return "RECURRENT" in self.components

    def settings(self, workload: Workload, num_pages: int) -> dict:
        """Settings of `CacheConfig` for a workload and a pool.

        Raises:
          ValueError: the SWA pool is smaller than a window.
        """
        if "SWA" in self.components:
            # A block trace has one key token a page of `page_tokens` real ones.
            scale = workload.page_tokens // workload.page_size
            window = -(-self.window // max(scale, 1))
            least = -(-window // workload.page_size) + 1
            pages = self.capacity_swa_pages or max(num_pages, least)
            if pages < least:
                raise ValueError(
                    f"capacity_swa_pages={pages} with a window of {self.window} "
                    f"tokens; wanted at least the window and a page, {least} pages."
                )
            settings = {"sliding_window_size": window, "num_swa_pages": pages}
        elif self.has_recurrent:
            # Two snapshots a request at most, and one on its way.
            every = max(2 * workload.num_requests + 1, 2)
            settings = {"num_recurrent_slots": self.capacity_slots or every}
            settings["enable_recurrent_extra_buffer"] = workload.page_size > 1
        else:
            return {}
        return settings | {"components": self.components}


def full_blocks(workload: Workload, lengths: np.ndarray) -> np.ndarray:
    """Pages of each key that stand for full blocks; a snapshot may end the last.

    Where blocks have no common size (chunks of text), each is a full one.
    """
    if workload.weights is not None:
        inner = np.ones(len(workload.weights), bool)
        ends = workload.page_offsets[1:]
        inner[ends[ends > workload.page_offsets[:-1]] - 1] = False
        if np.any(workload.weights[inner] != workload.page_tokens):
            return lengths.astype(np.int32)
    whole = workload.input_tokens // workload.page_tokens
    return np.minimum(whole, lengths).astype(np.int32)


def replay_hybrid(
    cache: CacheState, request: Requests, *, tokens, width: int, checkpoints: str
):
    """One request of at most `width` pages: its outcome is hit, evicted, inserted."""
    config: CacheConfig = cache.config
    size = config.page_size
    cache, begun = begin(cache, request, tokens, width)
    before = cache.num_live_nodes
    key, match, pages = begun.key, begun.match, begun.pages
    hit, held = begun.hit, begun.held
    if config.has_recurrent:
        # Shallow ones first, each with the part of the key that it covers.
        ends = [request.full_blocks]
        if checkpoints == "branches":
            ends.insert(0, match.recurrent_branching_seqlen // size)
        for end in ends:
            length = jnp.where(end <= held, end, 0)
            cache = _checkpoint(cache, key, pages, match.hit_length, length * size)
    swa = None
    if config.has_swa:
        cache, swa = _window_pages(cache, hit, held, width)
    key = dataclasses.replace(key, length=held * size)
    params = InsertParams(
        key, pages, match.hit_length, swa_value=swa, swa_evicted_seqlen=jnp.int32(0)
    )
    cache, result = insert(cache, params)
    cache, _ = dec_lock_ref(cache, begun.receipt)
    page = jnp.arange(width, dtype=jnp.int32)
    # What it computed anew although the tree had it, and what did not go in.
    own = (page >= hit) & (page < held)
    in_tree = (result.path >= 0) & (result.page_table == pages)
    cache = free_pages(cache, jnp.where(own & ~in_tree, pages, 0))
    if swa is not None:
        cache = free_swa_pages(cache, jnp.where(result.page_flags >> 1 & 1, 0, swa))
    return cache, jnp.stack([hit, begun.evicted, cache.num_live_nodes - before])


def _checkpoint(cache: CacheState, key, pages, shared, length):
    """Publish the first `length` tokens with a snapshot at their end."""
    wanted = (length > 0).astype(jnp.int32)
    cache, slots = alloc_slots(cache, wanted, max_new=1, partial=True)
    slot = slots.ids[0]
    params = InsertParams(
        dataclasses.replace(key, length=length),
        pages,
        jnp.minimum(shared, length),
        recurrent_value=slot,
        recurrent_length=length,
    )
    cache, result = insert(cache, params)
    return free_slots(cache, jnp.where(result.recurrent_committed, 0, slot)[None])


def _window_pages(cache: CacheState, hit, held, width: int):
    """SWA pages for what was not hit: ``(cache, one a page of the key or 0)``.

    Where the pool is short, the last pages get what there is.
    """
    most = min(width, cache.config.num_pages, cache.config.num_swa_pages)
    wanted = jnp.minimum(held - hit, most)
    cache, alloc = alloc_swa_pages(cache, wanted, max_new=most, partial=True)
    page = jnp.arange(width, dtype=jnp.int32)
    lane = page - (held - alloc.count)
    ids = alloc.ids[jnp.clip(lane, 0, most - 1)]
    return cache, jnp.where((lane >= 0) & (page < held), ids, 0)
