"""RMS norm, https://arxiv.org/abs/1910.07467."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, " *batch width"], weight: Float[Array, " width"], eps: float
):
    """Scale the last axis to a root mean square of 1, then by `weight`.

    In float32, and back to the dtype of `x`.
    """
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32).reshape(*(1,) * (x.ndim - 1), -1)
    return (wide * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)
