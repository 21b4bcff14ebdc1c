"""The command: check the options, run, report."""

import pathlib
import random
import sys

from ...replay.plot import check_plot
from ...replay.report import write_json
from ...replay.traces import TraceError
from .arguments import parser
from .figures import Figures
from .plot import plot_figures
from .run import compare
from .setting import Setting, make_setting
from .table import Board, print_figures
from .workload import (
    ANSWER_TOKENS,
    NUM_CONVERSATIONS,
    NUM_TRACE_REQUESTS,
    Turn,
    conversations,
    trace_requests,
)

FAILED, BAD_INPUT = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    arguments = parser().parse_args(argv)
    try:
        check_outputs(arguments)
        turns = load(arguments)
        longest = max(turn.longest_prompt for turn in turns) + ANSWER_TOKENS
        setting = make_setting(arguments, longest)
    except (TraceError, ValueError, ModuleNotFoundError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return run(arguments, setting, turns)


def check_outputs(arguments) -> None:
    """Find out before the run what would fail after it."""
    if arguments.plot:
        check_plot(arguments.plot)
    for option in ("json", "plot"):
        target = getattr(arguments, option)
        if target and target != "-" and not pathlib.Path(target).parent.is_dir():
            raise ValueError(f"--{option} {target}: there is no such folder.")


def load(arguments) -> list[Turn]:
    """What to serve."""
    if arguments.trace != "builtin":
        return trace_requests(arguments.trace, arguments.limit or NUM_TRACE_REQUESTS)
    dice = random.Random(arguments.seed)
    return conversations(arguments.limit or NUM_CONVERSATIONS, dice)


def run(arguments, setting: Setting, turns: list[Turn]) -> int:
    """Compare, report, and say by the exit code whether the cache kept its word."""
    with Board(Figures(arguments.family, 0)) as board:
        figures, engine = compare(setting, turns, arguments.family, board)
    # With the JSON on stdout the table would spoil it.
    file = sys.stderr if arguments.json == "-" else sys.stdout
    print_figures(figures, engine, file)
    if arguments.json:
        write_json(arguments.json, figures.as_json())
    if arguments.plot:
        plot_figures(arguments.plot, figures)
    problems = find_problems(figures)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print("outputs with and without the cache are identical", file=file)
    return FAILED if problems else 0


def find_problems(figures: Figures) -> list[str]:
    """A sentence for each promise that was not kept."""
    problems = []
    if figures.num_differing:
        problems.append(
            f"{figures.num_differing} outputs differ with and without the cache; "
            "wanted none."
        )
    if figures.leaked_pages or figures.leaked_slots:
        problems.append(
            f"{figures.leaked_pages} pages and {figures.leaked_slots} slots are "
            "neither free nor in the tree at the end; wanted none."
        )
    return problems
