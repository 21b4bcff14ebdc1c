"""What a replay reports: progress while it runs, and its result."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplayProgress:
    """Sent after each device call.

    Args:
      done: requests replayed so far, warm-up included.
      hit_pages: int32, the hit pages of the requests that this call replayed, the last
        of which is request `done - 1`.
    """

    done: int
    hit_pages: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReplayResult:
    """One replay.

    Args:
      hit_pages: int32 `[requests]`, warm-up included.
      evicted_pages: pages evicted while the measured requests ran.
      inserted_pages: pages inserted while the measured requests ran.
      wall_s: seconds for the whole replay, warm-up requests included, compilation not.
      compile_s: seconds of compilation.
      cache: the cache as the last request left it.
    """

    hit_pages: np.ndarray
    evicted_pages: int
    inserted_pages: int
    wall_s: float
    compile_s: float
    cache: Any
