"""`track_scatter` in plain JAX: one scatter a buffer."""

import jax
import jax.numpy as jnp


def track_scatter(buffers: list[jax.Array], rows: list[jax.Array], index: jax.Array):
    """Write `rows[i]` to row `index[i]` of its buffer; index 0 writes nothing."""
    if index.shape == (1,):
        # XLA makes slices of a scatter of one row, and then copies the whole buffer on
        # CPU: a second row, which goes nowhere, keeps it a scatter in place.
        index = jnp.pad(index, (0, 1))
        rows = [jnp.concatenate([row, row]) for row in rows]
    return [
        buffer.at[jnp.where(index > 0, index, buffer.shape[0])].set(
            new, mode="drop", wrap_negative_indices=False
        )
        for buffer, new in zip(buffers, rows, strict=True)
    ]
