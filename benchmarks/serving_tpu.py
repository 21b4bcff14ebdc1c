"""What the cache costs in a serving step on a TPU v6e, by the compiler's estimates.

Models of Qwen3-8B's and Kimi-Linear-48B's shapes, one chip's share of them under tensor
parallelism. Everything is compiled from shapes for a described chip; nothing runs.
README.md says what is counted and how.

    python benchmarks/serving_tpu.py --json serving_tpu.json
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from hlo_loops import LoopCost, cost
from tpu_estimate import Estimator, described_device

COLUMNS = (
    "model chips_per_replica batch context page_size admitting_cycles decoding_cycles "
    "cache_kernels without_estimate forward_cycles forward_without_estimate "
    "row_move_cycles track_interval roofline_cycles roofline_ms weight_bytes kv_bytes "
    "state_bytes aliased_bytes donated_bytes temp_bytes"
).split()
HBM_BYTES_PER_S = 1640e9  # https://cloud.google.com/tpu/docs/v6e
_STREAM_WORDS = 1 << 27


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--dump", type=Path, help="write each compiled text here")
    return parser.parse_args()


class Compiler:
    """Compiles steps and forwards for the described chip."""

    def __init__(self, estimator: Estimator, dump: Path | None) -> None:
        self._estimator, self._dump = estimator, dump

    def compile(self, name: str, function: Any, *args: Any) -> Any:
        """Compile `function(*args)`, the first argument donated."""
        import jax

        start = time.perf_counter()
        jitted = jax.jit(function, donate_argnums=0)
        with jax.sharding.use_abstract_mesh(self._estimator._mesh):
            compiled = jitted.lower(*self._estimator.place(args)).compile()
        if self._dump:
            self._dump.mkdir(parents=True, exist_ok=True)
            (self._dump / f"{name}.txt").write_text(compiled.as_text())
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        return compiled

    def cycles_per_byte(self) -> float:
        """What the compiler thinks that streaming from and to HBM takes."""
        import jax

        words = jax.ShapeDtypeStruct((_STREAM_WORDS,), "float32")
        compiled = self.compile("stream", lambda x: x + 1, words)
        return cost(compiled.as_text()).cycles / (2 * 4 * _STREAM_WORDS)


def without_forward(model: Any, pools: Any, lanes: Any) -> Any:
    """Stands for the forward: the pools as they are, and logits of nothing."""
    import jax.numpy as jnp

    logits = jnp.zeros((lanes.start.shape[0], 128)) + lanes.start[:, None]
    return pools, logits


def step_cost(compiler: Compiler, case: Any, *, use_cache: bool) -> tuple[Any, Any]:
    """Compile the step without its forward: the compiled step, and its state."""
    from uhrc_fn.serving import step

    state = case.state(use_cache=use_cache)
    with mock.patch.object(step, "forward", without_forward):
        # A function of its own: jax.jit would find the trace of the other.
        run = lambda state: step.serve_step(None, state)
        name = f"{case.name}-step-{'cache' if use_cache else 'none'}"
        return compiler.compile(name, run, state), state


def forward_cost(compiler: Compiler, case: Any) -> tuple[LoopCost, int]:
    """The forward of all layers, from a few of each kind: ``(cost, a row's moves)``.

    One layer of each kind is compiled, and then one more of each kind in turn: the
    difference is what a layer of that kind costs. Narrow states are moved row by row,
    to the running slots and, of the lanes that track, to their track slots: by two
    loops that are alike, of which a forward that tracks nobody runs one.
    """
    kinds = list(dict.fromkeys(case.model.layers))

    def measure(layers: tuple[str, ...]) -> list[int]:
        name = f"{case.name}-{'-'.join(layers)}"
        compiled = compiler.compile(name, case.forward, *case.forward_args(layers))
        text = compiled.as_text()
        still, moving = cost(text), cost(text, rows=1)
        return [*still, (moving.cycles - still.cycles) // 2]

    base = measure(tuple(kinds))
    total = list(base)
    for kind in kinds:
        longer, more = measure((*kinds, kind)), case.model.layers.count(kind) - 1
        total = [
            t + more * (after - before)
            for t, before, after in zip(total, base, longer, strict=True)
        ]
    *still, move = total
    forward = LoopCost(*still)
    return forward._replace(cycles=forward.cycles + case.batch * move), move


def row_of(compiler: Compiler, case: Any, cycles_per_byte: float) -> dict:
    """Everything about one model."""
    compiled, state = step_cost(compiler, case, use_cache=True)
    control, _ = step_cost(compiler, case, use_cache=False)
    text, plain = compiled.as_text(), control.as_text()
    once, never = cost(text, rows=1), cost(text, turns=0)
    forward, move = forward_cost(compiler, case)
    memory = compiled.memory_analysis()
    streamed = case.weight_bytes + case.kv_bytes + case.state_bytes
    return {
        "model": case.name,
        "chips_per_replica": case.chips,
        "batch": case.batch,
        "context": case.config.max_length,
        "page_size": case.config.cache.page_size,
        # What the step without a cache does to schedule is not the cache's.
        "admitting_cycles": once.cycles - cost(plain).cycles,
        "decoding_cycles": never.cycles - cost(plain, turns=0).cycles,
        "cache_kernels": once.kernels - cost(plain).kernels,
        "without_estimate": once.without_estimate - cost(plain).without_estimate,
        "forward_cycles": forward.cycles,
        "forward_without_estimate": forward.without_estimate,
        "row_move_cycles": move,
        "track_interval": case.config.track_interval,
        "roofline_cycles": round(streamed * cycles_per_byte),
        "roofline_ms": 1e3 * streamed / HBM_BYTES_PER_S,
        "weight_bytes": case.weight_bytes,
        "kv_bytes": case.kv_bytes,
        "state_bytes": case.state_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "donated_bytes": sum(x.size * x.dtype.itemsize for x in leaves(state)),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def leaves(tree: Any) -> list:
    import jax

    return jax.tree.leaves(tree)


def print_shares(row: dict) -> None:
    """Print the shares that a reader looks for."""
    print(
        f"{row['model']}, a chip of {row['chips_per_replica']}, batch {row['batch']}, "
        f"{row['context']:,} tokens of context"
    )
    # A request tracks once in an interval; one that is admitted may do so at once.
    interval, move = row["track_interval"], row["row_move_cycles"]
    share = row["batch"] / interval if interval else 0
    for kind, tracking in (("decoding", share), ("admitting", min(1, interval))):
        cache = row[f"{kind}_cycles"] + round(tracking * move)
        of_forward = cache / (cache + row["forward_cycles"])
        of_roofline = cache / (cache + row["roofline_cycles"])
        print(
            f"  a step that is {kind}: cache {cache:,} cycles, {of_forward:.2%} of the "
            f"estimated step, {of_roofline:.2%} of the roofline step"
        )
    print(
        f"  forward {row['forward_cycles']:,} cycles by estimate "
        f"({row['forward_without_estimate']} kernels without one), roofline "
        f"{row['roofline_cycles']:,} ({row['roofline_ms']:.2f} ms); aliased "
        f"{row['aliased_bytes'] / row['donated_bytes']:.1%}; "
        f"{row['cache_kernels']} kernels of the cache, {row['without_estimate']} "
        "without an estimate"
    )


def main() -> None:
    arguments = parse_arguments()
    compiler = Compiler(Estimator(described_device()), arguments.dump)
    from serving_tpu_cases import tpu_models

    cycles_per_byte = compiler.cycles_per_byte()
    ghz = HBM_BYTES_PER_S * cycles_per_byte / 1e9
    print(
        f"streaming: {cycles_per_byte:.5f} cycles a byte, {ghz:.2f} GHz at 1,640 GB/s"
    )
    rows = []
    for case in tpu_models():
        if arguments.only in case.name:
            row = row_of(compiler, case, cycles_per_byte)
            rows.append({column: row[column] for column in COLUMNS})
            print_shares(row)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("Estimates of the TPU compiler for one v6e chip; nothing ran on a TPU.")


if __name__ == "__main__":
    main()
