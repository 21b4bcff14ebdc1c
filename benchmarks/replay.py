"""Replay a recorded block trace through our cache and through the peer's tree.

    python benchmarks/replay.py --trace mooncake_conversation.jsonl.gz --peer PATH

Both sides serve the same requests in the same order in one process on one core: match,
lock, evict what is short, allocate, insert, unlock. See README.md for the conditions.
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from timing import core_to_use, enter_one_core

# Token lists of so many requests are made at once, outside the peer's clock.
_CHUNK = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="block trace")
    parser.add_argument("--peer", type=Path, help="`python` folder of sglang-jax")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--capacity", type=float, default=0.1,
                        help="pool size as a part of the unique pages")  # fmt: skip
    parser.add_argument("--expand-tokens", action="store_true",
                        help="real pages of token ids, not ids at page 1")  # fmt: skip
    parser.add_argument("--limit", type=int, help="replay the first so many requests")
    parser.add_argument("--repeat", type=int, default=3, help="runs; medians count")
    parser.add_argument("--core", type=int, help="core to run on; default the first")
    return parser.parse_args()


class PeerReplay:
    """Serve a workload with the peer's tree, one request after another."""

    def __init__(self, module: Any, page_size: int, capacity_pages: int) -> None:
        import peer

        self.tree = peer.Peer(module, page_size, capacity_pages)
        self.page_size = page_size

    def serve(self, key: Any) -> int:
        """Serve one request and return the tokens that it hit."""
        tree, size = self.tree, self.page_size
        match = tree.match(key)
        hit = len(match.device_indices)
        receipt = tree.lock(match)
        wanted = (len(key) - hit) // size
        free = tree.num_free()
        if wanted > free:
            tree.evict(wanted - free)
            # Where nothing more can be evicted, the request takes what there is.
            wanted = min(wanted, tree.num_free())
        if wanted:
            new = tree.alloc(wanted)
            assert new is not None, "the allocator refused pages that it counts free"
            slots = np.concatenate([match.device_indices, new])
            tree.insert(key[: len(slots)], slots)
        tree.unlock(match, receipt)
        return hit


def replay_peer(workload: Any, capacity_pages: int, module: Any) -> dict:
    """Replay with the peer; token lists are built outside the clock."""
    replay = PeerReplay(module, workload.page_size, capacity_pages)
    bounds, wall = workload.offsets, 0.0
    hits = np.zeros(workload.num_requests, np.int64)
    for start in range(0, workload.num_requests, _CHUNK):
        requests = range(start, min(start + _CHUNK, workload.num_requests))
        keys = [
            replay.tree.key(workload.keys[bounds[i] : bounds[i + 1]].tolist())
            for i in requests
        ]
        gc.disable()
        begin = time.perf_counter()
        for i, key in zip(requests, keys, strict=True):
            if len(key):
                hits[i] = replay.serve(key)
        wall += time.perf_counter() - begin
        gc.enable()
    return {"wall_s": wall, "hit_pages": hits // workload.page_size, "compile_s": 0.0}


def replay_ours(workload: Any, capacity_pages: int) -> dict:
    """Replay with ours, one jitted loop over the requests."""
    from uhrc_fn.replay.engine import replay

    result = replay(workload, capacity_pages=capacity_pages)
    return {
        "wall_s": result.wall_s,
        "hit_pages": result.hit_pages,
        "compile_s": result.compile_s,
    }


def row_of(side: str, workload: Any, capacity: int, runs: list[dict]) -> dict:
    """Summarise the runs of one side."""
    wall = statistics.median(run["wall_s"] for run in runs)
    hit_tokens = int(workload.hit_tokens(runs[0]["hit_pages"]).sum())
    return {
        "side": side,
        "trace": workload.name,
        "requests": workload.num_requests,
        "page_size": workload.page_size,
        "capacity_pages": capacity,
        "hit_ratio": hit_tokens / int(workload.input_tokens.sum()),
        "requests_per_s": workload.num_requests / wall,
        "best_requests_per_s": workload.num_requests / min(r["wall_s"] for r in runs),
        "us_per_request": 1e6 * wall / workload.num_requests,
        "compile_s": max(run["compile_s"] for run in runs),
    }


def main() -> None:
    arguments = parse_arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "1"
    enter_one_core(core_to_use(arguments.core))
    from uhrc_fn.replay import load_trace, prefix_nodes

    workload = load_trace(
        arguments.trace, limit=arguments.limit, expand_tokens=arguments.expand_tokens
    )
    capacity = int(arguments.capacity * prefix_nodes(workload).num_nodes)
    sides = {"ours": lambda: replay_ours(workload, capacity)}
    if arguments.peer:
        import peer

        module, _ = peer.load(arguments.peer)
        sides["peer"] = lambda: replay_peer(workload, capacity, module)
    # The sides take turns: what else the machine does meets both.
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(arguments.repeat):
        for side, run in sides.items():
            runs[side].append(run())
    rows = []
    for side in sides:
        rows.append(row_of(side, workload, capacity, runs[side]))
        print(
            f"{side}: {rows[-1]['requests_per_s']:,.0f} requests/s (best "
            f"{rows[-1]['best_requests_per_s']:,.0f}), hit {rows[-1]['hit_ratio']:.5f}",
            flush=True,
        )
    if len(rows) == 2:
        ratio = rows[0]["requests_per_s"] / rows[1]["requests_per_s"]
        print(f"ours serves {ratio:.2f}x the peer's requests per second")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
