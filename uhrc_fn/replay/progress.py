"""A replay that was cut short goes on where its file was written last."""

import dataclasses
import hashlib
import pathlib

import equinox as eqx
import numpy as np

from ..saving import load, save
from ..state import CacheState
from .hybrid import Hybrid
from .workload import Workload


class Progress(eqx.Module):
    """All that a replay needs to go on, and what a file must fit to be gone on from."""

    cache: CacheState
    outcomes: np.ndarray
    """int32 [requests, 3]: hit, evicted and inserted pages; 0 for those to come."""
    done: np.ndarray
    """int64 []: requests replayed."""
    wall_s: np.ndarray
    """float64 []: seconds that they took."""
    workload: str = eqx.field(static=True)
    """A digest of all requests."""
    hybrid: Hybrid = eqx.field(static=True)
    reserved_pages: int = eqx.field(static=True)

    def after(self, cache: CacheState, outcomes: list, wall_s: float) -> "Progress":
        """The progress after more device calls; reads what they returned."""
        rows, done = self.outcomes.copy(), int(self.done)
        new = np.concatenate([rows[:0], *map(np.asarray, outcomes)])
        new = new[: len(rows) - done]  # the last call may have been filled up
        rows[done : done + len(new)] = new
        return dataclasses.replace(
            self,
            cache=cache,
            outcomes=rows,
            done=np.asarray(done + len(new)),
            wall_s=self.wall_s + np.asarray(wall_s),
        )


def begin(
    workload: Workload, cache: CacheState, hybrid: Hybrid, reserved_pages: int
) -> Progress:
    """The progress of a replay that begins with `cache`."""
    return Progress(
        cache=cache,
        outcomes=np.zeros((workload.num_requests, 3), np.int32),
        done=np.asarray(0),
        wall_s=np.asarray(0.0),
        workload=fingerprint(workload),
        hybrid=hybrid,
        reserved_pages=reserved_pages,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressFile:
    """A file that a replay keeps its progress in.

    Args:
      path: the file; where there is one, a replay goes on from it.
      every: requests between two savings, rounded up to device calls.

    Raises:
      ValueError: `every` is not positive.
    """

    path: str | pathlib.Path
    every: int = 10_000

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"every={self.every}; wanted at least 1 request.")

    def resume(self, beginning: Progress) -> Progress:
        """What was saved last, or the beginning.

        Raises:
          SavedStateError: the file is damaged, or that of another replay.
        """
        if not pathlib.Path(self.path).exists():
            return beginning
        return load(self.path, beginning)

    def is_due(self, num_new: int, is_last: bool) -> bool:
        """Whether to save after `num_new` requests since the last time."""
        return is_last or num_new >= self.every

    def save(self, progress: Progress) -> None:
        """Write the progress to the file."""
        save(self.path, progress)


def fingerprint(workload: Workload) -> str:
    """A digest of the requests, whatever the workload is called."""
    digest = hashlib.blake2b(digest_size=16)
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if field.name == "name":
            continue
        if isinstance(value, np.ndarray):
            digest.update(f"{field.name} {value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(f"{field.name} {value!r}\n".encode())
    return digest.hexdigest()
