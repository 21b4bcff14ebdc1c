"""Reductions over pages, as XLA for CPU runs them best.

It cuts a reduction of one array of more than 32 entries in two, and fuses neither
part with what it reduces. A reduction of two arrays stays whole, but is not
vectorised: good for one row of pages, bad for all pairs of them.
"""

import jax
import jax.numpy as jnp
import numpy as np


def first_two(a, b):
    """Place of the first true entry of two masks over the last axis.

    Args:
      a: bool [..., pages].
      b: bool [..., pages].

    Returns:
      Two int32 arrays [..., 1]; the number of pages where no entry is true.
    """
    most = jnp.int32(a.shape[-1])
    place = jax.lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 1)
    places = tuple(jnp.where(mask, place, most) for mask in (a, b))
    lower = lambda x, y: (jnp.minimum(x[0], y[0]), jnp.minimum(x[1], y[1]))
    first = jax.lax.reduce(places, (most, most), lower, (a.ndim - 1,))
    return first[0][..., None], first[1][..., None]


def sum_and_min(a, b):
    """Sum of `a` and minimum of `b`, int32 [requests, pages], over the pages."""
    start = (jnp.int32(0), jnp.int32(jnp.iinfo(jnp.int32).max))
    both = lambda x, y: (x[0] + y[0], jnp.minimum(x[1], y[1]))
    return jax.lax.reduce((a, b), start, both, (1,))


def running_count(mask):
    """How many entries of a long mask are true up to each: int32 [n].

    Rows are counted by one matrix product, exact in float32 up to 2^24; a cumulative
    sum of the whole would take XLA for CPU several times as long.
    """
    size, width = mask.shape[0], 128
    rows = jnp.pad(mask, (0, -size % width)).reshape(-1, width).astype(jnp.float32)
    until = jnp.asarray(np.tri(width, dtype=np.float32).T)
    count = jnp.dot(rows, until).astype(jnp.int32)
    total = count[:, -1]
    before = jnp.cumsum(total, dtype=jnp.int32) - total
    return (count + before[:, None]).reshape(-1)[:size]
