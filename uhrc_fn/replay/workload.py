"""A workload: the key tokens of many requests in flat arrays, ready for the device."""

import dataclasses
import functools
import math

import numpy as np

MAX_TOKEN = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Requests in the order in which the cache meets them.

    Args:
      name: what the report calls it.
      page_size: key tokens a page. A block trace has pages of one key token, the
        block's id.
      keys: int32, the key tokens of all requests one after another. Only whole pages:
        a partial last page can never be cached.
      offsets: int64 `[requests + 1]` into `keys`.
      input_tokens: int64 `[requests]`, the real prompt tokens of each request.
      page_tokens: real tokens that a full page holds; 0 means `page_size`.
      namespaces: int32 `[requests, 4]`, or None where all share one namespace.
      weights: int32, the real tokens that each page of each request stands for, laid
        out like the pages; None means `page_tokens` each.
      token_unit: what a token of this trace is: `token`, or `byte`.
    """

    name: str
    page_size: int
    keys: np.ndarray
    offsets: np.ndarray
    input_tokens: np.ndarray
    page_tokens: int = 0
    namespaces: np.ndarray | None = None
    weights: np.ndarray | None = None
    token_unit: str = "token"

    def __post_init__(self):
        if not self.page_tokens:
            object.__setattr__(self, "page_tokens", self.page_size)

    @property
    def num_requests(self) -> int:
        return len(self.offsets) - 1

    @property
    def page_offsets(self) -> np.ndarray:
        """int64 `[requests + 1]`: where each request's pages start."""
        return self.offsets // self.page_size

    @functools.cached_property
    def token_offsets(self) -> np.ndarray | None:
        """int64 `[pages + 1]`: real tokens before each page, None for equal pages."""
        if self.weights is None:
            return None
        return np.concatenate([[0], np.cumsum(self.weights, dtype=np.int64)])

    def hit_tokens(self, hit_pages: np.ndarray, first: int = 0) -> np.ndarray:
        """Real tokens in the first `hit_pages` pages of each request from `first`."""
        if self.token_offsets is None:
            return np.asarray(hit_pages, np.int64) * self.page_tokens
        starts = self.page_offsets[first : first + len(hit_pages)]
        return self.token_offsets[starts + hit_pages] - self.token_offsets[starts]

    def first_measured(self, measure_from: float) -> int:
        """The request at which measuring starts; all earlier ones warm the cache."""
        # The epsilon keeps 0.29 * 100 from flooring to 28.
        return min(
            math.floor(self.num_requests * measure_from + 1e-9), self.num_requests
        )
