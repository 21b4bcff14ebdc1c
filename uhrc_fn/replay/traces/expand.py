"""Real pages of token ids made from block ids."""

import numpy as np

from ..workload import MAX_TOKEN, Workload
from .blocks import Blocks

MAX_EXPANDED = 1 << 31  # 8 GiB of int32


def expand_blocks(name: str, blocks: Blocks, page_size: int) -> Workload:
    """Replace each block by as many distinct token ids as it holds.

    Equal ids give equal tokens, so prefixes are shared as before, but only whole
    pages count: a page that reaches into a partial last block is not cached.
    """
    block = blocks.block_tokens
    counts = blocks.weights
    if counts is None:
        counts = np.full(len(blocks.ids), block, np.int32)
    total = int(counts.sum(dtype=np.int64))
    if total > MAX_EXPANDED:
        raise ValueError(
            f"--expand-tokens would make {total} tokens, more than {MAX_EXPANDED}; "
            "use --limit."
        )
    if len(blocks.ids) and int(blocks.ids.max()) * block + block > MAX_TOKEN:
        raise ValueError(
            f"--expand-tokens: block id {blocks.ids.max()} times {block} tokens "
            "exceeds 2^31; token ids would clash."
        )
    token_starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    lengths = np.diff(token_starts[blocks.offsets])
    whole = lengths // page_size * page_size
    offsets = np.concatenate([[0], np.cumsum(whole)]).astype(np.int64)
    keys = np.empty(offsets[-1], np.int32)
    for request in range(len(lengths)):
        some = slice(blocks.offsets[request], blocks.offsets[request + 1])
        tokens = tokens_of(blocks.ids[some], counts[some], block)
        keys[offsets[request] : offsets[request + 1]] = tokens[: whole[request]]
    return Workload(
        name=name,
        page_size=page_size,
        keys=keys,
        offsets=offsets,
        input_tokens=blocks.input_tokens,
        page_tokens=page_size,
        token_unit=blocks.token_unit,
    )


def tokens_of(ids: np.ndarray, counts: np.ndarray, block: int) -> np.ndarray:
    """`counts[i]` token ids for block `ids[i]`."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return mix31(np.repeat(ids.astype(np.uint32) * np.uint32(block), counts) + within)


def mix31(x: np.ndarray) -> np.ndarray:
    """Permute [0, 2^31), so that distinct inputs stay distinct tokens."""
    mask = np.uint32(0x7FFFFFFF)
    x = x.astype(np.uint32)
    for factor, shift in ((0x7FEB352D, 15), (0x68E31DA5, 16)):
        # An odd factor and a shift onto lower bits are both invertible.
        x = (x * np.uint32(factor)) & mask
        x ^= x >> np.uint32(shift)
    return x.astype(np.int32)
