"""Chained page hashes, all pages at once, in 32-bit words.

The chained hash of page i covers the namespace and every token up to the end of that
page. Two 32-bit words each: the first chooses a bucket, the second is the fingerprint.
A hash only proposes a node; tokens, parent and namespace decide. So a clash costs
space and never gives a wrong hit, and mixing may be cheap.

Tokens are summed into 8 lanes, each times a weight of its own. Mixed lanes, times a
weight again, are summed over the page, and pages, times powers of an odd base, over
the prefix. Sums wrap around, so their order is free: each platform has its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..by_platform import by_platform
from ..config import CacheConfig
from ..tree_arrays import NAMESPACE_WORDS

_LANES = 8
# A prefix sum of few requests is cheaper on a CPU in two short steps, within rows and
# over them, than in many; on a TPU, up to so many pairs of pages, as a triangle.
_ROWS, _MAX_SHORT, _MAX_FEW = (8, 4, 2), 32, 8
_MAX_PAIRS_TPU = 1 << 20
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
    """Constants of one seed, each word's own on the first axis; weights are odd."""

    token: np.ndarray  # [page_size] weights
    salt: np.ndarray  # [lanes]
    lane: np.ndarray  # [2, lanes] weights
    page: np.ndarray  # [2, pages] weights: powers of a base
    namespace: np.ndarray  # [2, 4] weights
    start: np.ndarray  # [2]


@functools.lru_cache(maxsize=256)
def _constants(seed: int, page_size: int, num_pages: int) -> _Constants:
    """Draw the constants."""
    words = _splitmix(seed, page_size + 64)
    token, rest = words[:page_size] | 1, words[page_size:]
    lanes = _LANES if page_size % _LANES == 0 else page_size
    lane = np.stack([_splitmix(int(word), lanes) | 1 for word in rest[8:10]])
    return _Constants(
        token=token,
        salt=np.resize(rest[:_LANES], lanes),
        lane=lane,
        page=np.stack([_powers(int(word) | 1, num_pages) for word in rest[10:12]]),
        namespace=np.stack([rest[16:20] | 1, rest[20:24] | 1]),
        start=rest[24:26],
    )


def _powers(base: int, count: int) -> np.ndarray:
    """``base^i`` modulo 2^32 for i in [1, count]."""
    powers, x = np.empty(count, np.uint32), 1
    for i in range(count):
        x = x * base & 0xFFFFFFFF
        powers[i] = x
    return powers


def _mix(x):
    """The 32-bit finaliser of MurmurHash3 (Appleby): every bit reaches every bit."""
    x = (x ^ (x >> 16)) * _MIX1
    x = (x ^ (x >> 13)) * _MIX2
    return x ^ (x >> 16)


def _like(constant: np.ndarray, ndim: int) -> np.ndarray:
    """Give a constant leading axes of one, up to `ndim`."""
    return constant.reshape((1,) * (ndim - constant.ndim) + constant.shape)


def chain_hashes(tokens, namespace, config: CacheConfig):
    """Hash every prefix that ends with a page.

    Args:
      tokens: int32 [requests, pages, page_size].
      namespace: int32 [requests, 4].
      config: gives the seed.

    Returns:
      ``(bucket, fingerprint)``, int32 [requests, pages] each.
    """
    constants = _constants(config.hash_seed, config.page_size, tokens.shape[1])
    first, fingerprint = _chain(tokens, namespace, constants)
    # The high bits: the low ones of the two words have much in common.
    shift = np.int32(32 - (config.num_buckets - 1).bit_length())
    return jax.lax.shift_right_logical(first, shift), fingerprint


def _token_terms(tokens):
    """Let every bit of a token reach many."""
    x = tokens.astype(jnp.uint32) * _MIX1
    return x ^ (x >> 15)


def _chain_default(tokens, namespace, constants: _Constants):
    """Reduce major axes: XLA for CPU vectorises those, not the minor one."""
    lanes = constants.salt.shape[0]
    shape = (*tokens.shape[:-1], tokens.shape[-1] // lanes, lanes)
    weights = constants.token.reshape(shape[-2:])
    terms = _token_terms(tokens).reshape(shape) * _like(weights, len(shape))
    lane = jnp.sum(terms, axis=-2, dtype=jnp.uint32)
    lane = _mix(lane + _like(constants.salt, lane.ndim))
    terms, seeds = [], []
    for j in range(2):
        page = lane * _like(constants.lane[j], lane.ndim)
        page = jnp.sum(page, axis=-1, dtype=jnp.uint32)
        terms.append(page * _like(constants.page[j], 2))
        # Word by word, not as a reduction: this is one scalar a request.
        seed = constants.start[j]
        for k in range(NAMESPACE_WORDS):
            word = namespace[:, k].astype(jnp.uint32)
            seed = seed + word * constants.namespace[j, k]
        seeds.append(seed)
    total = _prefix_sum(jnp.stack(terms)) + jnp.stack(seeds)[..., None]
    return list(jax.lax.bitcast_convert_type(total, jnp.int32))


def _prefix_sum(x):
    """Inclusive prefix sum over the last axis of [2, requests, pages]."""
    requests, pages = x.shape[1:]
    width = next((w for w in _ROWS if pages % w == 0 and pages > w), pages)
    if pages // width > _MAX_SHORT or width == pages or requests > _MAX_FEW:
        return jnp.cumsum(x, axis=-1, dtype=x.dtype)
    # Within rows, then over the rows: short sums, which XLA for CPU leaves whole.
    x = x.reshape(*x.shape[:-1], pages // width, width)
    until = _like(np.tri(width, dtype=bool).T, x.ndim + 1)
    within = jnp.where(until, x[..., None], np.uint32(0))
    within = jnp.sum(within, axis=-2, dtype=x.dtype)
    rows = within[..., -1]
    earlier = _like(np.tri(pages // width, k=-1, dtype=bool).T, x.ndim)
    before = jnp.where(earlier, rows[..., None], np.uint32(0))
    before = jnp.sum(before, axis=-2, dtype=x.dtype)
    return (within + before[..., None]).reshape(*x.shape[:-2], pages)


def _chain_tpu(tokens, namespace, constants: _Constants):
    """Run three kernels: a reduction for all lanes, their mix, one for both words."""
    num_pages = tokens.shape[1]
    pairs = tokens.shape[0] * num_pages**2
    lanes = constants.salt.shape[0]
    if lanes != _LANES or num_pages < NAMESPACE_WORDS or pairs > _MAX_PAIRS_TPU:
        return _chain_default(tokens, namespace, constants)
    terms = _token_terms(tokens) * _like(constants.token, 3)
    lane_of = np.arange(tokens.shape[-1]) % lanes
    lane = []
    for c in range(lanes):
        mine = jnp.where(_like(lane_of == c, 3), terms, np.uint32(0))
        lane.append(_mix(jnp.sum(mine, -1, dtype=jnp.uint32) + constants.salt[c]))
    # The namespace is laid beside the first pages, so that the reduction over pages
    # sums it too. Widened first: a pad of something computed is a kernel of its own.
    space = _widen(namespace, num_pages).astype(jnp.uint32)
    weights, start = (
        _widen(x, num_pages) for x in (constants.namespace, constants.start[:, None])
    )
    shape = (*tokens.shape[:2], num_pages)
    until = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    until = until <= jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    terms = []
    for j in range(2):
        page = lane[0] * constants.lane[j, 0]
        for c in range(1, lanes):
            page = page + lane[c] * constants.lane[j, c]
        always = space * weights[j][None] + start[j][None]
        page = always + page * _like(constants.page[j], 2)
        both = jnp.where(until, page[:, None], always[:, None])
        terms.append(jax.lax.bitcast_convert_type(both, jnp.int32))
    add = lambda x, y: [x[0] + y[0], x[1] + y[1]]
    return list(jax.lax.reduce(terms, [np.int32(0)] * 2, add, (2,)))


def _widen(x, size: int):
    """Append zeros to the last axis of [rows, entries], up to `size`."""
    return jax.lax.pad(x, x.dtype.type(0), ((0, 0, 0), (0, size - x.shape[1], 0)))


_chain = by_platform(_chain_default, tpu=_chain_tpu)
