"""`track_scatter` in plain JAX: one scatter a buffer."""

import jax
import jax.numpy as jnp


def track_scatter(buffers: list[jax.Array], rows: list[jax.Array], index: jax.Array):
    """Write `rows[i]` to row `index[i]` of its buffer; index 0 writes nothing."""
    return [
        buffer.at[jnp.where(index > 0, index, buffer.shape[0])].set(
            new, mode="drop", wrap_negative_indices=False
        )
        for buffer, new in zip(buffers, rows, strict=True)
    ]
