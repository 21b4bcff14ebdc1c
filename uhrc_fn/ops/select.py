"""Select the lowest of many stamps, without sorting them all.

On a CPU a radix search finds the k-th lowest in three histograms of its bits, high
ones first; what lies at or below it is compacted, and only that is put in order. A TPU
counts bit by bit, as it scatters badly, and selects from the whole.
"""

import functools

import jax
import jax.numpy as jnp

from ..by_platform import by_platform
from ..tree_arrays import DROP, IN_BOUNDS, NULL
from .reduce import running_count

# Digits of a stamp as (shift, bits), high ones first: 31 bits in all.
_DIGITS = ((20, 11), (10, 10), (0, 10))


def kth_lowest(stamps, k):
    """The k-th lowest of stamps.

    Args:
      stamps: int32 [n], in [0, 2^31); equal ones count each.
      k: int32 [], from 1.

    Returns:
      int32 []; where there are fewer than `k`, no stamp is above it.
    """
    return _kth_lowest(stamps, jnp.asarray(k, jnp.int32))


def _kth_lowest_default(stamps, k):
    stamps = jax.lax.optimization_barrier(stamps)  # else every digit makes them anew
    answer, left = jnp.int32(0), k
    for shift, bits in _DIGITS:
        size = 1 << bits
        digit = (stamps >> shift) - (answer >> shift)
        digit = jnp.where((digit >= 0) & (digit < size), digit, size)
        count = jnp.zeros(size + 1, jnp.int32).at[digit].add(1, **IN_BOUNDS)
        until = jnp.cumsum(count[:size], dtype=jnp.int32)
        is_below = until < left
        place = jnp.minimum(jnp.sum(is_below, dtype=jnp.int32), size - 1)
        left = left - jnp.max(jnp.where(is_below, until, 0))
        answer = answer + (place << shift)
    return answer


def _kth_lowest_tpu(stamps, k):
    stamps = jax.lax.optimization_barrier(stamps)
    answer = jnp.int32(0)
    for bit in range(30, -1, -1):
        trial = answer | (1 << bit)
        below = jnp.sum(stamps < trial, dtype=jnp.int32)
        answer = jnp.where(below < k, trial, answer)
    return answer


_kth_lowest = by_platform(_kth_lowest_default, tpu=_kth_lowest_tpu)


def lowest(stamps, count: int):
    """The places of the `count` lowest stamps, in order.

    Args:
      stamps: int32 [n], in [0, 2^31); what does not stand for a candidate holds the
        largest int32, and comes last in any order.
      count: static, at most n.

    Returns:
      ``(stamps, places)``, int32 [count]; where a stamp is the largest int32, its place
      means nothing.
    """
    forms = [functools.partial(f, count=count) for f in (_lowest_default, _lowest_tpu)]
    return by_platform(forms[0], tpu=forms[1])(stamps)


def _lowest_default(stamps, count: int):
    most = jnp.iinfo(jnp.int32).max
    limit = jnp.minimum(_kth_lowest_default(stamps, jnp.int32(count)), most - 1)
    is_low = stamps <= limit
    target = jnp.where(is_low, running_count(is_low) - 1, NULL)
    every = jnp.arange(stamps.shape[0], dtype=jnp.int32)
    place = jnp.full(count, NULL, jnp.int32).at[target].set(every, **DROP)
    found = stamps.at[jnp.maximum(place, 0)].get(**IN_BOUNDS)
    found = jnp.where(place == NULL, most, found)
    order = _in_order(found, count)
    return found.at[order].get(**IN_BOUNDS), place.at[order].get(**IN_BOUNDS)


def _lowest_tpu(stamps, count: int):
    place = _in_order(stamps, count).astype(jnp.int32)
    return stamps.at[place].get(**IN_BOUNDS), place


def _in_order(stamps, count: int):
    """Places of the `count` lowest, in order.

    XLA selects in full only floats on CPU; positive floats order as their bits do. The
    offset keeps small stamps clear of denormals, which may be flushed to zero.
    """
    most = jnp.iinfo(jnp.int32).max
    bits = jnp.minimum(stamps, most - (1 << 24)) + (1 << 23)
    score = -jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jax.lax.top_k(score, count)[1]
