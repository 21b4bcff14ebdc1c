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
from .reduce import running_sum_of_many

# The digits of a stamp, high ones first: 11 bits each, 31 in all.
_SHIFTS, _SIZE = (22, 11, 0), 1 << 11


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
    """The places of the `number` lowest stamps, in order.

    Args:
      stamps: int32 [n], in [0, 2^31); what does not stand for a candidate holds the
        largest int32, and comes last in any order.
      number: static, at most n.

    Returns:
      ``(stamps, places)``, int32 [number]; the place of a stamp that is the largest
      int32 means nothing.
    """
    default, tpu = (functools.partial(f, number=number) for f in _FORMS)
    return by_platform(default, tpu=tpu)(stamps)


def _lowest_default(stamps, number: int):
    most = jnp.iinfo(jnp.int32).max
    limit = jnp.minimum(_kth_lowest_default(stamps, jnp.int32(number)), most - 1)
    is_low = stamps <= limit
    target = jnp.where(is_low, running_sum_of_many(is_low) - 1, NULL)
    every = jnp.arange(stamps.shape[0], dtype=jnp.int32)
    place = jnp.full(number, NULL, jnp.int32).at[target].set(every, **DROP)
    found = stamps.at[jnp.maximum(place, 0)].get(**IN_BOUNDS)
    found = jnp.where(place == NULL, most, found)
    order = _in_order(found, number)
    return found.at[order].get(**IN_BOUNDS), place.at[order].get(**IN_BOUNDS)


def _lowest_tpu(stamps, number: int):
    place = _in_order(stamps, number).astype(jnp.int32)
    return stamps.at[place].get(**IN_BOUNDS), place


_FORMS = (_lowest_default, _lowest_tpu)


def _in_order(stamps, number: int):
    """Places of the `number` lowest, in order.

    XLA selects in full only floats on CPU; positive floats order as their bits do. The
    offset keeps small stamps clear of denormals, which may be flushed to zero.
    """
    most = jnp.iinfo(jnp.int32).max
    bits = jnp.minimum(stamps, most - (1 << 24)) + (1 << 23)
    score = -jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jax.lax.top_k(score, number)[1]
