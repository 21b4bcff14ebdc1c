"""The figures of a demo: what is measured, and the JSON made of it."""

import dataclasses
import statistics

from .driving import Timed


@dataclasses.dataclass
class Figures:
    """All that was measured; filled in as the demo goes on."""

    family: str
    num_requests: int
    hit_ratio: float = 0.0
    """Of the conversations held side by side."""
    hit_ratio_alone: float = 0.0
    """Of the same requests one at a time."""
    served_ratio: dict[str, float] = dataclasses.field(default_factory=dict)
    """Share of the prompt tokens that each component could have served."""
    tokens_per_s: float = 0.0
    """Tokens of prompts and outputs, with the cache."""
    tokens_per_s_no_cache: float = 0.0
    alone: list[Timed] = dataclasses.field(default_factory=list)
    alone_no_cache: list[Timed] = dataclasses.field(default_factory=list)
    unshared: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Tokens/s of each round, with and without the cache."""
    num_differing: int = 0
    """Requests whose output was not the same with and without the cache."""
    retractions: int = 0
    leaked_pages: int = 0
    leaked_slots: int = 0

    def ttft_ms(self) -> tuple[float, float] | None:
        """Median TTFT of requests that hit, and of the same without the cache."""
        pairs = zip(self.alone, self.alone_no_cache, strict=True)
        hits = [(a.ttft_s, b.ttft_s) for a, b in pairs if a.hit_length]
        if not hits:
            return None
        with_cache, without = zip(*hits, strict=True)
        return 1000 * statistics.median(with_cache), 1000 * statistics.median(without)

    def unshared_tokens_per_s(self) -> tuple[float, float]:
        """Medians over the rounds, with and without the cache."""
        with_cache, without = zip(*self.unshared, strict=True)
        return statistics.median(with_cache), statistics.median(without)

    def unshared_ratio(self) -> float:
        """Median of the rounds' ratios: the two sides of a round ran in turn."""
        return statistics.median(a / b for a, b in self.unshared)

    def as_json(self) -> dict[str, object]:
        """What `--json` writes; TTFT is null where no request hit."""
        ttft = self.ttft_ms()
        return {
            "family": self.family,
            "requests": self.num_requests,
            "identical_outputs": self.num_differing == 0,
            "hit_ratio": self.hit_ratio,
            "ttft_p50_ms": ttft and ttft[0],
            "ttft_p50_no_cache_ms": ttft and ttft[1],
            "ttft_ratio_p50": ttft and ttft[0] / ttft[1],
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_no_cache": self.tokens_per_s_no_cache,
            "unshared_throughput_ratio": self.unshared_ratio(),
            "retractions": self.retractions,
            "leaked_pages": self.leaked_pages,
            "leaked_slots": self.leaked_slots,
        }
