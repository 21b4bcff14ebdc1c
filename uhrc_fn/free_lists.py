"""Free lists as rings: taken from the front, given back at the end.

First in, first out makes one eviction of the sum of several deficits hand out the
same ids as several evictions would, so batches equal sequences.
"""

import jax.numpy as jnp

from .config import CacheConfig
from .state import Counter, Ring, ring_capacity, ring_offset
from .tree_arrays import DROP


def front(free_ids, counters, config: CacheConfig, ring: Ring, rank):
    """Ids at `rank` places behind the front of `ring`; ranks wrap at its capacity.

    Nothing is taken: advance the counters by `taken` and mask ranks past the size.
    """
    capacity = ring_capacity(config, ring)
    place = counters[Counter.RING_HEAD + ring] + rank
    place = jnp.where(place >= capacity, place - capacity, place)
    place = jnp.clip(place, 0, max(capacity - 1, 0))
    return free_ids.at[ring_offset(config, ring) + place].get(mode="clip")


def back(counters, config: CacheConfig, ring: Ring, rank):
    """Places in `free_ids`, `rank` behind the end of `ring`."""
    capacity = ring_capacity(config, ring)
    place = counters[Counter.RING_HEAD + ring] + counters[Counter.RING_SIZE + ring]
    place = place + rank
    place = jnp.where(place >= 2 * capacity, place - capacity, place)
    place = jnp.where(place >= capacity, place - capacity, place)
    return ring_offset(config, ring) + place


def push(free_ids, counters, config: CacheConfig, ring: Ring, ids, is_given):
    """Write the `ids` where `is_given` behind the end of `ring`, in order.

    Returns:
      ``(free_ids, count)``; advance the counters by `given`.
    """
    rank = jnp.cumsum(is_given, dtype=jnp.int32) - 1
    place = back(counters, config, ring, rank)
    place = jnp.where(is_given, place, free_ids.shape[0])
    return free_ids.at[place].set(ids, **DROP), jnp.sum(is_given, dtype=jnp.int32)


def size(counters, ring: Ring):
    """How many ids `ring` holds."""
    return counters[Counter.RING_SIZE + ring]


def taken(counters, config: CacheConfig, ring: Ring, count) -> dict:
    """Counter changes of taking `count` ids, for `bump`."""
    head = counters[Counter.RING_HEAD + ring]
    wraps = head + count >= ring_capacity(config, ring)
    step = count - jnp.where(wraps, ring_capacity(config, ring), 0)
    return {f"ring_head__{int(ring)}": step, f"ring_size__{int(ring)}": -count}


def given(ring: Ring, count) -> dict:
    """Counter changes of pushing `count` ids, for `bump`."""
    return {f"ring_size__{int(ring)}": count}
