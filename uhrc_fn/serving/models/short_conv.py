"""Causal depthwise short convolution with a state: the last inputs, oldest first."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def short_conv(
    x: Float[Array, " lanes tokens channels"],
    weight: Float[Array, " channels kernel"],
    state: Float[Array, " lanes channels taps"],
    num_new: Int32[Array, " lanes"],
):
    """Convolve each channel with its last `kernel` inputs.

    Inputs are rounded to the dtype of the state before they are used. So a token reads
    the same bits whether an earlier one is in the state or in the same forward, and a
    cut prefill computes what an uncut one does.

    Args:
      x: inputs; those at or past `num_new` may hold anything.
      weight: the last column weighs the current token.
      state: the `kernel - 1` inputs before the first token.
      num_new: tokens that count, by lane.

    Returns:
      ``(y, state)``: y in float32; the inputs before the token at `num_new`.
    """
    tokens, taps = x.shape[1], state.shape[2]
    past = jnp.swapaxes(state, 1, 2)
    inputs = jnp.concatenate([past, x.astype(state.dtype)], axis=1)
    wide, weight = inputs.astype(jnp.float32), weight.astype(jnp.float32)
    y = jnp.zeros_like(wide[:, :tokens])
    for tap in range(taps + 1):
        y += wide[:, tap : tap + tokens] * weight[:, tap][None, None]
    last = num_new[:, None] + jnp.arange(taps, dtype=jnp.int32)[None]
    left = jnp.take_along_axis(inputs, last[:, :, None], axis=1, mode="clip")
    return y, jnp.swapaxes(left, 1, 2)
