"""Select the lowest of many stamps, without sorting them all.

A radix search finds the k-th lowest in three histograms of its bits, high ones first;
what lies at or below it is compacted, and only that is put in order.
"""

import jax
import jax.numpy as jnp

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
    stamps = jax.lax.optimization_barrier(stamps)  # else every digit makes them anew
    answer, left = jnp.int32(0), jnp.asarray(k, jnp.int32)
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


def lowest(stamps, count: int):
    """The places of the `count` lowest stamps, in order.

    Args:
      stamps: int32 [n], in [0, 2^31); what does not stand for a candidate holds the
        largest int32, and comes last in any order.
      count: static, at most n.

    Returns:
      ``(stamps, places)``, int32 [count].
    """
    most = jnp.iinfo(jnp.int32).max
    limit = jnp.minimum(kth_lowest(stamps, count), most - 1)
    is_low = stamps <= limit
    target = jnp.where(is_low, running_count(is_low) - 1, NULL)
    every = jnp.arange(stamps.shape[0], dtype=jnp.int32)
    place = jnp.full(count, NULL, jnp.int32).at[target].set(every, **DROP)
    found = stamps.at[jnp.maximum(place, 0)].get(**IN_BOUNDS)
    found = jnp.where(place == NULL, most, found)
    # XLA selects in order only floats on CPU; positive floats order as their bits do.
    # The offset keeps small stamps clear of denormals, which may be flushed to zero.
    bits = jnp.minimum(found, most - (1 << 24)) + (1 << 23)
    score = -jax.lax.bitcast_convert_type(bits, jnp.float32)
    _, order = jax.lax.top_k(score, count)
    return found.at[order].get(**IN_BOUNDS), place.at[order].get(**IN_BOUNDS)
