"""Calls of the core with one array in and one array out.

An array that goes to a program costs a transfer, one that comes back a wait: together
several times what a match computes. So a key and the scalars beside it are one vector
of words, and so is what the host reads of a result.
"""

import dataclasses
import functools
import struct
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import params as core
from ..config import CacheConfig, ComponentType
from ..keys import namespace
from ..ops.insert import insert as _insert
from ..ops.match import match_prefix as _match_prefix
from ..ops.match import peek_prefix_len as _peek_prefix_len
from ..state import CacheState
from ..tree_arrays import VALUE, TreeArrays, take
from .params import RadixKey

# First words: length of the key, namespace, scalars of an insert. Tokens follow, and
# of an insert its pages, a row a pool.
_NAMESPACE = slice(1, 5)
PREV_PREFIX_LEN, SWA_EVICTED_SEQLEN, RECURRENT_VALUE = 5, 6, 7
_HEAD = 8
MATCH_SCALARS = 11


class Words(NamedTuple):
    """A key on the host, as a program takes it."""

    words: np.ndarray
    num_pages: int
    """Static page count."""
    length: int
    """Tokens of the key."""
    rows: int
    """Rows of pages behind the tokens."""

    def row(self, place: int) -> np.ndarray:
        """Row of pages: a view to be written, zeros so far."""
        start = len(self.words) - (self.rows - place) * self.num_pages
        return self.words[start : start + self.num_pages]


def pack_key(
    key: RadixKey, count: int, config: CacheConfig, num_pages: int, rows: int = 0
) -> Words:
    """Make a key's words.

    Args:
      key: a list goes in at less than half the cost of a NumPy array made of it, and is
        read once a key; a NumPy array is copied.
      count: tokens of it that go in, whole pages.
      config: gives the page size.
      num_pages: static page count.
      rows: rows of pages that an insert brings; 0 for a match.

    Raises:
      ValueError: tokens are no flat sequence of ids in [0, 2^31).
    """
    words = _zeros(_HEAD + num_pages * (config.page_size + rows))
    words[0] = count
    if key.extra_key is not None or key.cache_salt is not None:
        words[_NAMESPACE] = namespace(key.extra_key, key.cache_salt)
    ids = words[_HEAD : _HEAD + count]
    known = key.known_ids
    if known is not None and len(known) >= count:
        ids[:] = known[:count]
        return Words(words, num_pages, count, rows)
    tokens = key.token_ids
    if count != len(tokens):
        tokens = tokens[:count]
    if isinstance(tokens, list | tuple):
        try:
            _packer(count).pack_into(words, 4 * _HEAD, *tokens)
        except (struct.error, OverflowError):
            _copy_ids(np.asarray(tokens), ids)  # which says what is wrong
    else:
        _copy_ids(np.asarray(tokens), ids)
    if ids.size and ids.min() < 0:
        _refuse_id(ids[ids < 0][0])
    key.remember(ids)
    return Words(words, num_pages, count, rows)


def _zeros(count: int) -> np.ndarray:
    """Zeros that start a cache line: XLA for CPU reads such in place, copies others."""
    spare = np.zeros(count + _LINE // 4, np.int32)
    start = -spare.ctypes.data % _LINE // 4
    return spare[start : start + count]


_LINE = 64


@functools.lru_cache(maxsize=1024)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"{count}i")


def _copy_ids(tokens: np.ndarray, ids: np.ndarray) -> None:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"token_ids is {tokens.dtype}{list(tokens.shape)}; wanted a flat sequence "
            "of integers. Pass one prompt at a time."
        )
    if tokens.dtype != np.int32 and tokens.size and tokens.max() >= 1 << 31:
        _refuse_id(tokens.max())
    if tokens.dtype != np.int32 and tokens.size and tokens.min() < 0:
        _refuse_id(tokens.min())
    ids[:] = tokens


def _refuse_id(bad: Any) -> None:
    raise ValueError(
        f"token_ids holds {bad}; wanted ids in [0, 2^31). Check the tokenizer."
    )


def match_prefix(state: CacheState, words: np.ndarray, full_only: bool):
    """Match; returns ``(state, scalars, FULL pages, path, SWA pages)``, the last four
    one array.

    Only the arrays that a match reads or writes go to the program: each of the others
    would cost about two microseconds each way.
    """
    tree = state.tree
    fields, counters, seen = _match_program(state.config, full_only)(
        tree.fields, state.counters, tree.tokens, tree.table, words
    )
    # Its buffers are gone, so the old record would be of no use to anybody: to change
    # it costs a tenth of making a new one.
    object.__setattr__(tree, "fields", fields)
    object.__setattr__(state, "counters", counters)
    return state, seen


@functools.lru_cache(maxsize=256)
def _match_program(config: CacheConfig, full_only: bool):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def match(fields, counters, tokens, table, words):
        state = _partial_state(config, fields, counters, tokens, table)
        key = _key(words, config, 0)
        params = core.MatchPrefixParams(key=key, full_only=full_only)
        state, found = _match_prefix(state, params)
        seen = [found.scalars, found.device_indices, found.path]
        if config.has_swa:
            place = VALUE + ComponentType.SWA
            held = take(state.tree.fields, place, jnp.maximum(found.path, 0))
            seen.append(jnp.where(found.path > 0, jnp.maximum(held, 0), 0))
        return state.tree.fields, state.counters, jnp.concatenate(seen)

    return match


def peek_prefix_len(state: CacheState, words: np.ndarray):
    """Peek; returns the scalars of the match."""
    tree = state.tree
    return _peek_program(state.config)(
        tree.fields, state.counters, tree.tokens, tree.table, words
    )


@functools.lru_cache(maxsize=256)
def _peek_program(config: CacheConfig):
    @jax.jit
    def peek(fields, counters, tokens, table, words):
        state = _partial_state(config, fields, counters, tokens, table)
        return _peek_prefix_len(state, _key(words, config, 0)).scalars

    return peek


def _partial_state(config, fields, counters, tokens, table) -> CacheState:
    """A state of what a match touches; the rest is not there."""
    gone: Any = None
    return CacheState(
        tree=TreeArrays(fields=fields, tokens=tokens, table=table),
        free_ids=gone,
        owner=gone,
        ledger=gone,
        victim_plan=gone,
        counters=counters,
        config=config,
    )


def insert(state: CacheState, words: np.ndarray):
    """Insert; returns ``(state, scalars)``. As above, only what it touches goes in."""
    tree = state.tree
    held = tree.fields, tree.tokens, tree.table, state.owner, state.counters
    held, scalars = _insert_program(state.config)(held, state.free_ids, words)
    for name, array in zip(("fields", "tokens", "table"), held[:3], strict=True):
        object.__setattr__(tree, name, array)
    object.__setattr__(state, "owner", held[3])
    object.__setattr__(state, "counters", held[4])
    return state, scalars


@functools.lru_cache(maxsize=256)
def _insert_program(config: CacheConfig):
    @functools.partial(jax.jit, donate_argnums=0)
    def insert(held, free_ids, words):
        fields, tokens, table, owner, counters = held
        state = dataclasses.replace(
            _partial_state(config, fields, counters, tokens, table),
            free_ids=free_ids,
            owner=owner,
        )
        state, result = _insert(state, _insert_params(config, words))
        tree = state.tree
        held = tree.fields, tree.tokens, tree.table, state.owner, state.counters
        return held, result.scalars

    return insert


def _insert_params(config: CacheConfig, words: Any) -> core.InsertParams:
    rows = 1 + config.has_swa
    key = _key(words, config, rows)
    num_pages = len(key.token_ids) // config.page_size
    pages = words[_HEAD + len(key.token_ids) :].reshape(rows, num_pages)
    others: dict[str, Any] = {}
    if config.has_swa:
        others["swa_value"] = pages[1]
        others["swa_evicted_seqlen"] = words[SWA_EVICTED_SEQLEN]
    if config.has_recurrent:
        others["recurrent_value"] = words[RECURRENT_VALUE]
        others["recurrent_length"] = key.length
    return core.InsertParams(
        key=key, value=pages[0], prev_prefix_len=words[PREV_PREFIX_LEN], **others
    )


def _key(words: Any, config: CacheConfig, rows: int) -> core.RadixKey:
    """A key of the core; `rows` rows of pages follow its tokens."""
    num_pages = (len(words) - _HEAD) // (config.page_size + rows)
    return core.RadixKey(
        token_ids=words[_HEAD : _HEAD + num_pages * config.page_size],
        length=words[0],
        namespace=words[_NAMESPACE],
    )
