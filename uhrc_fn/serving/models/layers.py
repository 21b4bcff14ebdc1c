"""Parts that all layers share: linear maps, rotary positions, the SwiGLU MLP."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def linear(x: Float[Array, " *batch inner"], weight: Float[Array, " inner outer"]):
    """Map the last axis: [..., outer], in the dtype of `x`."""
    return jnp.einsum("...i,io->...o", x, weight)


def init_linear(key, inner: int, outer: int, dtype) -> Array:
    """A weight that keeps the variance of its input."""
    return jax.random.normal(key, (inner, outer), dtype) * inner**-0.5


def rotary(
    x: Float[Array, " *batch heads dim"],
    positions: Int32[Array, " *batch"],
    *,
    theta: float,
    rotary_dim: int,
):
    """Turn the first `rotary_dim` dimensions of each head by its token's position.

    Dimension i turns together with i + rotary_dim / 2 (Llama's order in Hugging Face
    checkpoints), by an angle of position / theta^(2 i / rotary_dim). Angles are in
    float32: a bfloat16 one would round positions.
    """
    half = rotary_dim // 2
    power = jnp.arange(half, dtype=jnp.float32) * (-2.0 / rotary_dim)
    inverse = jnp.exp(power * jnp.log(jnp.float32(theta)))
    angle = positions.astype(jnp.float32)[..., None] * inverse.reshape(
        *(1,) * positions.ndim, half
    )
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    turned = x[..., :rotary_dim].astype(jnp.float32)
    first, second = turned[..., :half], turned[..., half:]
    parts = [first * cos - second * sin, second * cos + first * sin]
    turned = jnp.concatenate(parts, axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)


class MLP(eqx.Module):
    """SwiGLU: a gate by the sigmoid-weighted unit, https://arxiv.org/abs/2002.05202."""

    gate: Float[Array, " hidden intermediate"]
    up: Float[Array, " hidden intermediate"]
    down: Float[Array, " intermediate hidden"]

    def __call__(self, x: Float[Array, " *batch hidden"]):
        """The same map for every token."""
        gated = jax.nn.silu(linear(x, self.gate)) * linear(x, self.up)
        return linear(gated, self.down)


def init_mlp(key, hidden: int, intermediate: int, dtype) -> MLP:
    """An MLP with random weights."""
    gate, up, down = jax.random.split(key, 3)
    return MLP(
        gate=init_linear(gate, hidden, intermediate, dtype),
        up=init_linear(up, hidden, intermediate, dtype),
        down=init_linear(down, intermediate, hidden, dtype),
    )
