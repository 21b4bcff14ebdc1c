"""`copy_slots` for the CPU: piece by piece, each small enough for its caches.

The default wherever there is no kernel.

A gather writes the rows to memory and a scatter reads them back, which halves the
bandwidth. A piece of a row never leaves the cache on its way.
"""

import math

import jax
import jax.numpy as jnp

PIECE_BYTES = 32 * 1024


def copy_slots(buffers: list[jax.Array], src: jax.Array, dst: jax.Array):
    """Copy row `src[i]` to row `dst[i]` of each buffer; 0 in `dst` copies nothing."""
    return [_copy_rows(buffer, src, dst) for buffer in buffers]


def _copy_rows(buffer, src, dst):
    # Pieces are cut along the axes as they are: in a buffer of another shape XLA may
    # choose another layout, and copy all of it twice.
    piece = piece_shape(buffer.shape[1:], buffer.dtype.itemsize)
    grid = [whole // part for whole, part in zip(buffer.shape[1:], piece, strict=True)]
    number = jnp.arange(math.prod(grid), dtype=dst.dtype)[None]
    # A lane that copies nothing copies the dummy's first piece onto itself.
    number = jnp.where((dst > 0)[:, None], number, 0).reshape(-1)
    each = lambda lanes: jnp.repeat(lanes, math.prod(grid))
    corner = [
        place * part
        for place, part in zip(jnp.unravel_index(number, grid), piece, strict=True)
    ]

    def copy_piece(buffer, step):
        read, write, corner = step
        moved = jax.lax.dynamic_slice(buffer, (read, *corner), (1, *piece))
        return jax.lax.dynamic_update_slice(buffer, moved, (write, *corner)), None

    steps = each(jnp.where(dst > 0, src, 0)), each(dst), corner
    return jax.lax.scan(copy_piece, buffer, steps)[0]


def piece_shape(row: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of equal pieces of a row: contiguous, of `PIECE_BYTES` at most."""
    for axis, length in enumerate(row):
        rest = row[axis + 1 :]
        fitting = PIECE_BYTES // (math.prod(rest) * itemsize)
        if fitting:
            part = max(n for n in range(1, min(length, fitting) + 1) if length % n == 0)
            return (*[1] * axis, part, *rest)
    return (1,) * len(row)
