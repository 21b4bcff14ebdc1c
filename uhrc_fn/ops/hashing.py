"""Chained page hashes, all pages at once, in 32-bit words.

The chained hash of page i covers the namespace and every token up to the end of that
page. Two 32-bit words each: the first chooses a bucket, the second is the fingerprint.
A hash only proposes a node; tokens, parent and namespace decide. So a clash costs
space and never gives a wrong hit, and mixing may be cheap.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..config import CacheConfig
from ..tree_arrays import NAMESPACE_WORDS

_LANES = 8
# Up to this many pages a prefix sum is cheaper as a triangle of all pairs.
_MAX_TRIANGLE = 128
_MIX1, _MIX2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def _splitmix(seed: int, count: int) -> np.ndarray:
    """`count` pseudo-random uint32 words of a 64-bit seed (Steele et al., 2014)."""
    mask = (1 << 64) - 1
    words = np.empty(count, np.uint32)
    for i in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words[i] = (z ^ (z >> 31)) >> 32
    return words


class _Constants(NamedTuple):
    """Constants of one seed: of the page hash, then of the chain."""

    weights: np.ndarray  # [page_size]
    lanes: int
    salt: np.ndarray  # [lanes]
    fold: np.ndarray  # [2, lanes]
    bases: list[int]
    namespace: np.ndarray  # [2, 4]
    start: np.ndarray  # [2]


@functools.lru_cache(maxsize=64)
def _constants(seed: int, page_size: int) -> _Constants:
    """Draw the constants; all multipliers are odd."""
    words = _splitmix(seed, page_size + 64)
    weights, rest = words[:page_size] | 1, words[page_size:]
    lanes = _LANES if page_size % _LANES == 0 else page_size
    salt = np.resize(rest[:_LANES], lanes)
    fold = np.stack([_splitmix(int(w), lanes) | 1 for w in rest[8:10]])
    bases = [int(w) | 1 for w in rest[10:12]]
    namespace = np.stack([rest[16:20] | 1, rest[20:24] | 1])
    return _Constants(weights, lanes, salt, fold, bases, namespace, rest[24:26])


@functools.lru_cache(maxsize=256)
def _powers(base: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """``base^i`` and ``base^-i`` modulo 2^32 for i in [1, count]."""
    inverse = pow(base, -1, 1 << 32)
    up, down = np.empty(count, np.uint32), np.empty(count, np.uint32)
    u = d = 1
    for i in range(count):
        u, d = u * base & 0xFFFFFFFF, d * inverse & 0xFFFFFFFF
        up[i], down[i] = u, d
    return up, down


def _mix(x):
    """The 32-bit finaliser of MurmurHash3 (Appleby): every bit reaches every bit."""
    x = (x ^ (x >> 16)) * _MIX1
    x = (x ^ (x >> 13)) * _MIX2
    return x ^ (x >> 16)


def _like(constant: np.ndarray, ndim: int) -> np.ndarray:
    """Give a constant leading axes of one, up to `ndim`."""
    return constant.reshape((1,) * (ndim - constant.ndim) + constant.shape)


def page_hashes(tokens, config: CacheConfig):
    """Hash each page by itself.

    Args:
      tokens: int32 [..., pages, page_size].
      config: gives the seed.

    Returns:
      Two uint32 arrays [..., pages].
    """
    weights, lanes, salt, fold, *_ = _constants(config.hash_seed, config.page_size)
    x = tokens.astype(jnp.uint32) * _MIX1
    x = x ^ (x >> 15)
    # Reduce over the major of two axes first: XLA for CPU vectorises that one.
    shape = (*tokens.shape[:-1], config.page_size // lanes, lanes)
    lane = jnp.sum(
        x.reshape(shape) * _like(weights.reshape(shape[-2:]), len(shape)),
        axis=-2,
        dtype=jnp.uint32,
    )
    lane = _mix(lane + _like(salt, lane.ndim))
    words = [
        jnp.sum(lane * _like(fold[j], lane.ndim), axis=-1, dtype=jnp.uint32)
        for j in range(2)
    ]
    return _mix(words[0]), _mix(words[1])


def chain_hashes(tokens, namespace, config: CacheConfig):
    """Hash every prefix that ends with a page.

    Args:
      tokens: int32 [requests, pages, page_size].
      namespace: int32 [requests, 4].
      config: gives the seed.

    Returns:
      ``(bucket, fingerprint)``, int32 [requests, pages] each.
    """
    constants = _constants(config.hash_seed, config.page_size)
    space = _mix(namespace.astype(jnp.uint32) + _MIX2)
    words = []
    for j, h in enumerate(page_hashes(tokens, config)):
        up, down = _powers(constants.bases[j], tokens.shape[-2])
        # Word by word, not as a reduction: this is one scalar a request.
        seed = space[:, 0] * constants.namespace[j, 0] + constants.start[j]
        for k in range(1, NAMESPACE_WORDS):
            seed = seed + space[:, k] * constants.namespace[j, k]
        # sum_k h_k * B^(i-k) as one prefix sum of h_k * B^-k, scaled back.
        total = _prefix_sum(h * _like(down, 2)) + seed[:, None]
        words.append(_mix(total * _like(up, 2)))
    bucket = (words[0] & np.uint32(config.num_buckets - 1)).astype(jnp.int32)
    return bucket, jax.lax.bitcast_convert_type(words[1], jnp.int32)


def _prefix_sum(x):
    """Inclusive prefix sum over the last axis of [requests, pages]."""
    pages = x.shape[1]
    if x.size > _MAX_TRIANGLE:
        return jnp.cumsum(x, axis=1, dtype=x.dtype)
    # One masked reduction over the major axis instead of several dependent steps.
    until = np.tri(pages, dtype=bool).T[None]
    return jnp.sum(jnp.where(until, x[:, :, None], np.uint32(0)), axis=1, dtype=x.dtype)
