"""The live table, and the same table at the end."""

import contextlib
import sys
import time
from collections.abc import Iterator

from ...replay.report import print_table
from ..engine import Engine
from .audit import Holding, holdings
from .driving import Served
from .figures import Figures

try:
    import rich.live
    import rich.table
except ImportError:  # rich comes with the extra `replay`; plain text does without
    rich = None

HEADER = ["", "with cache", "without"]
# Looking at the pools costs a read of the device: not after every step.
_LOOK_EVERY_S = 0.5


class Board:
    """Shows how a demo goes: a table that changes, on a terminal; else a line a phase.

    It writes to stderr.
    """

    def __init__(self, figures: Figures):
        self.figures = figures
        self._engine: Engine | None = None
        self._holdings: list[Holding] = []
        self._done = 0
        self._looked_at = 0.0
        self._live = None

    def __enter__(self) -> "Board":
        if rich is not None and sys.stderr.isatty():
            console = rich.console.Console(stderr=True)
            self._live = rich.live.Live(console=console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextlib.contextmanager
    def phase(self, name: str, engine: Engine | None = None) -> Iterator[None]:
        """Announce what happens in the block, and whose pools to show meanwhile."""
        self._engine, self._done = engine or self._engine, 0
        self._name, start = name, time.perf_counter()
        self._show()
        yield
        self._say(f"{name}: {time.perf_counter() - start:.1f} s")

    def step(self, ended: list[Served]) -> None:
        """Take note of requests that ended."""
        self._done += len(ended)
        if time.perf_counter() - self._looked_at > _LOOK_EVERY_S:
            self._show()

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _show(self) -> None:
        self._looked_at = time.perf_counter()
        if self._live is None or rich is None:
            return
        if self._engine is not None:
            self._holdings = holdings(self._engine)
        table = rich.table.Table(title=f"{self._name} ({self._done} done)")
        for position, name in enumerate(HEADER):
            table.add_column(name, justify="right" if position else "left")
        for row in rows(self.figures, self._engine, self._holdings):
            table.add_row(*row)
        self._live.update(table, refresh=True)


def print_figures(figures: Figures, engine: Engine, file) -> None:
    """The table of a demo that is done."""
    title = f"{figures.family}: {figures.num_requests} requests"
    print_table(title, HEADER, rows(figures, engine, holdings(engine)), file)


def rows(
    figures: Figures, engine: Engine | None, held: list[Holding]
) -> list[list[str]]:
    """What is known so far."""
    ratio = figures.hit_ratio or (engine.stats.hit_ratio if engine else 0.0)
    ttft = figures.ttft_ms() if figures.alone_no_cache else None
    unshared = figures.unshared_tokens_per_s() if figures.unshared else None
    rates = (figures.tokens_per_s, figures.tokens_per_s_no_cache)
    table = [["hit ratio, side by side", f"{ratio:.4f}", ""]]
    table.append(["hit ratio, one at a time", _known(figures.hit_ratio_alone), ""])
    for name, share in figures.served_ratio.items():
        table.append([f"  {name} by itself", f"{share:.4f}", ""])
    table.append(["TTFT p50 of hits, ms", *_pair(ttft, ".1f")])
    table.append(["tokens/s, conversations", *_pair(rates, ",.0f")])
    table.append(["tokens/s, nothing shared", *_pair(unshared, ",.0f")])
    for holding in held:
        table.append([f"{_unit(holding)} in use", _in_use(holding), ""])
    retractions = engine.stats.retractions if engine else 0
    table.append(["retractions", str(figures.retractions or retractions), ""])
    return table


def _unit(holding: Holding) -> str:
    if holding.name == "RECURRENT":
        return "slots"
    return f"{holding.name} pages"


def _in_use(holding: Holding) -> str:
    return (
        f"{holding.tree:,} tree + {holding.requests:,} requests of {holding.capacity:,}"
    )


def _pair(values: tuple[float, float] | None, form: str) -> list[str]:
    if values is None:
        return ["", ""]
    return [f"{value:{form}}" if value else "" for value in values]


def _known(ratio: float) -> str:
    return f"{ratio:.4f}" if ratio else ""
