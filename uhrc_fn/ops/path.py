"""Where a key stands: its pages hashed, proposed and verified in parallel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..by_platform import by_platform
from ..config import CacheConfig
from ..params import RadixKey
from ..state import flag
from ..status import Status
from ..tree_arrays import (
    IN_BOUNDS,
    NAMESPACE,
    NAMESPACE_WORDS,
    NULL,
    PARENT,
    ROOT,
    TreeArrays,
    num_rows,
    probe,
)
from .hashing import chain_hashes


class KeyPages(NamedTuple):
    """A batch of keys cut into pages, with what the children table proposes."""

    tokens: jax.Array  # [requests, pages, page_size]
    namespace: jax.Array  # [requests, 4]
    num_pages: jax.Array  # [requests] whole pages that may be used
    bucket: jax.Array  # [requests, pages]
    fingerprint: jax.Array  # [requests, pages]
    node: jax.Array  # [requests, pages] proposed node or NULL
    free_ways: jax.Array  # [requests, pages] bit mask of the bucket
    status: jax.Array  # bits met on the way


def check_key(key: RadixKey, config: CacheConfig) -> None:
    """Refuse keys of a wrong shape while tracing.

    Raises:
      ValueError: no axis of whole pages, or longer than `max_prefix_pages`.
    """
    tokens = key.token_ids
    if tokens.ndim < 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"token_ids is {tokens.dtype}{list(tokens.shape)}; wanted int32 [tokens]. "
            "Build keys with uhrc_fn.radix_key."
        )
    pages, rest = divmod(tokens.shape[-1], config.page_size)
    if rest or not 1 <= pages <= config.max_prefix_pages:
        raise ValueError(
            f"token_ids holds {tokens.shape[-1]} tokens; wanted 1 to "
            f"{config.max_prefix_pages} whole pages of {config.page_size}. "
            "Build keys with uhrc_fn.radix_key, which pads and truncates."
        )


def page_index(num_pages: int):
    """Pages 0, 1, ... as int32 [1, pages], to broadcast over requests."""
    return jnp.arange(num_pages, dtype=jnp.int32)[None]


def lane_or(x):
    """Bitwise or of each page's words into at most 8 lanes, on the last axis.

    XLA for CPU vectorises a reduction over the major of two axes, not over the minor.
    """
    lanes = 8 if x.shape[-1] % 8 == 0 else x.shape[-1]
    x = x.reshape(*x.shape[:-1], x.shape[-1] // lanes, lanes)
    return jax.lax.reduce_or(x, axes=(x.ndim - 2,))


def _any_word_default(x):
    # Two kinds of reduction, else XLA makes one of the two steps again.
    lanes = lane_or(x)
    return jnp.any(lanes != 0, axis=-1), jnp.any(lanes < 0, axis=-1)


def _any_word_tpu(x):
    x = jax.lax.reduce_or(x, axes=(x.ndim - 1,))
    return x != 0, x < 0


# Whether any word of a page (the last axis) is not zero, and whether any is negative.
any_word = by_platform(_any_word_default, tpu=_any_word_tpu)


def first_false(ok):
    """Length of the leading run of true entries, over the last axis."""
    size = ok.shape[-1]
    place = jax.lax.broadcasted_iota(jnp.int32, ok.shape, ok.ndim - 1)
    return jnp.min(jnp.where(ok, size, place), axis=-1)


def propose(tree: TreeArrays, key: RadixKey, config: CacheConfig) -> KeyPages:
    """Hash a batch of keys and look every page up at once.

    Args:
      tree: the tree.
      key: batch of keys, one leading axis.
      config: settings.
    """
    size = config.page_size
    tokens = jnp.asarray(key.token_ids, jnp.int32)
    tokens = tokens.reshape(tokens.shape[0], -1, size)
    length = jnp.asarray(key.length, jnp.int32)
    namespace = jnp.asarray(key.namespace, jnp.int32)
    most = tokens.shape[1] * size
    bad_length = (length < 0) | (length > most)
    num_pages = jnp.clip(length, 0, most) // size
    bucket, fingerprint = chain_hashes(tokens, namespace, config)
    node, free_ways = probe(tree.table, bucket, fingerprint)
    status = flag(bad_length, Status.BAD_LENGTH)
    return KeyPages(
        tokens, namespace, num_pages, bucket, fingerprint, node, free_ways, status
    )


class Reading(NamedTuple):
    """What the proposed nodes of a path hold, beside what the key wants."""

    node: jax.Array  # [requests, pages] or NULL
    ok: jax.Array  # [requests, pages] same tokens and parent, within the key
    bad_token: jax.Array  # [requests, pages] an id outside [0, 2^31) in the key
    namespace: jax.Array  # [requests, 4] the key's
    words: jax.Array  # [requests, 4 + pages * fields] the first node's, then fields

    def column(self, k: int, shift: int = 0):
        """Field k of each page's node; or of the node `shift` pages above it.

        What it says of nodes above the first page means nothing.
        """
        length = self.node.shape[1]
        start = NAMESPACE_WORDS + k * length - shift
        return self.words[:, start : start + length]


def read_path(tree: TreeArrays, pages: KeyPages, node, also=()) -> Reading:
    """Read nodes and compare them with their pages of the key.

    Args:
      tree: the tree.
      pages: the keys.
      node: [requests, pages] node of each page, or `NULL`.
      also: fields to read in the same gather.
    """
    fields, length = tree.fields, node.shape[1]
    nodes = num_rows(fields)
    safe = jnp.maximum(node, ROOT)
    stored = tree.tokens.at[node].get(mode="clip", wrap_negative_indices=False)
    # Stored ids are never negative, so a difference keeps the sign of a bad id.
    differs, is_bad = any_word(stored ^ pages.tokens)
    names = (*also, PARENT)
    spaces = [(NAMESPACE + k) * nodes + safe[:, :1] for k in range(NAMESPACE_WORDS)]
    place = [*spaces, *(name * nodes + safe for name in names)]
    words = fields.at[jnp.concatenate(place, axis=1)].get(**IN_BOUNDS)
    inside = page_index(length) < pages.num_pages[:, None]
    reading = Reading(node, inside, inside & is_bad, pages.namespace, words)
    linked = reading.column(len(also)) == above(safe)
    return reading._replace(ok=inside & (node != NULL) & ~differs & linked)


def verify(tree: TreeArrays, pages: KeyPages, node, also=()):
    """Tell which nodes hold exactly their page of the key.

    Tokens, parent and, at the first page, the namespace decide: a child's namespace
    is its parent's. A true entry counts only where all before it are true.

    Args:
      tree: the tree.
      pages: the keys.
      node: [requests, pages] node of each page, or `NULL`.
      also: fields to read in the same gather.

    Returns:
      ``(ok, bad_token, values)``: ok is bool [requests, pages], false past the key;
      bad_token marks pages with an id outside [0, 2^31), unless the node holds the
      same; values has one [requests, pages] array for each of `also`.
    """
    reading = read_path(tree, pages, node, also)
    values = [reading.column(k) for k in range(len(also))]
    return _with_namespace(reading), reading.bad_token, values


def _with_namespace(reading: Reading):
    """`ok`, and at the first page the namespace too."""
    space, wanted = reading.words, reading.namespace
    # Word by word, not as a reduction: this is one bit a request.
    same = space[:, :1] == wanted[:, :1]
    for k in range(1, NAMESPACE_WORDS):
        same &= space[:, k : k + 1] == wanted[:, k : k + 1]
    return reading.ok & ((page_index(reading.ok.shape[1]) > 0) | same)


def verified_run(reading: Reading):
    """Find the longest run of verified nodes.

    Returns:
      ``(run, has_bad_token, node, field)``: pages of the run, whether the key has a
      bad token, and the run's last node with the first field that was read of it, or
      zeros for an empty run; one entry a request.
    """
    return _verified_run(reading)


def _verified_run_default(reading: Reading):
    run = first_false(_with_namespace(reading))
    at_end = page_index(reading.node.shape[1]) + 1 == run[:, None]
    rows = [jnp.where(at_end, x, 0) for x in (reading.node, reading.column(0))]
    picked = jnp.sum(jnp.stack([*rows, reading.bad_token.astype(jnp.int32)]), -1)
    return run, picked[2] > 0, picked[0], picked[1]


def _verified_run_tpu(reading: Reading):
    """Do all in one reduction: each further one would be a kernel."""
    node, ok, bad_token, namespace, words = reading
    length = ok.shape[1]
    if length < NAMESPACE_WORDS:
        return _verified_run_default(reading)
    # The first failing page wins, or else the last page, and brings along what stands
    # one page above it, or else its own.
    page = jax.lax.broadcasted_iota(jnp.int32, ok.shape, 1)
    key = jnp.where(ok, jnp.where(page == length - 1, length, length + 1), page)
    nodes = jnp.where(ok, node, above(node))
    field = jnp.where(ok, reading.column(0), reading.column(0, shift=1))
    width = length - NAMESPACE_WORDS
    wanted = jax.lax.pad(namespace, np.int32(0), ((0, 0, 0), (0, width, 0)))
    strange = jnp.where(page < NAMESPACE_WORDS, words[:, :length] ^ wanted, 0)

    def merge(x, y):
        is_first = x[0] < y[0]
        won = [jnp.where(is_first, a, b) for a, b in zip(x[:3], y[:3], strict=True)]
        return *won, x[3] | y[3], x[4] | y[4]

    rows = (key, nodes, field, bad_token.astype(jnp.int32), strange)
    start = (np.int32(length + 1), *[np.int32(0)] * 4)
    run, *at_end, bad, strange = jax.lax.reduce(rows, start, merge, (1,))
    run = jnp.where(strange == 0, run, 0)
    return run, bad != 0, *(jnp.where(run > 0, x, 0) for x in at_end)


_verified_run = by_platform(_verified_run_default, tpu=_verified_run_tpu)


def above(node):
    """The node above each page of a path: the root first."""
    return jnp.concatenate([jnp.zeros_like(node[:, :1]), node[:, :-1]], axis=1)


def one(tree):
    """Give every array of a record a leading axis of one request."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def first(tree):
    """Take the first request out of a batched record."""
    return jax.tree.map(lambda x: x[0], tree)
