"""Claude Code sessions: delta-coded block ids, 94 million of them in the public set."""

import itertools
import pathlib

import numpy as np

from ..workload import MAX_TOKEN
from .blocks import Blocks, check_ranges
from .reading import Line, TraceError, parse_lines

BLOCK = 64


def read_claude_code(path: pathlib.Path, limit: int | None, **_) -> Blocks:
    """Requests of all sessions by time since their session's start (stable).

    Ids are local to a session; a per-session offset makes them global. Only the
    requests that `limit` keeps are decoded, straight into one flat array.
    """
    times, lengths, inputs, rows = [], [], [], []
    next_id = 0
    for line in parse_lines(path):
        session_times = []
        previous = None
        highest = -1
        for row in line.get("reqs", list):
            time, length, tokens = check_row(line, row, previous)
            session_times.append(time)
            lengths.append(length)
            inputs.append(tokens)
            rows.append((len(rows) - 1 if previous is not None else -1, next_id, row))
            previous = length
            pairs = zip(row[5][::2], row[5][1::2], strict=True)
            highest = max(highest, max((s + c - 1 for s, c in pairs), default=-1))
        line.require(
            all(a <= b for a, b in itertools.pairwise(session_times)),
            "the requests of a session are not in order of time",
        )
        times += session_times
        next_id += highest + 1
        line.require(next_id <= MAX_TOKEN, "the sessions need more than 2^31 block ids")
    order = np.argsort(np.array(times), kind="stable")[:limit]
    return decode(path, rows, np.array(lengths, np.int64), np.array(inputs), order)


def check_row(line: Line, row: list, previous: int | None) -> tuple[float, int, int]:
    """Check `[t, group, in, out, k, ranges]`; return its time, blocks and tokens."""
    time = line.field(row, 0, float)
    tokens = line.field(row, 2, int, 0)
    shared = line.field(row, 4, int, 0)
    ranges = line.field(row, 5, list)
    check_ranges(line, ranges)
    line.require(
        shared <= (previous or 0),
        f"a request shares {shared} blocks with the one before, which has "
        f"{previous or 0}",
    )
    length = shared + sum(ranges[1::2])
    line.require(
        length == tokens // BLOCK,
        f"a request has {length} block ids for {tokens} input tokens, wanted "
        f"{tokens // BLOCK} (full blocks of {BLOCK})",
    )
    return time, length, tokens


def decode(path, rows, lengths, inputs, order) -> Blocks:
    """Write the ids of the requests in `order`; a session's requests stay in order."""
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    try:
        ids = np.empty(offsets[-1], np.int32)
    except MemoryError:
        raise TraceError(
            f"{path}: {offsets[-1]} block ids do not fit in memory; use --limit."
        ) from None
    starts = dict(zip(order.tolist(), offsets.tolist(), strict=False))
    for request, start in starts.items():
        previous, base, (_, _, _, _, shared, ranges) = rows[request]
        if shared:
            source = starts[previous]
            ids[start : start + shared] = ids[source : source + shared]
        start += shared
        for first, count in zip(ranges[::2], ranges[1::2], strict=True):
            first += base
            ids[start : start + count] = np.arange(first, first + count, dtype=np.int32)
            start += count
    return Blocks(
        ids=ids,
        offsets=offsets,
        weights=None,
        input_tokens=inputs[order].astype(np.int64),
        block_tokens=BLOCK,
    )
