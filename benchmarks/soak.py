"""A long run under pressure: serve, replay, and look for anything that grows.

    make soak                  # an hour
    make soak MINUTES=20

Each round serves conversations on an engine whose pools are too small for them, replays
requests through a tree that is always full, checks every invariant, and compares some
outputs with an engine without a cache. Both caches live as long as the run. At the end
a line is fitted through each series; one that rises, or a throughput that falls, fails
the run, as does an invariant, a leak or a wrong token at any time.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from soak_loads import ReplayLoad, ServingLoad
from soak_series import LIMITS, Sample, device_bytes, resident_bytes, verdicts


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60, help="default 60")
    parser.add_argument("--round-seconds", type=float, default=15, metavar="S",
                        help="of serving and of replay, each round")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the samples to this file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0 or arguments.round_seconds <= 0:
        parser.error("minutes and round-seconds: wanted more than 0")
    return arguments


HEADINGS = ("min", "RSS MiB", "device MiB", "serving nodes", "replay nodes",
            "tokens/s", "requests/s", "hit", "retracted")  # fmt: skip


def cells(sample: Sample) -> list[str]:
    return [
        f"{sample.minutes:.1f}",
        f"{sample.resident_bytes / 2**20:.1f}",
        f"{sample.device_bytes / 2**20:.2f}",
        str(sample.serving_nodes),
        str(sample.replay_nodes),
        f"{sample.tokens_per_s:,.0f}",
        f"{sample.requests_per_s:,.0f}",
        f"{sample.hit_ratio:.3f}",
        str(sample.retractions),
    ]


def print_row(row: list[str] | tuple[str, ...]) -> None:
    """A row as it comes: a live table would not survive in a log."""
    print("  ".join(f"{cell:>13}" for cell in row), flush=True)


class Rate:
    """What a load did in a round, by the clock and by the processor's time."""

    def __init__(self, run: Callable[[float], int], seconds: float):
        start, cpu_start = time.perf_counter(), time.process_time()
        done = run(seconds)
        self.per_s = done / (time.perf_counter() - start)
        self.per_cpu_s = done / (time.process_time() - cpu_start)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    serving, replay = ServingLoad(arguments.seed), ReplayLoad(arguments.seed)
    serving.warm_up()
    replay.warm_up()
    samples: list[Sample] = []
    print_row(HEADINGS)
    started = time.perf_counter()
    minutes = lambda: (time.perf_counter() - started) / 60
    while minutes() < arguments.minutes:
        tokens = Rate(serving.run, arguments.round_seconds)
        requests = Rate(replay.run, arguments.round_seconds)
        serving.check()
        replay.check()
        sample = Sample(
            minutes=minutes(),
            resident_bytes=resident_bytes(),
            device_bytes=device_bytes(),
            serving_nodes=serving.live_nodes,
            replay_nodes=replay.live_nodes,
            tokens_per_s=tokens.per_s,
            tokens_per_cpu_s=tokens.per_cpu_s,
            requests_per_s=requests.per_s,
            requests_per_cpu_s=requests.per_cpu_s,
            hit_ratio=serving.hit_ratio,
            retractions=serving.retractions,
        )
        samples.append(sample)
        print_row(cells(sample))
    serving.drain()
    print(
        f"{len(samples)} rounds, {serving.num_served:,} requests served, "
        f"{replay.num_replayed:,} replayed, {serving.num_compared:,} outputs compared, "
        f"{serving.retractions:,} retractions; every invariant held"
    )
    if arguments.json:
        rows = [dataclasses.asdict(sample) for sample in samples]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    found = verdicts(samples)
    if not found:
        print("too short for a slope: wanted a dozen rounds or more")
    for verdict in found:
        print(str(verdict))
    bad = [verdict.name for verdict in found if not verdict.is_flat]
    if bad:
        print(f"error: not flat: {', '.join(bad)}; see {LIMITS}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
