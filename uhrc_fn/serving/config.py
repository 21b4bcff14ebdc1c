"""Static settings of a serving loop: shapes of its lanes and tables."""

import dataclasses

from ..config import CacheConfig
from ..pools.layout import require, require_counts
from ..pools.limits import check_pools
from ..pools.req_to_token import RequestConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Shapes of the step; hashable, so that it can be static under jit.

    Args:
      cache: the cache's settings; its `max_prefix_pages` must hold `max_length`.
      max_length: tokens of the longest request, prompt and output.
      num_requests: request slots on the device, running and waiting; rows of the
        tables.
      decode_lanes: requests that can run at once: each decodes a token a step.
      prefill_lanes: requests whose prompts are computed in one step.
      chunk_tokens: tokens of one prompt in one step, whole pages.
      num_track_slots: track slots of a request, with the extra buffer: 2, or 1.
      use_cache: whether there is a prefix cache. Without one the step holds no
        operation of it: each row owns pages and a slot of its own for ever.

    Raises:
      ValueError: a setting is out of range, or no pool could hold one request.
    """

    cache: CacheConfig
    max_length: int
    num_requests: int
    decode_lanes: int
    prefill_lanes: int = 1
    chunk_tokens: int
    num_track_slots: int = 2
    use_cache: bool = True

    def __post_init__(self):
        names = ("max_length", "num_requests", "decode_lanes", "prefill_lanes")
        require_counts(self, *names, "chunk_tokens")
        size = self.cache.page_size
        require(
            self.chunk_tokens % size == 0,
            f"chunk_tokens={self.chunk_tokens} with page_size={size}",
            "a multiple of the page size",
            "Round it to whole pages.",
        )
        require(
            self.decode_lanes <= self.num_requests,
            f"decode_lanes={self.decode_lanes} of num_requests={self.num_requests}",
            "no more lanes than requests",
            "Raise num_requests: a lane without a request is idle.",
        )
        require(
            self.max_pages <= self.cache.max_prefix_pages,
            f"max_length={self.max_length} of {self.max_pages} pages",
            f"at most max_prefix_pages={self.cache.max_prefix_pages}",
            "Raise CacheConfig.max_prefix_pages.",
        )
        if self.use_cache:
            check_pools(
                self.cache,
                request_tokens=self.max_length,
                chunk_tokens=self.chunk_tokens,
                num_track_slots=max(self.num_track_slots, 1),
            )
            require(
                self.decode_lanes < self.cache.max_live_receipts,
                f"decode_lanes={self.decode_lanes}",
                f"less than max_live_receipts={self.cache.max_live_receipts}",
                "A running request holds a lock: raise CacheConfig.max_live_receipts.",
            )

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_length // self.cache.page_size)

    @property
    def has_tracks(self) -> bool:
        """Whether snapshots are published through track slots."""
        return self.use_cache and self.cache.enable_recurrent_extra_buffer

    @property
    def track_interval(self) -> int:
        """Tokens between the boundaries that cut a prefill; 0 for none."""
        return self.cache.recurrent_grid if self.has_tracks else 0

    @property
    def tables(self) -> RequestConfig:
        """Shape of the request tables."""
        return RequestConfig(
            num_requests=self.num_requests,
            max_pages=self.max_pages,
            page_size=self.cache.page_size,
            has_swa=self.cache.has_swa,
            num_track_slots=self.num_track_slots if self.has_tracks else 0,
        )

    @property
    def pool_pages(self) -> tuple[int, int, int]:
        """Usable pages, SWA pages and slots that the pools must have."""
        if self.use_cache:
            return self.cache.capacities
        pages = self.num_requests * self.max_pages
        slots = self.num_requests if self.cache.has_recurrent else 0
        return pages, pages if self.cache.has_swa else 0, slots
