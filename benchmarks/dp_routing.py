"""Route a recorded block trace over data-parallel ranks, each with a cache of its own.

    python benchmarks/dp_routing.py --trace mooncake_conversation.jsonl.gz --json -

Every policy serves the same requests with the same capacity in all; one tree of that
whole capacity is what no routing could lose. Loads are simulated, see README.md.
"""

import argparse
import functools
import heapq
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from routing_report import plot_rows, print_rows
from routing_trace import Trace, read_trace

from uhrc_fn import CacheConfig, init, jitted
from uhrc_fn.config import CLOCK_LIMIT
from uhrc_fn.engine import dp_routing as dp
from uhrc_fn.params import RadixKey
from uhrc_fn.replay import Workload, prefix_nodes
from uhrc_fn.replay.engine import (
    _chunks,
    _padded_tokens,
    _replay_chunk,
    _widths,
    replay,
)

POLICIES = ("round_robin", "min_running_queue", "shape_aware", "cache_aware")


class Service(NamedTuple):
    """How long a request is with its rank."""

    prefill_tokens_per_s: float
    seconds_per_token: float
    max_running_requests: int

    def seconds(self, uncached: int, output: int) -> float:
        return uncached / self.prefill_tokens_per_s + output * self.seconds_per_token


class Loads:
    """Requests that the ranks have, at a time that only goes forward."""

    def __init__(self, num_ranks: int):
        self.live: list[list[tuple[float, int, int]]] = [[] for _ in range(num_ranks)]
        self.sums = np.zeros((3, num_ranks), np.int32)

    def advance(self, now: float) -> None:
        """Let go what has ended."""
        for rank, live in enumerate(self.live):
            while live and live[0][0] <= now:
                self._count(rank, -1, *heapq.heappop(live)[1:])

    def arrays(self) -> dp.RankLoads:
        return dp.RankLoads(*self.sums)

    def first_end(self) -> float:
        return min(live[0][0] for live in self.live if live)

    def add(self, rank: int, end: float, tokens: int, output: int) -> None:
        heapq.heappush(self.live[rank], (end, tokens, output))
        self._count(rank, 1, tokens, output)

    def _count(self, rank, sign, tokens, output):
        self.sums[:, rank] += np.array([sign, sign * tokens, sign * output], np.int32)


class Ranks:
    """A cache for each rank, and the compiled programs that peek and serve."""

    def __init__(self, workload: Workload, num_ranks: int, pages: int):
        lengths = np.diff(workload.page_offsets).astype(np.int32)
        self.widths = _widths(int(lengths.max()))
        config = CacheConfig(
            page_size=workload.page_size,
            num_pages=pages,
            max_prefix_pages=self.widths[-1],
            max_live_receipts=1,
        )
        self.caches = [init(config) for _ in range(num_ranks)]
        self.ticks = [0] * num_ranks
        self.tokens = _padded_tokens(workload, self.widths[-1])
        self.requests = _chunks(workload, lengths, 1)

    def peek(self, number: int) -> tuple[int, Any]:
        """Key tokens of a request, and those that each rank would hit."""
        request = self.requests[number]
        length = request.num_pages * self.caches[0].config.page_size
        matched = _peek(
            tuple(self.caches), self.tokens, request.start, length, widths=self.widths
        )
        return int(length[0]), matched

    def serve(self, number: int, rank: int) -> int:
        """Serve a request on its rank; returns the pages that it hit."""
        most = 4 * (self.widths[-1] + 1)  # a match and at most three inserts
        if self.ticks[rank] + most >= CLOCK_LIMIT:
            self.caches[rank] = jitted.compact_clock(self.caches[rank])
            self.ticks[rank] = self.caches[rank].config.num_nodes + 1
        self.ticks[rank] += most
        self.caches[rank], outcome = _replay_chunk(
            self.caches[rank], self.tokens, self.requests[number], widths=self.widths
        )
        return int(np.asarray(outcome)[0, 0])


@functools.partial(jax.jit, static_argnames="widths")
def _peek(caches, tokens, start, length, *, widths):
    """Peek on all ranks: one program, which changes nothing."""
    size = caches[0].config.page_size

    def peek(width, caches):
        ids = jax.lax.dynamic_slice(tokens, (start[0],), (width * size,))
        return dp.peek_ranks(caches, RadixKey(ids, length[0]))

    limits = np.array(widths[:-1], np.int32) * size
    which = jnp.sum(length[0] > limits, dtype=jnp.int32)
    return jax.lax.switch(which, [functools.partial(peek, w) for w in widths], caches)


class Outcome(NamedTuple):
    """What became of the requests of a run."""

    ranks: np.ndarray
    hit_pages: np.ndarray
    deferred: int
    mean_live: float
    """Requests that a rank had when another was routed."""


def run(trace: Trace, ranks: Ranks, policy: str, affinity: dp.Affinity,
        service: Service) -> Outcome:  # fmt: skip
    """Serve every request in order, each when it arrives or has room."""
    workload = trace.workload
    count, num_ranks = workload.num_requests, len(ranks.caches)
    found, hits = np.zeros((2, count), np.int64)
    loads, now, deferred, live = Loads(num_ranks), 0.0, 0, 0
    nothing = np.zeros(num_ranks, np.int32)
    for number in range(count):
        now = max(now, trace.seconds[number])
        loads.advance(now)
        tokens = int(workload.input_tokens[number])
        output = int(trace.output_tokens[number])
        live += int(loads.sums[0].sum())
        length, matched = (0, nothing)
        if policy == "cache_aware":
            length, matched = ranks.peek(number)
        route = functools.partial(
            _route, tokens, output, length, matched, number,
            policy=policy, affinity=affinity, most=service.max_running_requests,
        )  # fmt: skip
        rank = int(route(loads.arrays()))
        deferred += rank == dp.NO_RANK
        while rank == dp.NO_RANK:  # later requests wait behind it
            now = loads.first_end()
            loads.advance(now)
            rank = int(route(loads.arrays()))
        hits[number] = ranks.serve(number, rank)
        found[number] = rank
        hit_tokens = int(workload.hit_tokens(hits[number : number + 1], number)[0])
        end = now + service.seconds(tokens - hit_tokens, output)
        loads.add(rank, end, tokens, output)
    return Outcome(found, hits, deferred, live / count / num_ranks)


@functools.partial(jax.jit, static_argnames="policy")
def _route(tokens, output, length, matched, turn, loads, *, policy, affinity, most):
    request = dp.RouteBatch(True, dp.NO_RANK, tokens, output, length, matched)
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], request)
    ranks, _, _ = dp.route_batch(
        loads, batch, most, policy=policy, turn=turn, affinity=affinity
    )
    return ranks[0]


def row_of(trace: Trace, policy: str, affinity: dp.Affinity, outcome: Outcome,
           num_ranks: int, single: float) -> dict:  # fmt: skip
    """Summarise a run; imbalance is the most of a rank over the mean of all."""
    workload = trace.workload
    hit_tokens = workload.hit_tokens(outcome.hit_pages)
    uncached = workload.input_tokens - hit_tokens

    def imbalance(weights):
        sums = np.bincount(outcome.ranks, weights, num_ranks)
        return float(sums.max() / sums.mean())

    row = {
        "trace": workload.name,
        "policy": policy,
        "ranks": num_ranks,
        "hit_ratio": int(hit_tokens.sum()) / int(workload.input_tokens.sum()),
        "single_tree_hit_ratio": single,
        "imbalance": imbalance(None),
        "imbalance_uncached": imbalance(uncached),
        "requests": workload.num_requests,
        "deferred": outcome.deferred,
        "mean_live": outcome.mean_live,
    }
    return row | (affinity._asdict() if policy == "cache_aware" else {})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", required=True, help="block traces")
    add("--ranks", type=int, default=4, help="data-parallel ranks")
    add("--capacity", type=float, default=0.1,
        help="pages of all ranks as a part of the unique pages")  # fmt: skip
    add("--page-tokens", type=int, default=512, help="tokens of the trace a page")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    add("--affinity", type=affinity, nargs="+", default=[dp.Affinity()],
        metavar="SKEW,PERCENT,HOLDER", help="thresholds of cache_aware")  # fmt: skip
    add("--speed", type=float, default=1.0, help="arrivals, times the recorded rate")
    add("--prefill-rate", type=float, default=20_000.0, help="tokens/s of a request")
    add("--seconds-per-token", type=float, default=0.02, help="of an answer")
    add("--max-running", type=int, default=256, help="requests of a rank")
    add("--limit", type=int, help="the first so many requests")
    add("--json", help="write the rows to this file ('-': stdout)")
    add("--plot", help="draw the rows (.png, .svg, .pdf)")
    return parser.parse_args()


def affinity(text: str) -> dp.Affinity:
    try:
        return dp.Affinity(*map(int, text.split(",", 2)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three integers, such as 32,110,50"
        ) from None


def main() -> None:
    arguments = parse_arguments()
    service = Service(
        arguments.prefill_rate, arguments.seconds_per_token, arguments.max_running
    )
    rows = []
    for path in arguments.trace:
        trace = read_trace(
            path, arguments.limit, arguments.speed, arguments.page_tokens
        )
        workload, ranks = trace.workload, arguments.ranks
        unique = prefix_nodes(workload).num_nodes
        pages = int(arguments.capacity * unique) // ranks
        whole = replay(workload, capacity_pages=pages * ranks)
        hit_tokens = int(workload.hit_tokens(whole.hit_pages).sum())
        single = hit_tokens / int(workload.input_tokens.sum())
        for policy in arguments.policies:
            is_aware = policy == "cache_aware"
            for chosen in arguments.affinity if is_aware else [dp.Affinity()]:
                start = time.perf_counter()
                state = Ranks(workload, ranks, pages)
                outcome = run(trace, state, policy, chosen, service)
                rows.append(row_of(trace, policy, chosen, outcome, ranks, single))
                seconds = time.perf_counter() - start
                print(f"{path.name} {policy}: {seconds:.0f} s", file=sys.stderr)
    print_rows(rows, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json:
        text = json.dumps(rows, indent=1) + "\n"
        sys.stdout.write(text) if arguments.json == "-" else Path(
            arguments.json
        ).write_text(text)
    if arguments.plot:
        plot_rows(arguments.plot, rows)


if __name__ == "__main__":
    main()
