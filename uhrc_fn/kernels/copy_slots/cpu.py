"""`copy_slots` for the CPU: piece by piece, each small enough for the first cache.

A gather writes the rows to memory and a scatter reads them back, which halves the
bandwidth. A piece of a row never leaves the cache on its way.
"""

import collections

import jax
import jax.numpy as jnp

PIECE_BYTES = 32 * 1024


def copy_slots(buffers: list[jax.Array], src: jax.Array, dst: jax.Array):
    """Copy row `src[i]` to row `dst[i]` of each buffer; 0 in `dst` copies nothing."""
    alike = collections.defaultdict(list)
    for place, buffer in enumerate(buffers):
        alike[buffer.shape, buffer.dtype].append(place)
    copied = list(buffers)
    for places in alike.values():
        group = _copy_alike([buffers[place] for place in places], src, dst)
        for place, buffer in zip(places, group, strict=True):
            copied[place] = buffer
    return copied


def _copy_alike(buffers: list[jax.Array], src, dst):
    """Copy rows of buffers of one shape and dtype in one loop."""
    rows, *shape = buffers[0].shape
    pieces = num_pieces(buffers[0].size // rows, buffers[0].dtype.itemsize)
    source, target = _piece_indices(src, pieces), _piece_indices(dst, pieces)
    # A lane that copies nothing copies the dummy's first piece onto itself.
    source = jnp.where(target < pieces, 0, source)
    target = jnp.where(target < pieces, 0, target)

    def copy_piece(buffers, indices):
        read, write = indices
        moved = []
        for buffer in buffers:
            piece = jax.lax.dynamic_slice_in_dim(buffer, read, 1)
            moved.append(jax.lax.dynamic_update_slice_in_dim(buffer, piece, write, 0))
        return moved, None

    split = [buffer.reshape(rows * pieces, -1) for buffer in buffers]
    split, _ = jax.lax.scan(copy_piece, split, (source, target))
    return [buffer.reshape(rows, *shape) for buffer in split]


def _piece_indices(rows, pieces: int):
    """Indices of all pieces of `rows`, row by row."""
    piece = jnp.arange(pieces, dtype=rows.dtype)[None]
    return (rows[:, None] * pieces + piece).reshape(-1)


def num_pieces(row_size: int, itemsize: int) -> int:
    """Pieces of equal length to cut a row into."""
    least = -(-row_size * itemsize // PIECE_BYTES)
    fitting = (n for n in range(least, 4 * least + 1) if row_size % n == 0)
    return next(fitting, 1)
