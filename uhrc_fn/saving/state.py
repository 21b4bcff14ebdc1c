"""`save` and `load`: a warm tree survives a restart."""

import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from ..debug import InvariantError, check_invariants
from ..state import CacheState
from .file import MAX_HEADER, REMEDY, Reader, SavedStateError, Writer, replacing
from .header import describe, differences, named_leaves

_MOST_DIFFERENCES = 8


def save(path: str | os.PathLike, state: Any) -> None:
    """Write a state to a file, or leave the file as it was.

    What is saved is the state as it is, with the locks, pages and slots of running
    requests. Their records (receipts, request tables) belong into the same file; where
    they end with the process, `drop_requests` after `load` gives back what they held.
    A tree names pages of the pools: save both together, between two steps.

    Args:
      path: the file. It is replaced as a whole, by way of a temporary file beside it,
        and only its owner may read it: it holds the token ids of prompts.
      state: a `CacheState`, or any pytree of arrays: a stack of caches, `(cache,
        pools)`, a `ServeState`. Arrays may be sharded over the devices of this process.

    Raises:
      ValueError: a leaf is no array, or lies on devices of other processes, or a
        static setting is nothing that can be compared later.
      OSError: the file cannot be written.
    """
    header, arrays = describe(state), named_leaves(state)
    if len(header) > MAX_HEADER:
        raise ValueError(
            f"the state has a header of {len(header)} bytes; wanted at most "
            f"{MAX_HEADER}. Save fewer arrays in one file."
        )
    for name, leaf in arrays:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"{name} lies on devices of several processes; wanted only this one's. "
                "Save each process's own ranks, or gather the array first."
            )
    with replacing(pathlib.Path(path)) as file:
        writer = Writer(file, header)
        for _, leaf in arrays:
            writer.array(np.asarray(leaf))


def load[State](path: str | os.PathLike, like: State, *, check: bool = False) -> State:
    """Read a state that `save` wrote.

    Args:
      path: the file.
      like: what is wanted: a state of the same structure, settings and shapes. Its
        contents do not matter and do not change: `init(config)`, fresh pools, or
        without their memory `jax.eval_shape(lambda: init(config))`.
      check: run `check_invariants` on each cache in it, on the host.

    Returns:
      A state as it was saved, bit for bit, each array placed as that of `like`.

    Raises:
      SavedStateError: the file is damaged, no saved state, of another format version,
        or of other settings or shapes, each of which is named.
      ValueError: `like` is no pytree of arrays.
      OSError: the file cannot be read.
    """
    wanted, arrays = describe(like), named_leaves(like)
    with open(path, "rb") as file:
        reader = Reader(file, path)
        header = reader.header()
        if header != wanted:
            raise _mismatch(path, differences(header, wanted))
        reader.expect_arrays([_num_bytes(leaf) for _, leaf in arrays])
        leaves = [
            _placed(reader.array(name, leaf.shape, leaf.dtype), leaf)
            for name, leaf in arrays
        ]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    if check:
        _check(path, state)
    return state


def _mismatch(path, found: list[str]) -> SavedStateError:
    told = found[:_MOST_DIFFERENCES]
    if len(found) > len(told):
        told.append(f"and {len(found) - len(told)} more differences")
    return SavedStateError(
        f"{path} was saved with other settings: {'; '.join(told)}. Load it with those "
        "that it was saved with, or start with an empty cache."
    )


def _check(path, state) -> None:
    is_cache = lambda x: isinstance(x, CacheState)
    for cache in filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache)):
        try:
            check_invariants(cache)
        except InvariantError as error:
            raise SavedStateError(
                f"{path} holds a cache that was broken when it was saved: {error} "
                f"{REMEDY}"
            ) from error


def _placed(array: np.ndarray, like) -> Any:
    """An array where that of `like` lies; NumPy's stays NumPy's."""
    if isinstance(like, np.ndarray | np.generic):
        return array
    # Pinned to its devices only where the other one is.
    is_pinned = like.committed if isinstance(like, jax.Array) else True
    sharding = getattr(like, "sharding", None) if is_pinned else None
    return jax.device_put(array, sharding, may_alias=False)


def _num_bytes(leaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
