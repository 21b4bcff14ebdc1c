"""`copy_slots` for the CPU: piece by piece, each small enough for its caches.

The default wherever there is no kernel.

A gather writes the rows to memory and a scatter reads them back, which halves the
bandwidth. A piece of a row never leaves the cache on its way.
"""

import jax
import jax.numpy as jnp

PIECE_BYTES = 32 * 1024


def copy_slots(buffers: list[jax.Array], src: jax.Array, dst: jax.Array):
    """Copy row `src[i]` to row `dst[i]` of each buffer; 0 in `dst` copies nothing."""
    return [_copy_rows(buffer, src, dst) for buffer in buffers]


def _copy_rows(buffer, src, dst):
    rows = buffer.shape[0]
    pieces = num_pieces(buffer.size // rows, buffer.dtype.itemsize)
    # A lane that copies nothing copies the dummy's first piece onto itself.
    piece = jnp.arange(pieces, dtype=dst.dtype)[None]
    piece = jnp.where((dst > 0)[:, None], piece, 0)
    each = lambda lanes: jnp.repeat(lanes, pieces)
    steps = each(jnp.where(dst > 0, src, 0)), each(dst), piece.reshape(-1)
    zero = jnp.zeros((), dst.dtype)

    def copy_piece(split, step):
        read, write, piece = step
        shape = (1, 1, split.shape[2])
        moved = jax.lax.dynamic_slice(split, (read, piece, zero), shape)
        return jax.lax.dynamic_update_slice(split, moved, (write, piece, zero)), None

    split = buffer.reshape(rows, pieces, -1)
    done = jax.lax.scan(copy_piece, split, steps)[0]
    if buffer.shape[1:2] == (1,):  # XLA would choose another layout, and copy
        done = jax.lax.optimization_barrier(done.reshape(-1))
    return done.reshape(buffer.shape)


def num_pieces(row_size: int, itemsize: int) -> int:
    """Pieces of equal length to cut a row into."""
    least = -(-row_size * itemsize // PIECE_BYTES)
    fitting = (n for n in range(least, 4 * least + 1) if row_size % n == 0)
    return next(fitting, 1)
