"""What the TPU compiler says about each operation, without a TPU.

libtpu compiles for a described v6e. Nothing runs: every figure is the compiler's own
estimate or its memory assignment. See README.md for how to read the columns.

    python benchmarks/tpu_estimate.py --json tpu.json
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# All of it must stand before JAX is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

TOPOLOGY = "v6e:2x2x1"
COLUMNS = (
    "op components page_size pages batch kernels estimated_cycles without_estimate "
    "unbounded state_bytes aliased_bytes temp_bytes"
).split()


def skip(reason: str) -> None:
    """Say why nothing was measured and leave without an error."""
    print(f"skipped: {reason}")
    sys.exit(0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--components", help="cases of this set: FULL, FULL,SWA, ...")
    parser.add_argument("--nodes", type=int, default=16384, help="tree nodes")
    parser.add_argument("--dump", type=Path, help="write each compiled text here")
    return parser.parse_args()


def described_device() -> Any:
    """One chip of the described topology, or leave with the reason."""
    if importlib.util.find_spec("libtpu") is None:
        skip("libtpu is not installed; pip install 'uhrc_fn[tpu]' brings it")
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    except Exception as error:  # libtpu raises several kinds
        skip(f"libtpu cannot describe {TOPOLOGY}: {error}")
        raise
    return described.devices[0]


class Estimator:
    """Compiles functions of a donated state for one described device."""

    def __init__(self, device: Any, dump: Path | None = None) -> None:
        import jax

        self._jax = jax
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        # Pallas asks which chip it compiles for; the mesh in force tells it.
        chip = jax.sharding.AbstractDevice(
            device_kind=device.device_kind, num_cores=1, platform="tpu"
        )
        self._mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
        self._dump = dump

    def place(self, tree: Any) -> Any:
        """Describe arrays as living on the device."""
        return self._jax.tree.map(
            lambda leaf: self._jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._sharding
            ),
            tree,
        )

    def padded_bytes(self, state: Any) -> int:
        """Bytes of the state as the TPU lays it out."""
        identity = self._jax.jit(lambda s: s, keep_unused=True)
        compiled = identity.lower(self.place(state)).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    def measure(self, name: str, function: Callable, donate: bool, *args: Any) -> dict:
        """Compile `function(*args)`, the first argument donated or not."""
        from hlo import program_cost

        donated = (0,) if donate else ()
        jitted = self._jax.jit(function, donate_argnums=donated)
        with self._jax.sharding.use_abstract_mesh(self._mesh):
            compiled = jitted.lower(*self.place(args)).compile()
        text = compiled.as_text()
        if self._dump:
            self._dump.mkdir(parents=True, exist_ok=True)
            (self._dump / f"{name}.txt").write_text(text)
        memory = compiled.memory_analysis()
        return program_cost(text)._asdict() | {
            "aliased_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
        }


def main() -> None:
    arguments = parse_arguments()
    estimator = Estimator(described_device(), arguments.dump)
    from tpu_cases import tpu_cases

    rows, padded = [], {}
    for case in tpu_cases(arguments.nodes):
        if arguments.only not in case.op:
            continue
        if arguments.components not in (None, case.components):
            continue
        start = time.perf_counter()
        if case.shapes not in padded:
            padded[case.shapes] = estimator.padded_bytes(case.args[0])
        name = f"{case.op}_{case.page_size}_{case.pages}_{case.batch}"
        if case.components != "FULL":
            name = f"{name}_{case.components.replace(',', '_')}"
        row = {
            "op": case.op,
            "components": case.components,
            "page_size": case.page_size,
            "pages": case.pages,
            "batch": case.batch,
            "state_bytes": padded[case.shapes],
        } | estimator.measure(name, case.function, case.donate, *case.args)
        rows.append({column: row[column] for column in COLUMNS})
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def print_table(rows: list[dict]) -> None:
    """Print the rows with the columns that a reader compares."""
    print(
        f"{'op':<14}{'components':<15}{'page':>5}{'pages':>6}{'batch':>6}{'kernels':>8}{'cycles':>10}"
        f"{'no est.':>8}{'unbound.':>9}{'aliased':>9}{'temp KiB':>10}"
    )
    for row in rows:
        aliased = row["aliased_bytes"] / row["state_bytes"]
        print(
            f"{row['op']:<14}{row['components']:<15}{row['page_size']:>5}{row['pages']:>6}{row['batch']:>6}"
            f"{row['kernels']:>8}{row['estimated_cycles']:>10,}"
            f"{row['without_estimate']:>8}{row['unbounded']:>9}{aliased:>9.0%}"
            f"{row['temp_bytes'] / 1024:>10,.0f}"
        )
    print("Estimates of the TPU compiler for one v6e chip; nothing ran on a TPU.")


if __name__ == "__main__":
    main()
