"""`python -m uhrc_fn.replay`: replay a recorded workload through the jitted cache."""

import pathlib
import sys
from typing import NamedTuple

import numpy as np

from ..config import MAX_CAPACITY
from ..saving import SavedStateError
from . import plot, report
from .arguments import parser
from .builtin import conversations
from .ideal import BeladyBound, PrefixNodes, ideal_hit_pages, prefix_nodes
from .tokenizing import load_tokenizer, text_workload
from .traces import TEXT_PAGE_SIZE, TraceError, load_trace
from .workload import Workload

BAD_INPUT = 2

# A sweep lends a pool to capacities down to this part of it, the rest reserved: one
# compilation serves them all, and the arrays are not much larger than they need be.
_LEAST_OF_POOL = 1 / 4


class Run(NamedTuple):
    """One replay of several."""

    part: float
    """Capacity as a fraction of the unique pages."""
    pages: int
    window: int

    @property
    def label(self) -> str:
        window = f", window {self.window:,}" if self.window else ""
        return f"{self.pages:,} pages{window}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        check_outputs(arguments)
        workload = load(arguments)
        check_measured(workload, arguments.measure_from)
        tree = prefix_nodes(workload)
        runs = choose_runs(arguments, tree.num_nodes)
        for each in runs:
            hybrid_of(arguments, each.window).settings(workload, each.pages)
    except (TraceError, ValueError, ModuleNotFoundError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    try:
        run(arguments, workload, tree, runs)
    except SavedStateError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def check_outputs(arguments) -> None:
    """Find out before the replay what would fail after it."""
    if arguments.plot:
        plot.check_plot(arguments.plot)
    for option in ("json", "plot", "progress_file"):
        target = getattr(arguments, option)
        if target and target != "-" and not pathlib.Path(target).parent.is_dir():
            name = option.replace("_", "-")
            raise ValueError(f"--{name} {target}: there is no such folder.")


def load(arguments) -> Workload:
    tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    if arguments.trace != "builtin":
        return load_trace(
            arguments.trace,
            page_size=arguments.page_size,
            limit=arguments.limit,
            expand_tokens=arguments.expand_tokens,
            block_weights=arguments.block_weights,
            tokenizer=tokenizer,
        )
    if arguments.expand_tokens:
        raise ValueError("--expand-tokens is for block traces; builtin is text.")
    return text_workload(
        "builtin",
        conversations(),
        page_size=arguments.page_size or TEXT_PAGE_SIZE,
        limit=arguments.limit,
        tokenizer=tokenizer,
    )


def check_measured(workload: Workload, measure_from: float) -> None:
    if workload.first_measured(measure_from) == workload.num_requests:
        raise ValueError(f"--measure-from {measure_from} leaves no request to measure.")


def choose_runs(arguments, unique_pages: int) -> list[Run]:
    """What to replay, in order."""
    unique = max(unique_pages, 1)
    windows = arguments.window or [0]
    if arguments.sweep and len(windows) > 1:
        raise ValueError(
            "--sweep with several windows; wanted one of the two. Give --sweep a "
            "single --window, or several windows a single --capacity-pages."
        )
    if arguments.sweep:
        chosen = [(part, max(int(part * unique), 1)) for part in arguments.sweep]
    else:
        pages = arguments.capacity_pages or unique
        chosen = [(pages / unique, pages)]
    for _, pages in chosen:
        if pages > MAX_CAPACITY:
            raise ValueError(
                f"a capacity of {pages} pages; a cache holds at most {MAX_CAPACITY}. "
                "Choose fewer with --capacity-pages."
            )
    runs = [Run(*capacity, window) for window in windows for capacity in chosen]
    if arguments.progress_file and len(runs) > 1:
        raise ValueError(
            f"--progress-file with {len(runs)} replays; wanted one. Give each capacity "
            "or window a command and a file of its own."
        )
    return runs


def pools_of(runs: list[Run], components: tuple[str, ...]) -> dict[int, int]:
    """Capacity -> pages of the pool that serves it, see `_LEAST_OF_POOL`.

    Hybrid sets share none: the size of their other pool may follow the capacity.
    """
    pools, pool = {}, 0
    least = _LEAST_OF_POOL if components == ("FULL",) else 1
    for pages in sorted({each.pages for each in runs}, reverse=True):
        if pages < pool * least or not pool:
            pool = pages
        pools[pages] = pool
    return pools


def hybrid_of(arguments, window: int):
    """The components of a replay; raises `ValueError` where options contradict."""
    from .hybrid import Hybrid  # imports JAX

    return Hybrid(
        components=arguments.components,
        window=window,
        checkpoints=arguments.checkpoints,
        capacity_swa_pages=arguments.capacity_swa_pages,
        capacity_slots=arguments.capacity_slots,
    )


def run(arguments, workload: Workload, tree: PrefixNodes, runs: list[Run]) -> None:
    # Imports JAX: only once the input is known to be good.
    from .engine import replay
    from .progress import ProgressFile

    measure_from = arguments.measure_from
    ideal = ideal_hit_pages(workload, tree)
    bound = BeladyBound(workload, tree) if arguments.sweep else None
    points, result, progress_file = [], None, None
    if arguments.progress_file:
        every = arguments.save_every
        progress_file = ProgressFile(path=arguments.progress_file, every=every)
    is_unlimited = not (arguments.sweep or arguments.capacity_pages)
    pools = pools_of(runs, arguments.components)
    for each in runs:
        pool = 0 if is_unlimited else pools[each.pages]
        with report.progress_bar(workload, measure_from, each.label) as on_progress:
            result = replay(
                workload,
                capacity_pages=pool,
                reserved_pages=max(pool - each.pages, 0),
                batch=arguments.batch,
                measure_from=measure_from,
                hybrid=hybrid_of(arguments, each.window),
                progress_file=progress_file,
                on_progress=on_progress,
            )
        figures = report.summarize(workload, result, ideal, each.pages, measure_from)
        best = belady_ratio(workload, bound, each.pages, measure_from) if bound else 0.0
        points.append(report.Point(each.part, each.pages, each.window, figures, best))
    # With the JSON on stdout the table would spoil it.
    file = sys.stderr if arguments.json == "-" else sys.stdout
    if arguments.sweep:
        report.print_sweep(workload, points, file)
    elif len(runs) > 1:
        report.print_windows(workload, points, file)
    else:
        report.print_summary(workload, points[0].figures, tree.num_nodes, file)
    if arguments.json:
        every = [point.figures for point in points]
        if len(arguments.window or []) > 1:
            every = [{"window": p.window} | p.figures for p in points]
        is_list = arguments.sweep or len(every) > 1
        report.write_json(arguments.json, every if is_list else every[0])
    if not arguments.plot or result is None:
        return
    if arguments.sweep:
        plot.plot_sweep(arguments.plot, workload, points)
    elif len(runs) > 1:
        plot.plot_windows(arguments.plot, workload, points)
    else:
        hits = np.asarray(result.hit_pages)
        plot.plot_replay(arguments.plot, workload, hits, ideal, measure_from)


def belady_ratio(workload, bound: BeladyBound, pages: int, measure_from: float):
    first = workload.first_measured(measure_from)
    hits = workload.hit_tokens(bound.hit_pages(pages)[first:], first).sum()
    return report.ratio(int(hits), int(workload.input_tokens[first:].sum()))
