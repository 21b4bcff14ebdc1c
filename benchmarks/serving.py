"""The fused step against a host-side index and against no cache; see README.md.

    python benchmarks/serving.py --peer PATH/TO/sglang-jax/python --json serving.json

All sides of a table take turns in one process, serve the same prompts in the same
shapes, and must give the same tokens. Figures are medians over the rounds.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
if "--default-settings" not in sys.argv:
    os.environ["NPROC"] = "1"  # XLA sizes its thread pool by it

from hosts import oracle_maker, peer_maker
from serving_cases import (
    PAGE_SIZE,
    VOCABULARY,
    Run,
    Setting,
    grouped_prompts,
    serve,
    setting_of,
    unshared_prompts,
)
from serving_host import HostEngine, OracleIndex, PeerIndex
from timing import core_to_use, enter_one_core

import uhrc_fn
from uhrc_fn.serving.models.config import ModelConfig, small_config

PARTS = ("steps", "share", "shared-prefix")
STEPS = (1, 8, 32)
BATCHES = (1, 8, 32)
# The shared-prefix workload of sglang-jax's A/B benchmark, an eighth of its tokens and
# of its concurrency: groups, prompts of each, system prompt, question, output.
SHARED = dict(groups=16, each=4, system=256, question=16)
RANDOM = dict(count=32, tokens=128)
OUTPUT, WIDTH = 16, 8

Index = Callable[[int], Any]
"""Makes a host index of so many pages."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--peer", type=Path, help="`python` folder of sglang-jax")
    parser.add_argument("--only", choices=PARTS, help="one of the tables")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES,
                        help="decode lanes of the steps table")  # fmt: skip
    parser.add_argument("--core", type=int, help="which core to stay on")
    parser.add_argument("--default-settings", action="store_true", help="all cores")
    return parser.parse_args()


def indices(peer_path: Path | None) -> dict[str, Index]:
    """The host trees by name."""
    oracle = oracle_maker()
    made: dict[str, Index] = {
        "oracle": lambda pages: OracleIndex(oracle(PAGE_SIZE, pages).tree)  # type: ignore[attr-defined]
    }
    if peer_path:
        peer = peer_maker(peer_path)
        made["peer"] = lambda pages: PeerIndex(peer(PAGE_SIZE, pages))
    return made


def host_engine(setting: Setting, index: Index) -> HostEngine:
    config = setting.config
    pages = config.cache.num_pages
    return HostEngine(setting.model, config, setting.pools(config), index(pages))


def in_turn(
    engines: dict[str, Any], prompts_of: Callable[[int], list], output: int,
    width: int, rounds: int, before: Callable[[str], None] = lambda name: None,
) -> dict[str, list[Run]]:  # fmt: skip
    """Serve rounds of prompts with all engines in turn; the first two do not count.

    Raises:
      SystemExit: two of them gave different tokens.
    """
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for turn in range(rounds + 2):
        prompts = prompts_of(turn)
        # Who goes first changes, so that none always follows the same one.
        first = turn % len(engines)
        for name in [*engines][first:] + [*engines][:first]:
            before(name)
            runs[name].append(serve(engines[name], prompts, output, width))
        outputs = {name: runs[name][-1].outputs for name in engines}
        one = next(iter(engines))
        others = [name for name in engines if outputs[name] != outputs[one]]
        if others:
            raise SystemExit(f"{', '.join(others)}: other tokens than {one}")
    return {name: each[2:] for name, each in runs.items()}


def ratios(above: list[Run], below: list[Run], figure: Callable) -> list[float]:
    """The ratio of two sides in each round: what else the machine does meets both."""
    pairs = zip(above, below, strict=True)
    return [figure(a) / figure(b) for a, b in pairs]


def median_ratio(above: list[Run], below: list[Run], figure: Callable) -> float:
    return statistics.median(ratios(above, below, figure))


def quartiles(above: list[Run], below: list[Run], figure: Callable) -> list[float]:
    """How far the ratios scatter: the lower and the upper quartile."""
    low, _, high = statistics.quantiles(ratios(above, below, figure), n=4)
    return [round(low, 3), round(high, 3)]


def speed(run: Run) -> float:
    return run.tokens_per_s


def hit_ratio(runs: list[Run]) -> float:
    return sum(r.hit_tokens for r in runs) / sum(r.prompt_tokens for r in runs)


def steps_table(arguments: argparse.Namespace) -> list[dict]:
    """Tokens a second against the steps of a call, beside a host-side index."""
    rows = []
    model = small_config("gqa", num_layers=2, vocab_size=VOCABULARY)
    for batch in arguments.batches:
        setting = setting_of(
            model, lanes=batch, max_length=160, chunk=64, tree_tokens=8192
        )
        engines: dict[str, Any] = {
            f"fused, K={steps}": setting.engine(steps=steps) for steps in STEPS
        }
        for name, index in indices(arguments.peer).items():
            engines[f"host, {name}"] = host_engine(setting, index)
        prompts = lambda turn, batch=batch: grouped_prompts(
            4, max(batch * 3 // 4, 2), system=80, question=24, turn=turn
        )
        runs = in_turn(engines, prompts, 32, batch, arguments.rounds)
        hosts = [name for name in engines if name.startswith("host")]
        for name, each in runs.items():
            row = {"batch": batch, "side": name, "requests": len(each[0].outputs)}
            row["tokens_per_s"] = statistics.median(map(speed, each))
            row["hit_ratio"] = hit_ratio(each)
            row["ratio_to_one_step"] = median_ratio(each, runs["fused, K=1"], speed)
            for host in hosts:
                key = f"ratio_to_{host.removeprefix('host, ')}"
                row[key] = median_ratio(each, runs[host], speed)
            rows.append(row)
            print_row(row)
    return rows


def wide(family: str) -> ModelConfig:
    """A model large enough that computing prompts takes time."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 32}
    model = small_config(family, vocab_size=VOCABULARY, **sizes)
    if not model.recurrent_layers:
        return model
    return dataclasses.replace(model, recurrent_v_dim=32)


def setting_for(family: str) -> Setting:
    return setting_of(
        wide(family), lanes=WIDTH, max_length=320, chunk=64, tree_tokens=8192
    )


def share_table(arguments: argparse.Namespace) -> list[dict]:
    """What the cache's operations take of the step, on prompts that share nothing."""
    rows = []
    for family in ("gqa", "kda-mla"):
        setting = setting_for(family)
        engines = {
            "with": setting.engine(steps=8),
            "without": setting.engine(use_cache=False, steps=8),
        }
        # Both fill most of their page tables: the control's are always full, and a
        # forward that reads pages of nobody would seem faster.
        for name, tokens, output in (("decode", 192, 128), ("prefill", 312, 8)):
            draw = lambda turn, tokens=tokens: unshared_prompts(16, tokens, turn)
            runs = in_turn(engines, draw, output, WIDTH, arguments.rounds)
            assert not any(run.hit_tokens for run in runs["with"])
            ratio = median_ratio(runs["with"], runs["without"], speed)
            row = {"family": family, "workload": name, "prompt": tokens}
            row |= {"output": output, "throughput_ratio": ratio}
            row["quartiles"] = quartiles(runs["with"], runs["without"], speed)
            rows.append(row | {"cache_share": 1 - ratio})
            print_row(rows[-1])
    return rows


def shared_prefix_table(arguments: argparse.Namespace) -> list[dict]:
    """The shared-prefix and the random workload, with the gates of the original.

    The tree is emptied before each round, so that a hit is one within the round.
    """
    rows = []
    for family in ("gqa", "kda-mla"):
        setting = setting_for(family)
        engines: dict[str, Any] = {
            "fused": setting.engine(),
            "no cache": setting.engine(use_cache=False),
        }
        trees = indices(arguments.peer) if family == "gqa" else {}

        def flush(name: str, engines=engines, trees=trees, setting=setting) -> None:
            if name in trees:
                engines[name] = host_engine(setting, trees[name])
            elif name == "fused":
                cache = uhrc_fn.jitted.reset(engines[name].state.cache)
                state = dataclasses.replace(engines[name].state, cache=cache)
                engines[name].state = state

        engines |= dict.fromkeys(trees)
        workloads = {
            "shared": lambda turn: grouped_prompts(**SHARED, turn=turn),
            "random": lambda turn: unshared_prompts(**RANDOM, seed=turn),
        }
        for workload, draw in workloads.items():
            runs = in_turn(engines, draw, OUTPUT, WIDTH, arguments.rounds, flush)
            rows += _rows_of(family, workload, runs)
    return rows


def _rows_of(family: str, workload: str, runs: dict[str, list[Run]]) -> list[dict]:
    ttft = lambda run: statistics.median(run.ttft_s)
    total = lambda run: run.total_tokens_per_s
    rows = []
    for side, each in runs.items():
        row: dict = {"family": family, "workload": workload, "side": side}
        row["ttft_p50_ms"] = 1e3 * statistics.median(map(ttft, each))
        row["total_tokens_per_s"] = statistics.median(map(total, each))
        row["hit_ratio"] = hit_ratio(each)
        row["ttft_ratio_to_no_cache"] = median_ratio(each, runs["no cache"], ttft)
        row["throughput_ratio_to_no_cache"] = median_ratio(
            each, runs["no cache"], total
        )
        row["throughput_quartiles"] = quartiles(each, runs["no cache"], total)
        row["throughput_ratio_of_fused"] = median_ratio(runs["fused"], each, total)
        rows.append(row)
    gates = _gates(workload, {row["side"]: row for row in rows})
    for row in rows:
        print_row(row)
    for gate, holds in gates.items():
        print(f"    {'holds' if holds else 'MISSED'}: {gate}")
    return [row | {"gates": gates} for row in rows]


def _gates(workload: str, sides: dict[str, dict]) -> dict[str, bool]:
    """The gates of the original that can be asked here."""
    fused = sides["fused"]
    hosts = {name: row for name, row in sides.items() if name in ("oracle", "peer")}
    if workload == "random":
        ratio = fused["throughput_ratio_to_no_cache"]
        gates = {"throughput at least 0.95 of no cache": ratio >= 0.95}
        for name, row in hosts.items():
            holds = row["throughput_ratio_of_fused"] >= 0.95
            gates[f"throughput at least 0.95 of a host-side index, {name}"] = holds
        return gates
    gates = {"TTFT p50 below 0.9 of no cache": fused["ttft_ratio_to_no_cache"] < 0.9}
    for name, row in hosts.items():
        holds = fused["hit_ratio"] >= row["hit_ratio"]
        gates[f"hit ratio at least that of a host-side index, {name}"] = holds
    return gates


def print_row(row: dict) -> None:
    """Print a row as it comes."""
    cell = lambda v: f"{v:,.3f}" if isinstance(v, float) else str(v)
    print("  ".join(f"{k}={cell(v)}" for k, v in row.items()), flush=True)


def main() -> None:
    arguments = parse_arguments()
    if not arguments.default_settings:
        enter_one_core(core_to_use(arguments.core))
    made = zip(PARTS, (steps_table, share_table, shared_prefix_table), strict=True)
    tables = {}
    for name, table in made:
        if arguments.only in (None, name):
            print(f"# {name}", file=sys.stderr)
            tables[name] = table(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
