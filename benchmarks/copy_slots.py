"""How fast `copy_slots` moves states on this CPU, against a plain copy of the bytes.

The pool is donated, so that the copy is in place. The plain copies move one array of
the same bytes: by XLA into a new array, whose memory the system must find first; by
XLA into a donated array, and by NumPy, both into memory that is there already. All take
turns in one process; a figure is the median over the rounds.

The condition is that of `ops.py`: one core, synchronous dispatch. XLA's own plain copy
uses more cores where it may (`--default-settings`), a copy inside one buffer does not.

    python benchmarks/copy_slots.py --json copy_slots.json
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
if "--default-settings" not in sys.argv:
    os.environ["NPROC"] = "1"  # XLA sizes its thread pool by it

import jax
import jax.numpy as jnp
import numpy as np
from timing import core_to_use, enter_one_core

from uhrc_fn.kernels import copy_slots

PLAIN = ("xla_new", "xla_into", "numpy")


class Shape(NamedTuple):
    """One pool: what a layer holds for a slot."""

    name: str
    temporal: tuple[int, int, int]  # heads, key width, value width
    conv: tuple[int, int]  # channels, taps; no taps: no convolution


SHAPES = (
    Shape("KDA, 32 heads of 128", (32, 128, 128), (12288, 3)),
    Shape("GDN, 32 and 16 heads of 128", (32, 128, 128), (8192, 3)),
    Shape("GLA, 16 heads of 128", (16, 128, 128), (0, 0)),
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--lanes", type=int, default=8, help="slots copied at once")
    parser.add_argument("--layers", type=int, default=4, help="recurrent layers")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--core", type=int, help="which core to stay on")
    parser.add_argument("--default-settings", action="store_true", help="all cores")
    return parser.parse_args()


def make_pool(shape: Shape, slots: int, layers: int) -> list[jax.Array]:
    """Buffers of a pool, as random as states are."""
    random = np.random.default_rng(0)
    draw = lambda *axes: jnp.asarray(random.random((slots + 1, *axes), np.float32))
    temporal = [draw(*shape.temporal) for _ in range(layers)]
    conv = [draw(*shape.conv).astype(jnp.bfloat16) for _ in range(layers)]
    return temporal + (conv if all(shape.conv) else [])


def measure(shape: Shape, lanes: int, layers: int, rounds: int) -> dict[str, Any]:
    """Time the copy of `lanes` slots and its plain twins in turns."""
    pool = make_pool(shape, 2 * lanes, layers)
    copied = lanes * sum(buffer[0].nbytes for buffer in pool)
    src = jnp.arange(1, lanes + 1, dtype=jnp.int32)
    compiled = jax.jit(copy_slots, donate_argnums=0).lower(pool, src, src + lanes)
    copy = compiled.compile()
    plain = jnp.asarray(np.random.default_rng(1).random(copied // 4, np.float32))
    xla_copy = jax.jit(jnp.copy).lower(plain).compile()
    into = jax.jit(lambda old, new: jnp.copy(new), donate_argnums=0, keep_unused=True)
    old = jnp.zeros_like(plain)
    xla_into = into.lower(old, plain).compile()
    there, from_ = np.zeros(copied // 4, np.float32), np.asarray(plain)
    seconds: dict[str, list[float]] = {name: [] for name in ("copy_slots", *PLAIN)}

    def timed(name: str, act) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(act())
        seconds[name].append(time.perf_counter() - start)
        return result

    for _ in range(rounds + 1):
        pool = timed("copy_slots", lambda pool=pool: copy(pool, src, src + lanes))
        timed("xla_new", lambda: xla_copy(plain))
        old = timed("xla_into", lambda old=old: xla_into(old, plain))
        timed("numpy", lambda: np.copyto(there, from_))
    median = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    memory = copy.memory_analysis()
    return {
        "states": shape.name,
        "lanes": lanes,
        "layers": layers,
        "bytes": copied,
        **{f"{name}_gb_per_s": copied / t / 1e9 for name, t in median.items()},
        **{f"ratio_to_{name}": median[name] / median["copy_slots"] for name in PLAIN},
        "aliased_bytes": memory.alias_size_in_bytes,
        "pool_bytes": sum(buffer.nbytes for buffer in pool),
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    arguments = parse_arguments()
    if not arguments.default_settings:
        enter_one_core(core_to_use(arguments.core))
    rows = []
    print(f"{'states':<30}{'MiB':>6}{'GB/s':>7}" + f"{'plain':>9}{'ratio':>7}" * 3)
    print(" " * 43 + "".join(f"{name:>16}" for name in PLAIN))
    for shape in SHAPES:
        row = measure(shape, arguments.lanes, arguments.layers, arguments.rounds)
        rows.append(row)
        plain = [(row[f"{n}_gb_per_s"], row[f"ratio_to_{n}"]) for n in PLAIN]
        print(
            f"{row['states']:<30}{row['bytes'] / 2**20:>6.0f}"
            f"{row['copy_slots_gb_per_s']:>7.2f}"
            + "".join(f"{speed:>9.2f}{ratio:>7.2f}" for speed, ratio in plain)
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
