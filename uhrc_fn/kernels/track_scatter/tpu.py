"""`track_scatter` for the TPU: one kernel that moves all rows by DMA."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ..row_dma import move_rows


def track_scatter(
    buffers: list[jax.Array],
    rows: list[jax.Array],
    index: jax.Array,
    *,
    interpret: bool | pltpu.InterpretParams = False,
):
    """Write `rows[i]` to row `index[i]` of its buffer; index 0 writes nothing."""
    lanes = jnp.arange(index.shape[0], dtype=index.dtype)
    return move_rows(
        rows, buffers, lanes, index, name="track_scatter", interpret=interpret
    )
