"""Replay RAGPulse at every capacity of its published leaf-LRU curve and compare.

    python benchmarks/golden_ragpulse.py --trace ragpulse.jsonl.gz

Hit tokens must equal the published integer at each of the 201 capacities; the exit code
is 1 where one does not. docs/replay.md says where the files come from.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

# Pools of these sizes are compiled; reserved pages make the capacities between.
POOLS = (1_024, 4_096, 32_768)

CURVES = "published_reference_curves.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="RAGPulse trace")
    parser.add_argument("--curves", type=Path, help=f"default: {CURVES} beside it")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="only every N-th capacity")  # fmt: skip
    arguments = parser.parse_args()
    arguments.curves = arguments.curves or arguments.trace.with_name(CURVES)
    for path in (arguments.trace, arguments.curves):
        if not path.is_file():
            parser.error(f"{path} is not there; docs/replay.md says where it is from")
    if arguments.every < 1:
        parser.error(f"--every {arguments.every}; wanted at least 1")
    return arguments


def published_hit_tokens(curves: Path) -> tuple[dict[int, int], int]:
    """Hit tokens of leaf LRU by capacity in blocks, and the tokens measured."""
    ragpulse = json.loads(curves.read_text())["kvcache_ai_precomputed"]
    ragpulse = ragpulse["ragpulse_context_aware"]
    rows = {capacity: leaf_lru for capacity, _, leaf_lru, _ in ragpulse["rows"]}
    return rows, ragpulse["total_measured_tokens"]


def main() -> int:
    arguments = parse_arguments()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from uhrc_fn.replay import load_trace
    from uhrc_fn.replay.engine import replay

    published, total = published_hit_tokens(arguments.curves)
    workload = load_trace(arguments.trace)
    first = workload.first_measured(0.5)
    if int(workload.input_tokens[first:].sum()) != total:
        print(f"error: {arguments.trace} is not the trace of the published curve, "
              f"whose second half has {total:,} tokens", file=sys.stderr)  # fmt: skip
        return 2
    started, num_different = time.perf_counter(), 0
    chosen = sorted(published)[:: arguments.every]
    print(f"{'blocks':>8}{'published':>12}{'replayed':>12}{'hit ratio':>11}")
    for capacity in chosen:
        pool = next(size for size in POOLS if size >= capacity)
        result = replay(workload, capacity_pages=pool, reserved_pages=pool - capacity)
        hits = int(workload.hit_tokens(result.hit_pages[first:], first).sum())
        is_different = hits != published[capacity]
        num_different += is_different
        print(
            f"{capacity:>8,}{published[capacity]:>12,}{hits:>12,}{hits / total:>11.6f}"
            + ("  DIFFERENT" if is_different else ""),
            flush=True,
        )
    print(
        f"{len(chosen) - num_different} of {len(chosen)} capacities equal, "
        f"{time.perf_counter() - started:.0f} s"
    )
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
