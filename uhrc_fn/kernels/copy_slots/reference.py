"""`copy_slots` in plain JAX, as its meaning: one gather and one scatter a buffer.

The tests hold the other two to it; no program uses it, since it moves each byte twice.
"""

import jax
import jax.numpy as jnp


def copy_slots(buffers: list[jax.Array], src: jax.Array, dst: jax.Array):
    """Copy row `src[i]` to row `dst[i]` of each buffer; 0 in `dst` copies nothing.

    Every source is read before anything is written.
    """
    return [_copy_rows(buffer, src, dst) for buffer in buffers]


def _copy_rows(buffer, src, dst):
    rows = buffer.at[src].get(mode="promise_in_bounds", wrap_negative_indices=False)
    # The read must be over before the write starts, or XLA copies the whole buffer.
    rows, buffer = jax.lax.optimization_barrier((rows, buffer))
    past_the_end = jnp.where(dst > 0, dst, buffer.shape[0])
    return buffer.at[past_the_end].set(rows, mode="drop", wrap_negative_indices=False)
