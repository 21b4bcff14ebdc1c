"""Time each operation beside the host trees; README.md says what the rows mean.

python benchmarks/ops.py --peer PATH/TO/sglang-jax/python --json ops.json
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import core_to_use, enter_one_core, measure, run_child

COLUMNS = (
    "op components page_size pages batch shared nodes ours_us default_dispatch_us "
    "in_loop_us dispatch_floor_us convert_us oracle_us peer_us compile_s"
).split()
# Times of the table; the mean and the minimum are in the table only.
_TIMES = (
    "ours_us ours_mean_us ours_min_us default_dispatch_us in_loop_us "
    "dispatch_floor_us convert_us oracle_us peer_us"
).split()
_QUICK_SECONDS, _SECONDS = 0.2, 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--peer", type=Path, help="`python` folder of sglang-jax")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--components", help="cases of this set: FULL, FULL,SWA, ...")
    parser.add_argument("--page-size", type=int, help="cases of this page size")
    parser.add_argument("--batch", type=int, help="cases of this batch")
    parser.add_argument("--max-nodes", type=int, help="leave larger trees out")
    parser.add_argument("--quick", action="store_true", help="fewer samples a row")
    parser.add_argument("--core", type=int, help="core to run on; default the first")
    parser.add_argument("--no-default", action="store_true", help="one core only")
    parser.add_argument("--condition", choices=("one-core", "default"),
                        help=argparse.SUPPRESS)  # fmt: skip
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen_cases(arguments: argparse.Namespace) -> list[Any]:
    """Apply the filters of the command line."""
    from cases import all_cases
    from hybrid_cases import hybrid_cases

    return [
        case
        for case in all_cases() + hybrid_cases()
        if arguments.only in case.op
        and arguments.components in (None, case.components)
        and arguments.page_size in (None, case.page_size)
        and arguments.batch in (None, case.batch)
        and case.nodes <= (arguments.max_nodes or case.nodes)
    ]


def host_makers(peer_path: Path | None) -> dict[str, Any]:
    """Column of each host tree, and how to make one."""
    from hosts import oracle_maker, peer_maker

    makers: dict[str, Any] = {"oracle_us": oracle_maker()}
    if peer_path:
        makers["peer_us"] = peer_maker(peer_path)
    return makers


def compile_seconds(runner: Any, cache: Any, args: tuple) -> float:
    """Trace and compile once, without running."""
    start = time.perf_counter()
    runner.jitted.lower(cache, *args).compile()
    return time.perf_counter() - start


def bench_of(case: Any) -> Any:
    """Prepare the sides of a case."""
    from cases import BENCHES
    from hybrid_cases import HYBRID_BENCHES

    return (BENCHES | HYBRID_BENCHES)[case.op](case)


def one_core_row(case: Any, makers: dict[str, Any], seconds: float) -> dict:
    """Measure a case in the one-core condition, every side in this process."""
    from ours import Runner, floor, in_loop

    bench = bench_of(case)
    runner = Runner(bench.function)
    row: dict[str, Any] = dict.fromkeys(COLUMNS) | case.identity
    row["compile_s"] = compile_seconds(runner, bench.base, bench.arguments[0])
    ours = measure(bench.ours(runner), seconds)
    row["ours_us"], row["ours_mean_us"] = ours.median, ours.mean
    row["ours_min_us"] = ours.minimum
    runner.cache = None
    looped = Runner(in_loop(bench.function))
    row["in_loop_us"] = measure(bench.looped(looped), seconds).median
    looped.cache = None
    empty = Runner(floor(bench.function, bench.base, *bench.arguments[0]))
    row["dispatch_floor_us"] = measure(bench.floor(empty), seconds / 2).median
    empty.cache = None
    convert = bench.convert()
    if convert:
        row["convert_us"] = measure(convert, seconds / 2).median
    for column, make_tree in makers.items():
        loop = bench.host(make_tree) if case.hosts else None
        if loop:
            row[column] = measure(loop, seconds).median
    return row


def default_row(case: Any, seconds: float) -> dict:
    """Measure ours alone with JAX's default dispatch and threads."""
    from ours import Runner

    bench = bench_of(case)
    ours = measure(bench.ours(Runner(bench.function)), seconds)
    return case.identity | {"default_dispatch_us": ours.median}


def measure_condition(arguments: argparse.Namespace) -> None:
    """Child: measure every chosen case in one condition and write the rows."""
    if arguments.condition == "one-core":
        enter_one_core(arguments.core)
        row_of = functools.partial(one_core_row, makers=host_makers(arguments.peer))
    else:
        row_of = default_row
    rows = []
    for case in chosen_cases(arguments):
        start = time.perf_counter()
        seconds = _QUICK_SECONDS if arguments.quick else _SECONDS
        rows.append(row_of(case, seconds=seconds))
        took = time.perf_counter() - start
        label = " ".join(f"{k}={v}" for k, v in case.identity.items() if v is not None)
        print(f"{arguments.condition}: {label} ({took:.0f} s)", file=sys.stderr)
        arguments.out.write_text(json.dumps(rows))


def run_conditions(arguments: argparse.Namespace) -> list[dict]:
    """Parent: run the children one after another and join their rows."""
    core = core_to_use(arguments.core)
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for condition in ("one-core", "default")[: 1 if arguments.no_default else 2]:
            out = Path(folder) / f"{condition}.json"
            passed = [word for word in sys.argv[1:] if word != "--no-default"]
            run_child(
                [*passed, "--condition", condition, "--out", str(out)],
                core if condition == "one-core" else None,
            )
            rows.append(json.loads(out.read_text()))
    for row, other in zip(rows[0], rows[-1], strict=True):
        row.update({k: v for k, v in other.items() if k == "default_dispatch_us"})
    return rows[0]


def print_table(rows: list[dict]) -> None:
    """Print the rows with the ratios that a reader looks for."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.{1 if value < 1e4 else 0}f}"

    def ratio(row: dict, above: str, below: str) -> str:
        if not row.get(above) or not row.get(below):
            return ""
        return f"{row[above] / row[below]:.2f}x"

    head = (
        "op components page pages batch shared nodes ours mean min default loop floor "
        "convert oracle peer peer/ours peer/loop peer/default oracle/ours compile_s"
    ).split()
    table = [head]
    for row in rows:
        cells = [str(row[k]) for k in COLUMNS[:5]]
        cells += ["" if row["shared"] is None else f"{row['shared']:g}"]
        cells += [str(row["nodes"])]
        cells += [number(row.get(column)) for column in _TIMES]
        cells += [
            ratio(row, "peer_us", "ours_us"),
            ratio(row, "peer_us", "in_loop_us"),
            ratio(row, "peer_us", "default_dispatch_us"),
            ratio(row, "oracle_us", "ours_us"),
            f"{row['compile_s']:.1f}",
        ]
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)))
    print("Microseconds a request, medians unless the column says otherwise.")


def main() -> None:
    arguments = parse_arguments()
    if arguments.condition:
        measure_condition(arguments)
        return
    rows = run_conditions(arguments)
    print_table(rows)
    if arguments.json:
        kept = [{column: row[column] for column in COLUMNS} for row in rows]
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
