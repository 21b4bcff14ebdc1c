"""Reductions over pages, as XLA for CPU runs them best.

It cuts a reduction of one array of more than 32 entries in two, and fuses neither
part with what it reduces. A reduction of two arrays stays whole, but is not
vectorised: good for one row of pages, bad for all pairs of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

# Up to so many entries are summed by one product.
_FEW = 64


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


def running_sum(counts):
    """The sum of all entries up to each: int32 [n], exact up to 2^24 in all.

    XLA for CPU makes three reductions of a cumulative sum, and each call of a program
    pays for each reduction in it, taken or not. A product with a triangle is free of
    that, and faster too where entries are few.
    """
    if counts.shape[0] <= _FEW:
        return _along_last(counts)
    return jnp.cumsum(counts, dtype=jnp.int32)


def running_sum_of_many(counts):
    """`running_sum` of thousands of entries, all by products."""
    # A cube: sums along its lines, then of lines in a plane, then of planes.
    size = counts.shape[0]
    width = math.ceil(size ** (1 / 3))
    lines = jnp.pad(counts, (0, width**3 - size)).reshape(width, width, width)
    lines = _along_last(lines)
    in_line = lines[..., -1]
    planes = _along_last(in_line)
    in_plane = planes[..., -1]
    before = _along_last(in_plane) - in_plane
    before = before[:, None] + planes - in_line
    return (before[..., None] + lines).reshape(-1)[:size]


def _along_last(counts):
    """Running sums along the last axis, by a product in float32."""
    until = jnp.asarray(np.tri(counts.shape[-1], dtype=np.float32).T)
    sums = jnp.dot(
        counts.astype(jnp.float32), until, precision=jax.lax.Precision.HIGHEST
    )
    return sums.astype(jnp.int32)
