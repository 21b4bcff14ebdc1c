"""Samples of a long run, and whether a line through them is flat."""

import dataclasses
import statistics
from itertools import combinations

import jax
import psutil

WARM_UP = 0.25
"""Share of the samples that are left out: caches fill, allocators find their size."""
FEWEST = 9
"""Samples below which no slope is worth a name."""

LIMITS = {
    "resident_bytes": 0.02,
    "device_bytes": 0.0,
    "serving_nodes": 0.05,
    "replay_nodes": 0.01,
    "tokens_per_cpu_s": -0.15,
    "requests_per_cpu_s": -0.15,
}
"""Change over the counted part of the run, as a share of the median, that is too much:
growth above a positive limit, or above none at all; a fall below a negative one.
Throughput is judged by the processor's time, which other processes take none of."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A round's figures."""

    minutes: float
    resident_bytes: int
    device_bytes: int
    serving_nodes: int
    replay_nodes: int
    tokens_per_s: float
    tokens_per_cpu_s: float
    requests_per_s: float
    requests_per_cpu_s: float
    hit_ratio: float
    retractions: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a figure over the counted part of a run."""

    name: str
    change: float
    """Of the fitted line from its first to its last sample, over the median."""
    limit: float

    @property
    def is_flat(self) -> bool:
        """Whether the change is within the limit."""
        if self.limit < 0:
            return self.change >= self.limit
        return self.change <= self.limit

    def __str__(self) -> str:
        word = "flat" if self.is_flat else "NOT FLAT"
        return f"{self.name:>18}  {self.change:+8.2%}  limit {self.limit:+.0%}  {word}"


def verdicts(samples: list[Sample]) -> list[Verdict]:
    """Judge each series; nothing where there are too few samples."""
    counted = samples[int(len(samples) * WARM_UP) :]
    if len(counted) < FEWEST:
        return []
    minutes = [sample.minutes for sample in counted]
    found = []
    for name, limit in LIMITS.items():
        values = [float(getattr(sample, name)) for sample in counted]
        rise = slope(minutes, values) * (minutes[-1] - minutes[0])
        found.append(Verdict(name, rise / max(statistics.median(values), 1.0), limit))
    return found


def slope(x: list[float], y: list[float]) -> float:
    """The median of the slopes of all pairs (Theil and Sen).

    A round that another process disturbed does not tilt it, as it would a least-squares
    line.
    """
    pairs = combinations(zip(x, y, strict=True), 2)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return psutil.Process().memory_info().rss


def device_bytes() -> int:
    """Bytes of all arrays that are alive, on any device."""
    return sum(array.nbytes for array in jax.live_arrays())
