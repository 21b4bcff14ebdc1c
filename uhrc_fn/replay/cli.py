"""`python -m uhrc_fn.replay`: replay a recorded workload through the jitted cache."""

import argparse
import pathlib
import sys

import numpy as np

from ..config import MAX_CAPACITY
from . import plot, report
from .builtin import conversations
from .ideal import BeladyBound, PrefixNodes, ideal_hit_pages, prefix_nodes
from .tokenizing import load_tokenizer, text_workload
from .traces import BLOCK_WEIGHTS, TEXT_PAGE_SIZE, TraceError, load_trace
from .workload import Workload

BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        check_outputs(arguments)
        workload = load(arguments)
        check_measured(workload, arguments.measure_from)
        tree = prefix_nodes(workload)
        capacities = choose_capacities(arguments, tree.num_nodes)
        hybrid_of(arguments)
    except (TraceError, ValueError, ModuleNotFoundError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    run(arguments, workload, tree, capacities)
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m uhrc_fn.replay",
        description="Replay a recorded workload through the jitted prefix cache.",
    )
    add = p.add_argument
    add("--trace", required=True, metavar="PATH", help="a trace file, or 'builtin'")
    add(
        "--page-size",
        type=positive,
        metavar="N",
        help="key tokens a page (default: 1 for block ids, 512 for expanded ones, "
        "16 for text)",
    )
    size = p.add_mutually_exclusive_group()
    size.add_argument(
        "--capacity-pages",
        type=not_negative,
        default=0,
        metavar="N",
        help="pages of the cache (default 0: enough for everything)",
    )
    size.add_argument(
        "--sweep",
        type=fractions,
        metavar="F,F,...",
        help="replay several capacities, given as fractions of the unique pages",
    )
    add(
        "--components",
        type=components,
        default=("FULL",),
        metavar="FULL,...",
        help="FULL (default), FULL,SWA or FULL,RECURRENT",
    )
    add(
        "--window",
        type=positive,
        metavar="W",
        help="sliding window in tokens (SWA)",
    )
    add(
        "--checkpoints",
        choices=("ends", "branches"),
        default="ends",
        help="RECURRENT: a snapshot at the last full block of each input (default), or "
        "also where the match says that requests part",
    )
    add(
        "--capacity-slots",
        type=not_negative,
        default=0,
        metavar="N",
        help="slots for snapshots (RECURRENT; default 0: enough for everything)",
    )
    add(
        "--batch",
        type=positive,
        default=512,
        metavar="N",
        help="requests per device call; changes speed only (default 512)",
    )
    add("--json", metavar="PATH", help="write the figures as JSON ('-': stdout)")
    add("--plot", metavar="PATH", help="draw the hit ratio (.png, .svg, .pdf)")
    add("--limit", type=positive, metavar="N", help="only the first N requests")
    add(
        "--measure-from",
        type=share,
        default=0.0,
        metavar="F",
        help="let this fraction of the requests warm the cache; the rest counts",
    )
    add(
        "--expand-tokens",
        action="store_true",
        help="make real pages of token ids from block ids",
    )
    add(
        "--block-weights",
        choices=BLOCK_WEIGHTS,
        default="published",
        help="RAGPulse: equal weights as in its published curves, or each chunk's own "
        "tokens (default published)",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizers file (tokenizer.json) for text traces (default: bytes)",
    )
    return p


def positive(text: str) -> int:
    if (value := not_negative(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def not_negative(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return value


def components(text: str) -> tuple[str, ...]:
    allowed = {"FULL", "FULL,SWA", "FULL,RECURRENT"}
    if (text := text.upper().replace(" ", "")) not in allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(sorted(allowed))}"
        )
    return tuple(text.split(","))


def share(text: str) -> float:
    return fraction(text, lambda value: 0 <= value < 1, "at least 0 and below 1")


def fractions(text: str) -> list[float]:
    def is_allowed(value):
        return 0 < value <= 1

    wanted = "above 0 and at most 1"
    return [fraction(part, is_allowed, wanted) for part in text.split(",")]


def fraction(text: str, is_allowed, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
    return value


def check_outputs(arguments) -> None:
    """Find out before the replay what would fail after it."""
    if arguments.plot:
        plot.check_plot(arguments.plot)
    for option in ("json", "plot"):
        target = getattr(arguments, option)
        if target and target != "-" and not pathlib.Path(target).parent.is_dir():
            raise ValueError(f"--{option} {target}: there is no such folder.")


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


def choose_capacities(arguments, unique_pages: int) -> list[tuple[float, int]]:
    """(Fraction of the unique pages, pages) of each replay."""
    unique = max(unique_pages, 1)
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
    return chosen


def hybrid_of(arguments):
    """The components of a replay; raises `ValueError` where options contradict."""
    from .hybrid import Hybrid  # imports JAX

    return Hybrid(
        components=arguments.components,
        window=arguments.window or 0,
        checkpoints=arguments.checkpoints,
        capacity_slots=arguments.capacity_slots,
    )


def run(
    arguments,
    workload: Workload,
    tree: PrefixNodes,
    capacities: list[tuple[float, int]],
) -> None:
    from .engine import replay  # imports JAX: only once the input is known to be good

    measure_from = arguments.measure_from
    ideal = ideal_hit_pages(workload, tree)
    bound = BeladyBound(workload, tree) if arguments.sweep else None
    points, result = [], None
    is_unlimited = not (arguments.sweep or arguments.capacity_pages)
    for part, pages in capacities:
        label = f"{pages:,} pages"
        with report.progress_bar(workload, measure_from, label) as on_progress:
            result = replay(
                workload,
                capacity_pages=0 if is_unlimited else pages,
                batch=arguments.batch,
                measure_from=measure_from,
                hybrid=hybrid_of(arguments),
                on_progress=on_progress,
            )
        figures = report.summarize(workload, result, ideal, pages, measure_from)
        best = belady_ratio(workload, bound, pages, measure_from) if bound else 0.0
        points.append((part, pages, figures, best))
    # With the JSON on stdout the table would spoil it.
    file = sys.stderr if arguments.json == "-" else sys.stdout
    if arguments.sweep:
        report.print_sweep(workload, points, file)
    else:
        report.print_summary(workload, points[0][2], tree.num_nodes, file)
    if arguments.json:
        every = [figures for _, _, figures, _ in points]
        report.write_json(arguments.json, every if arguments.sweep else every[0])
    if arguments.plot and arguments.sweep:
        plot.plot_sweep(arguments.plot, workload, points)
    elif arguments.plot and result is not None:
        hits = np.asarray(result.hit_pages)
        plot.plot_replay(arguments.plot, workload, hits, ideal, measure_from)


def belady_ratio(workload, bound: BeladyBound, pages: int, measure_from: float):
    first = workload.first_measured(measure_from)
    hits = workload.hit_tokens(bound.hit_pages(pages)[first:], first).sum()
    return report.ratio(int(hits), int(workload.input_tokens[first:].sum()))
