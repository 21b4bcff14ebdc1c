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
    place = lambda slot: (slot[:, None] * pieces + piece).reshape(-1)
    steps = place(jnp.where(dst > 0, src, 0)), place(dst)
    zero = jnp.zeros((), dst.dtype)

    def copy_piece(split, step):
        read, write = step
        moved = jax.lax.dynamic_slice(split, (read, zero), (1, split.shape[1]))
        return jax.lax.dynamic_update_slice(split, moved, (write, zero)), None

    # In and out by way of a vector: where an axis is 1, XLA would change the layout,
    # and copy.
    split = jax.lax.optimization_barrier(buffer.reshape(-1)).reshape(rows * pieces, -1)
    split = jax.lax.scan(copy_piece, split, steps)[0]
    return jax.lax.optimization_barrier(split.reshape(-1)).reshape(buffer.shape)


def num_pieces(row_size: int, itemsize: int) -> int:
    """Pieces of equal length to cut a row into."""
    least = -(-row_size * itemsize // PIECE_BYTES)
    fitting = (n for n in range(least, 4 * least + 1) if row_size % n == 0)
    return next(fitting, 1)
