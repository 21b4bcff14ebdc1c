"""Block traces: each request is a list of block ids, each id worth some tokens."""

import dataclasses
import pathlib
from collections.abc import Iterable

import numpy as np

from ..workload import MAX_TOKEN, Workload
from .reading import Line, TraceError, parse_lines

MOONCAKE_BLOCK = 512
RAGPULSE_BLOCK = 512
MAGAGENT_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Requests as block ids: `ids` and `weights` are flat, `offsets` bounds each."""

    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None  # tokens of each block; None: `block_tokens` each
    input_tokens: np.ndarray
    block_tokens: int
    token_unit: str = "token"

    def workload(self, name: str) -> Workload:
        """One page a block, its id as the key token; a partial last block may hit."""
        return Workload(
            name=name,
            page_size=1,
            keys=self.ids,
            offsets=self.offsets,
            weights=self.weights,
            input_tokens=self.input_tokens,
            page_tokens=self.block_tokens,
            token_unit=self.token_unit,
        )


def gather(rows: Iterable[tuple[list, list | None, int]], **static) -> Blocks:
    """Flatten rows of (ids, weights or None, input tokens)."""
    rows = list(rows)
    lengths = np.fromiter((len(ids) for ids, _, _ in rows), np.int64, len(rows))
    total = int(lengths.sum())

    def flat(column):
        return np.fromiter((x for row in rows for x in row[column]), np.int32, total)

    has_weights = bool(rows) and rows[0][1] is not None
    return Blocks(
        ids=flat(0),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        weights=flat(1) if has_weights else None,
        input_tokens=np.array([row[2] for row in rows], np.int64),
        **static,
    )


def cut_weights(line: Line, num_ids: int, length: int, block: int) -> list[int]:
    """Tokens of each block of a prompt cut into blocks, the last one partial."""
    wanted = -(-length // block)
    line.require(
        num_ids == wanted,
        f"{num_ids} block ids for an input of {length}, wanted {wanted} "
        f"(blocks of {block})",
    )
    return [block] * (wanted - 1) + [length - block * (wanted - 1)] * (wanted > 0)


def read_mooncake(path: pathlib.Path, limit: int | None, **_) -> Blocks:
    """Rows in file order: timestamps are shared by batches, ties keep their order."""

    def rows():
        for count, line in enumerate(parse_lines(path)):
            if count == limit:
                return
            line.get("timestamp", float)
            length = line.get("input_length", int, 0)
            ids = line.ids(line.get("hash_ids", list))
            yield ids, cut_weights(line, len(ids), length, MOONCAKE_BLOCK), length

    return gather(rows(), block_tokens=MOONCAKE_BLOCK)


def read_ragpulse(
    path: pathlib.Path, limit: int | None, block_weights: str, **_
) -> Blocks:
    """Rows by timestamp (stable). Ids name content; the tree adds the parent.

    A request's input is the sum of its block weights, as in the published curves; the
    6 to 12 tokens of a prompt that belong to no chunk are not counted.
    """
    chunk_tokens = read_chunk_tokens(path) if block_weights == "chunk" else None
    rows = []
    for line in parse_lines(path):
        time = line.get("timestamp", float)
        length = line.get("input_length", int, 0)
        ids = line.ids(line.get("hash_ids", list))
        if chunk_tokens is None:
            # Round half up, as the published curves do.
            each = (2 * length + len(ids)) // (2 * len(ids)) if ids else 0
            weights = [min(RAGPULSE_BLOCK, each)] * len(ids)
        else:
            unknown = [i for i in ids if i >= len(chunk_tokens)]
            line.require(
                not unknown,
                f"block id {unknown[:1]} has no entry in the token-count file "
                f"({len(chunk_tokens)} entries)",
            )
            weights = [chunk_tokens[i] for i in ids]
        rows.append((time, ids, weights, sum(weights)))
    rows.sort(key=lambda row: row[0])
    return gather((row[1:] for row in rows[:limit]), block_tokens=RAGPULSE_BLOCK)


def read_chunk_tokens(trace: pathlib.Path) -> list[int]:
    """Token counts by block id, from `<trace>_block_tokens.json` beside the trace."""
    stem = trace.name.removesuffix(".gz").removesuffix(".jsonl")
    names = [f"{stem}_block_tokens.json.gz", f"{stem}_block_tokens.json"]
    for name in names:
        path = trace.with_name(name)
        if path.exists():
            line = next(parse_lines(path), None)
            if line is None:
                raise TraceError(f"{path}: the file is empty.")
            counts = line.ids(line.value)
            return counts
    raise TraceError(
        f"{trace}: chunk weights need the token counts in {' or '.join(names)} beside "
        "it; add that file or use --block-weights published."
    )


def read_magagent(path: pathlib.Path, limit: int | None, **_) -> Blocks:
    """Rows `[t_ms, session, in_bytes, out_bytes, [start, count, ...]]`, file order."""

    def rows():
        for count, line in enumerate(parse_lines(path)):
            if count == limit:
                return
            line.field(line.value, 0, float)
            length = line.field(line.value, 2, int, 0)
            ids = decode_ranges(line, line.field(line.value, 4, list))
            yield ids, cut_weights(line, len(ids), length, MAGAGENT_BLOCK), length

    return gather(rows(), block_tokens=MAGAGENT_BLOCK, token_unit="byte")


def check_ranges(line: Line, ranges: list) -> None:
    """Check a list `[start, count, ...]` of id ranges."""
    line.ids(ranges)
    line.require(len(ranges) % 2 == 0, "id ranges are not pairs of start and count")
    end = max(map(sum, zip(ranges[::2], ranges[1::2], strict=True)), default=0)
    line.require(end - 1 <= MAX_TOKEN, f"block id {end - 1} is outside [0, 2^31)")


def decode_ranges(line: Line, ranges: list) -> list[int]:
    check_ranges(line, ranges)
    total = sum(ranges[1::2])
    line.require(total < 1 << 26, f"id ranges name {total} blocks in one request")
    pairs = zip(ranges[::2], ranges[1::2], strict=True)
    return [i for start, count in pairs for i in range(start, start + count)]
