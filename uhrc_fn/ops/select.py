"""Select the lowest of many stamps, without sorting them all.

A few are selected in order. For many, or any number, the k-th lowest is a threshold:
on a CPU a radix search finds it in three histograms of its bits, high ones first; a TPU
counts bit by bit, as it scatters badly.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ..by_platform import by_platform
from ..tree_arrays import IN_BOUNDS
from .reduce import running_sum_of_many

# The digits of a stamp, high ones first: 11 bits each, 31 in all.
_SHIFTS, _SIZE = (22, 11, 0), 1 << 11

_MOST, _OFFSET = np.int32(np.iinfo(np.int32).max), np.int32(1 << 23)


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

    def next_digit(carry, shift):
        answer, left = carry
        digit = (stamps >> shift) - (answer >> shift)
        digit = jnp.where((digit >= 0) & (digit < _SIZE), digit, _SIZE)
        number = jnp.zeros(_SIZE + 1, jnp.int32).at[digit].add(1, **IN_BOUNDS)
        until = running_sum_of_many(number[:_SIZE])
        is_below = until < left
        place = jnp.minimum(running_sum_of_many(is_below)[-1], _SIZE - 1)
        before = until.at[jnp.maximum(place - 1, 0)].get(**IN_BOUNDS)
        left = left - jnp.where(place > 0, before, 0)
        return (answer + (place << shift), left), None

    # A loop of three turns: a call pays for each reduction in its program, taken or
    # not, and this program has them once.
    shifts = jnp.array(_SHIFTS, jnp.int32)
    zero = jnp.zeros_like(stamps, shape=())  # as `shard_map` types it: each rank's own
    return jax.lax.scan(next_digit, (zero, zero + k), shifts)[0][0]


def _kth_lowest_tpu(stamps, k):
    stamps = jax.lax.optimization_barrier(stamps)
    answer = jnp.int32(0)
    for bit in range(30, -1, -1):
        trial = answer | (1 << bit)
        below = jnp.sum(stamps < trial, dtype=jnp.int32)
        answer = jnp.where(below < k, trial, answer)
    return answer


_kth_lowest = by_platform(_kth_lowest_default, tpu=_kth_lowest_tpu)


def lowest(stamps, number: int):
    """The places of the `number` lowest stamps, in order; equal ones by place.

    Args:
      stamps: int32 [n], in [0, 2^31 - 2^24); what does not stand for a candidate holds
        the largest int32, and comes last in any order.
      number: static, at most n.

    Returns:
      ``(stamps, places)``, int32 [number]; the place of a stamp that is the largest
      int32 means nothing.
    """
    # XLA selects only floats on a CPU, and sorts all else; positive floats order as
    # their bits do. The offset keeps small stamps clear of denormals, which may be
    # flushed to zero.
    bits = jnp.minimum(stamps, _MOST - (1 << 24)) + _OFFSET
    score = -jax.lax.bitcast_convert_type(bits, jnp.float32)
    default, tpu = (functools.partial(f, number=number) for f in _FORMS)
    score, place = by_platform(default, tpu=tpu)(score)
    found = jax.lax.bitcast_convert_type(-score, jnp.int32) - _OFFSET
    return jnp.where(found < _MOST - (1 << 24), found, _MOST), place


def _highest_default(score, number: int):
    """As exact as `top_k`, with a plainer comparison.

    A call pays for each step of a comparison in its program, taken or not.
    """
    return tuple(jax.lax.approx_max_k(score, number, recall_target=1.0))


def _highest_tpu(score, number: int):
    return tuple(jax.lax.top_k(score, number))


_FORMS = (_highest_default, _highest_tpu)
