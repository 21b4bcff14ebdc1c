"""Norms, computed in float32 whatever the dtype of the activations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, " *batch channels"],
    weight: Float[Array, " channels"],
    eps: float = 1e-6,
) -> Float[Array, " *batch channels"]:
    """Divide by the root mean square of the channels (arXiv:1910.07467), and scale."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = _like(weight.astype(jnp.float32), wide)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def l2_norm(
    x: Float[Array, " *batch channels"], eps: float = 1e-6
) -> Float[Array, " *batch channels"]:
    """Divide by the Euclidean length of the channels."""
    wide = x.astype(jnp.float32)
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + eps)).astype(x.dtype)


def _like(vector, x):
    """A vector over the last axis of `x`, with its rank."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)
