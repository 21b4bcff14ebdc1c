"""Block traces with their times of arrival, for `dp_routing.py`."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np

from uhrc_fn.replay import Workload, load_trace, prefix_nodes
from uhrc_fn.replay.traces import recognise
from uhrc_fn.replay.traces.reading import parse_lines


class Trace(NamedTuple):
    """A workload with what a replay leaves out: arrivals and answers."""

    workload: Workload
    seconds: np.ndarray
    output_tokens: np.ndarray


def read_trace(path: Path, limit: int | None, speed: float, page_tokens: int) -> Trace:
    """Read a trace; the order of the requests is that of `load_trace`."""
    rows = [(line.value, line) for line in parse_lines(path)]
    if recognise(path) == "mooncake":
        rows = [(r["timestamp"] / 1000, r["output_length"]) for r, _ in rows]
    elif recognise(path) == "claude code":
        rows = [(r[0], r[3]) for session, _ in rows for r in session["reqs"]]
        rows.sort(key=lambda row: row[0])
    else:
        raise SystemExit(f"{path}: wanted a Mooncake or a Claude Code trace.")
    seconds, outputs = zip(*rows[:limit], strict=True)
    workload = merge_blocks(load_trace(path, limit=limit), page_tokens)
    return Trace(workload, np.array(seconds) / speed, np.array(outputs))


def merge_blocks(workload: Workload, page_tokens: int) -> Workload:
    """Make pages of whole blocks, each named by its whole prefix."""
    blocks, rest = divmod(page_tokens, workload.page_tokens)
    if rest or not blocks or (blocks > 1 and workload.weights is not None):
        raise SystemExit(
            f"--page-tokens {page_tokens}: wanted a multiple of the trace's block of "
            f"{workload.page_tokens}, or that itself where last blocks are partial."
        )
    if blocks == 1:
        return workload
    nodes = prefix_nodes(workload).nodes
    lengths = np.diff(workload.offsets) // blocks
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    shift = np.repeat(workload.offsets[:-1] - offsets[:-1] * blocks, lengths)
    last = np.arange(offsets[-1]) * blocks + blocks - 1 + shift
    return dataclasses.replace(
        workload, keys=nodes[last], offsets=offsets, page_tokens=page_tokens
    )
