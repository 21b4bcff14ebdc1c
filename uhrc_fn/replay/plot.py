"""Plots of a replay; matplotlib is imported only when one is asked for."""

import importlib.util
import pathlib

import numpy as np

from .report import Point
from .workload import Workload

# A palette that stays distinct in grey and for colour-blind readers.
CACHE, BELADY, IDEAL = "#0072b2", "#d55e00", "#555555"


def check_plot(path: str) -> None:
    """Find out before a long replay that matplotlib and the file type are there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "--plot needs matplotlib, which is not installed; install it with "
            "pip install 'uhrc_fn[replay]'."
        )
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    kind = pathlib.Path(path).suffix.removeprefix(".").lower() or "png"
    if kind not in kinds:
        raise ValueError(f"--plot {path}: wanted one of .{', .'.join(sorted(kinds))}.")


def new_axes(title: str, xlabel: str):
    # The object interface leaves pyplot's global state and backend alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel="hit ratio", ylim=(0, 1))
    axes.grid(alpha=0.3)
    return figure, axes


def plot_sweep(path: str, workload: Workload, points: list[Point]) -> None:
    """Hit ratio against capacity, beside the ideal and the offline optimum."""
    points = sorted(points, key=lambda point: point.pages)
    capacities = [point.pages for point in points]
    ratios = [point.figures["hit_ratio"] for point in points]
    belady = [point.belady for point in points]
    figure, axes = new_axes(workload.name, "capacity, pages")
    draw_ideal(axes, points[0])
    axes.plot(capacities, belady, "s--", color=BELADY, label="offline optimum (Belady)")
    axes.plot(capacities, ratios, "o-", color=CACHE, label="uhrc_fn, leaf LRU")
    axes.set_xscale("log")
    axes.legend()
    figure.savefig(path, dpi=150)


def plot_windows(path: str, workload: Workload, points: list[Point]) -> None:
    """Hit ratio against the sliding window, beside the ideal of full attention."""
    points = sorted(points, key=lambda point: point.window)
    windows = [point.window for point in points]
    ratios = [point.figures["hit_ratio"] for point in points]
    figure, axes = new_axes(workload.name, f"sliding window, {workload.token_unit}s")
    draw_ideal(axes, points[0])
    axes.plot(windows, ratios, "o-", color=CACHE, label="uhrc_fn, FULL,SWA")
    axes.set_xscale("log", base=2)
    axes.set_xticks(windows, [f"{window:,}" for window in windows])
    axes.legend()
    figure.savefig(path, dpi=150)


def draw_ideal(axes, point: Point) -> None:
    """A line for what no capacity could better."""
    ideal = point.figures["ideal_hit_ratio"]
    axes.axhline(ideal, color=IDEAL, linestyle=":", label=f"ideal {ideal:.4f}")


def plot_replay(
    path: str,
    workload: Workload,
    hit_pages: np.ndarray,
    ideal_hit_pages: np.ndarray,
    measure_from: float,
) -> None:
    """Hit ratio so far, request by request over the measured part."""
    first = workload.first_measured(measure_from)
    inputs = np.maximum(np.cumsum(workload.input_tokens[first:]), 1)
    requests = np.arange(first + 1, workload.num_requests + 1)
    figure, axes = new_axes(workload.name, "requests replayed")
    for pages, line, colour, label in (
        (ideal_hit_pages, ":", IDEAL, "ideal"),
        (hit_pages, "-", CACHE, "uhrc_fn, leaf LRU"),
    ):
        so_far = np.cumsum(workload.hit_tokens(pages[first:], first)) / inputs
        axes.plot(requests, so_far, line, color=colour, label=label)
    axes.legend()
    figure.savefig(path, dpi=150)
