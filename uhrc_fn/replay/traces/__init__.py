"""Reads recorded workloads; the format is recognised from the first line."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ..tokenizing import text_workload
from ..workload import Workload
from .blocks import read_magagent, read_mooncake, read_ragpulse
from .claude_code import read_claude_code
from .expand import expand_blocks
from .reading import TraceError as TraceError
from .reading import parse_lines, read_text_lines, shorten
from .text import (
    read_gsm8k,
    read_lmcache,
    read_mtbench,
    read_tau_airline,
    read_tot_game24,
)

BLOCK_READERS: dict[str, Callable] = {
    "mooncake": read_mooncake,
    "ragpulse": read_ragpulse,
    "claude code": read_claude_code,
    "magagent": read_magagent,
}
TEXT_READERS: dict[str, Callable] = {
    "lmcache text": read_lmcache,
    "tau airline": read_tau_airline,
    "tot game24": read_tot_game24,
    "gsm8k": read_gsm8k,
    "mtbench": read_mtbench,
}
BLOCK_WEIGHTS = ("published", "chunk")
TEXT_PAGE_SIZE = 16
EXPANDED_PAGE_SIZE = 512


def load_trace(
    path: str | pathlib.Path,
    *,
    page_size: int | None = None,
    limit: int | None = None,
    expand_tokens: bool = False,
    block_weights: str = "published",
    tokenizer: Callable[[str], np.ndarray] | None = None,
) -> Workload:
    """Read a trace into a workload.

    Args:
      path: the trace, plain or `.gz`.
      page_size: key tokens a page; None: 1 for block traces (512 when expanded, or
        the block where that is smaller), 16 for text.
      limit: keep the first so many requests, after sorting by time.
      expand_tokens: make real pages of token ids from block ids.
      block_weights: RAGPulse only. `published`: a request's blocks weigh the same, as
        in its published curves; `chunk`: each block weighs its own tokens.
      tokenizer: text traces only; None means UTF-8 bytes.

    Raises:
      TraceError: the file, the line and what is wrong, in one sentence.
      ValueError: the settings do not fit the trace.
    """
    path = pathlib.Path(path)
    kind = recognise(path)
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    if kind in TEXT_READERS:
        if expand_tokens:
            raise ValueError(
                f"--expand-tokens is for block traces; {path} is text ({kind})."
            )
        workload = text_workload(
            name,
            TEXT_READERS[kind](path),
            page_size=page_size or TEXT_PAGE_SIZE,
            limit=limit,
            tokenizer=tokenizer,
        )
    else:
        if tokenizer is not None:
            raise ValueError(
                f"--tokenizer is for text traces; {path} holds block ids ({kind})."
            )
        check_block_settings(kind, path, page_size, expand_tokens, block_weights)
        blocks = BLOCK_READERS[kind](path, limit, block_weights=block_weights)
        if expand_tokens:
            size = page_size or min(EXPANDED_PAGE_SIZE, blocks.block_tokens)
            # Ragged chunks have no grid that a page could keep to.
            if kind != "ragpulse" and blocks.block_tokens % size:
                raise ValueError(
                    f"--page-size {size} does not divide the block of "
                    f"{blocks.block_tokens} tokens ({kind}); choose a divisor."
                )
            workload = expand_blocks(name, blocks, size)
        else:
            workload = blocks.workload(name)
    if workload.num_requests == 0:
        raise TraceError(f"{path}: the trace holds no requests.")
    return workload


def check_block_settings(kind, path, page_size, expand_tokens, block_weights) -> None:
    if not expand_tokens and page_size not in (None, 1):
        raise ValueError(
            f"--page-size {page_size} with a block trace ({path}, {kind}): its ids "
            "are pages already, so use --page-size 1, or add --expand-tokens."
        )
    if block_weights not in BLOCK_WEIGHTS:
        raise ValueError(f"--block-weights {block_weights!r}: wanted {BLOCK_WEIGHTS}.")
    if expand_tokens and kind == "ragpulse" and block_weights == "published":
        raise ValueError(
            "--expand-tokens with a RAGPulse trace needs --block-weights chunk: the "
            "published weights differ from request to request."
        )


def recognise(path: pathlib.Path) -> str:
    """The format of a trace, from its first line that is not blank."""
    first = next(read_text_lines(path), None)
    if first is None:
        raise TraceError(f"{path}: the file is empty.")
    _, text = first
    if text.lower().startswith("timestamp,contexttokens"):
        raise TraceError(
            f"{path}: an Azure trace has arrival times and lengths only; without "
            "prefix information there is nothing to replay."
        )
    line = next(parse_lines(path))
    kind = kind_of(line.value)
    if kind == "lengths":
        raise TraceError(
            f"{path}: the lines hold token counts only (as ShareGPT lengths do); "
            "without prefix information there is nothing to replay."
        )
    if kind is None:
        known = ", ".join([*BLOCK_READERS, *TEXT_READERS])
        line.fail(
            f"format not recognised from {shorten(line.value)}; known formats: {known}"
        )
    return kind


def kind_of(value: Any) -> str | None:
    if isinstance(value, list):
        if len(value) == 5 and isinstance(value[4], list):
            return "magagent"
        is_counts = value and all(isinstance(x, int | float) for x in value)
        return "lengths" if is_counts else None
    if not isinstance(value, dict):
        return None
    signs = [
        ("ragpulse", {"hash_ids", "seg"}),
        ("mooncake", {"hash_ids", "input_length"}),
        ("claude code", {"reqs", "id"}),
        ("lmcache text", {"reqs", "session"}),
        ("tau airline", {"system"}),
        ("tot game24", {"templates"}),
        ("gsm8k", {"question", "answer"}),
        ("mtbench", {"question_id", "turns"}),
    ]
    return next((kind for kind, keys in signs if keys <= value.keys()), None)
