"""Where a key stands: its pages hashed, proposed and verified in parallel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
    fields, length = tree.fields, node.shape[1]
    nodes = num_rows(fields)
    safe = jnp.maximum(node, ROOT)
    stored = tree.tokens.at[safe].get(**IN_BOUNDS)
    # Stored ids are never negative, so a difference keeps the sign of a bad id.
    diff = lane_or(stored ^ pages.tokens)
    same = ~jnp.any(diff != 0, axis=-1)
    bad_token = jnp.any(diff < 0, axis=-1)
    names = (PARENT, *also)
    spaces = [(NAMESPACE + k) * nodes + safe[:, :1] for k in range(NAMESPACE_WORDS)]
    place = jnp.concatenate([name * nodes + safe for name in names] + spaces, axis=1)
    read = fields.at[place].get(**IN_BOUNDS)
    columns = [read[:, k * length : (k + 1) * length] for k in range(len(names))]
    space = read[:, len(names) * length :]
    # Word by word, not as a reduction: this is one bit a request.
    same_space = space[:, :1] == pages.namespace[:, :1]
    for k in range(1, NAMESPACE_WORDS):
        same_space &= space[:, k : k + 1] == pages.namespace[:, k : k + 1]
    page = page_index(length)
    ok = (node != NULL) & same & (columns[0] == above(safe))
    ok = ok & ((page > 0) | same_space) & (page < pages.num_pages[:, None])
    return ok, bad_token & (page < pages.num_pages[:, None]), columns[1:]


def above(node):
    """The node above each page of a path: the root first."""
    return jnp.concatenate([jnp.zeros_like(node[:, :1]), node[:, :-1]], axis=1)


def one(tree):
    """Give every array of a record a leading axis of one request."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def first(tree):
    """Take the first request out of a batched record."""
    return jax.tree.map(lambda x: x[0], tree)
