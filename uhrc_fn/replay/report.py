"""What the user sees: a progress bar on stderr, a table, and JSON."""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .records import ReplayProgress, ReplayResult
from .workload import Workload

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:  # rich comes with the extra `replay`; plain text does without
    rich = None


def summarize(
    workload: Workload,
    result: ReplayResult,
    ideal_hit_pages: np.ndarray,
    capacity_pages: int,
    measure_from: float,
) -> dict[str, int | float]:
    """The figures of one replay, over the measured requests.

    A page counts for its tokens. Evicted pages, and inserted ones where a request
    found no room for all of its pages, count for as many as the mean missed page.
    `wall_s` and `requests_per_s` cover the warm-up requests too.
    """
    first = workload.first_measured(measure_from)
    input_tokens = int(workload.input_tokens[first:].sum())
    hit_tokens = int(workload.hit_tokens(result.hit_pages[first:], first).sum())
    pages = np.diff(workload.page_offsets[first:])
    page_tokens = int(workload.hit_tokens(pages, first).sum())
    missed_pages = int(pages.sum() - result.hit_pages[first:].sum(dtype=np.int64))
    missed_mean = ratio(page_tokens - hit_tokens, missed_pages)
    ideal_tokens = int(workload.hit_tokens(ideal_hit_pages[first:], first).sum())
    return {
        "requests": workload.num_requests - first,
        "input_tokens": input_tokens,
        "hit_tokens": hit_tokens,
        "hit_ratio": ratio(hit_tokens, input_tokens),
        "ideal_hit_ratio": ratio(ideal_tokens, input_tokens),
        "evicted_tokens": round(int(result.evicted_pages) * missed_mean),
        "inserted_tokens": round(int(result.inserted_pages) * missed_mean),
        "capacity_tokens": capacity_pages * workload.page_tokens,
        "wall_s": float(result.wall_s),
        "compile_s": float(result.compile_s),
        "requests_per_s": ratio(workload.num_requests, result.wall_s),
    }


class Point(NamedTuple):
    """One replay of several, as tables and plots show it."""

    part: float
    """Capacity as a fraction of the unique pages."""
    pages: int
    window: int
    figures: dict[str, int | float]
    belady: float
    """Hit ratio of the offline optimum at this capacity; 0 where nobody asked."""


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def write_json(target: str, figures: object) -> None:
    """Write to a path, or to stdout for `-`."""
    text = json.dumps(figures, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(target).write_text(text)


class RunningRatio:
    """Hit ratio of the measured requests so far."""

    def __init__(self, workload: Workload, measure_from: float):
        self.workload = workload
        self.first = workload.first_measured(measure_from)
        self.input_before = np.concatenate([[0], np.cumsum(workload.input_tokens)])
        self.hit_tokens = 0

    def update(self, progress: ReplayProgress) -> float:
        start = progress.done - len(progress.hit_pages)
        skip = min(max(self.first - start, 0), len(progress.hit_pages))
        hits = np.asarray(progress.hit_pages)[skip:]
        self.hit_tokens += int(self.workload.hit_tokens(hits, start + skip).sum())
        measured = self.input_before[max(progress.done, self.first)]
        return ratio(self.hit_tokens, measured - self.input_before[self.first])


class RunningRate:
    """Requests a second since the first call, before which there is set-up.

    That call has the requests of a progress file, or of the first chunk.
    """

    def __init__(self):
        self.first: tuple[int, float] | None = None

    def update(self, progress: ReplayProgress) -> float:
        now = time.perf_counter()
        self.first = self.first or (progress.done, now)
        return ratio(progress.done - self.first[0], now - self.first[1])


@contextlib.contextmanager
def progress_bar(
    workload: Workload, measure_from: float, label: str
) -> Iterator[Callable[[ReplayProgress], None] | None]:
    """Yield a callback for the replay; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    running = RunningRatio(workload, measure_from)
    if rich is None:
        yield plain_progress(workload.num_requests, running, label)
        sys.stderr.write("\n")
        return
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn(
            "{task.fields[rate]:,.0f} requests/s, hit ratio {task.fields[ratio]:.4f}"
        ),
        rich.progress.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
    ) as bar:
        task = bar.add_task(label, total=workload.num_requests, rate=0.0, ratio=0.0)
        speed = RunningRate()

        def show(progress: ReplayProgress) -> None:
            bar.update(
                task,
                completed=progress.done,
                rate=speed.update(progress),
                ratio=running.update(progress),
            )

        yield show


def plain_progress(total: int, running: RunningRatio, label: str):
    speed = RunningRate()

    def show(progress: ReplayProgress) -> None:
        sys.stderr.write(
            f"\r{label} {progress.done}/{total}, "
            f"{speed.update(progress):,.0f} requests/s, "
            f"hit ratio {running.update(progress):.4f} "
        )
        sys.stderr.flush()

    return show


def print_table(title: str, header: list[str], rows: list[list[str]], file) -> None:
    """A table whose first column is text and whose others are figures."""
    if rich is not None:
        table = rich.table.Table(title=title, title_justify="left")
        for position, name in enumerate(header):
            table.add_column(name, justify="right" if position else "left")
        for row in rows:
            table.add_row(*row)
        # Without a terminal rich would wrap at 80 columns and cut figures.
        width = None if file.isatty() else 160
        rich.console.Console(file=file, width=width).print(table)
        return
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(title, file=file)
    for line in lines:
        first = line[0].ljust(widths[0])
        rest = [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([first, *rest]).rstrip(), file=file)


def print_summary(workload: Workload, figures: dict, unique_pages: int, file) -> None:
    """The table of one replay."""
    unit = f"{workload.token_unit}s"
    rows = [
        ["requests measured", f"{figures['requests']:,} of {workload.num_requests:,}"],
        [f"input {unit}", f"{figures['input_tokens']:,}"],
        [f"hit {unit}", f"{figures['hit_tokens']:,}"],
        ["hit ratio", f"{figures['hit_ratio']:.4f}"],
        ["ideal hit ratio (no capacity)", f"{figures['ideal_hit_ratio']:.4f}"],
        [f"evicted {unit}", f"{figures['evicted_tokens']:,}"],
        [f"inserted {unit}", f"{figures['inserted_tokens']:,}"],
        [f"capacity, {unit}", f"{figures['capacity_tokens']:,}"],
        ["unique pages in the trace", f"{unique_pages:,}"],
        ["wall time, s", f"{figures['wall_s']:.3f}"],
        ["compile time, s", f"{figures['compile_s']:.3f}"],
        ["requests/s", f"{figures['requests_per_s']:,.0f}"],
    ]
    title = f"{workload.name}, pages of {workload.page_tokens} {unit}"
    print_table(title, ["", "value"], rows, file)


def print_sweep(workload: Workload, points: list[Point], file) -> None:
    """The table of a sweep: one row a capacity."""
    header = ["capacity, pages", "of unique", "hit ratio", "Belady", "ideal"]
    header += [f"evicted {workload.token_unit}s", "wall s", "requests/s"]
    rows = [
        [
            f"{point.pages:,}",
            f"{point.part:.2%}",
            f"{point.figures['hit_ratio']:.4f}",
            f"{point.belady:.4f}",
            *_last_cells(point),
        ]
        for point in points
    ]
    print_table(_measured_title(workload, points), header, rows, file)


def print_windows(workload: Workload, points: list[Point], file) -> None:
    """The table of several windows: one row each."""
    header = [f"window, {workload.token_unit}s", "hit ratio", "ideal"]
    header += [f"evicted {workload.token_unit}s", "wall s", "requests/s"]
    rows = [
        [f"{p.window:,}", f"{p.figures['hit_ratio']:.4f}", *_last_cells(p)]
        for p in points
    ]
    print_table(_measured_title(workload, points), header, rows, file)


def _last_cells(point: Point) -> list[str]:
    return [
        f"{point.figures['ideal_hit_ratio']:.4f}",
        f"{point.figures['evicted_tokens']:,}",
        f"{point.figures['wall_s']:.3f}",
        f"{point.figures['requests_per_s']:,.0f}",
    ]


def _measured_title(workload: Workload, points: list[Point]) -> str:
    measured = points[0].figures["requests"]
    total = f"{workload.num_requests:,} requests measured"
    return f"{workload.name}, {measured:,} of {total}"
