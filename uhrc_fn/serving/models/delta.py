"""What KDA and GDN share: queries, keys and values from a convolution, and decay."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ...pools.layout import require
from .linear_attention import LinearHeads
from .norm import l2_norm
from .short_conv import short_conv


def delta_inputs(
    qkv: Float[Array, " lanes tokens channels"],
    weight: Float[Array, " channels kernel"],
    conv: Float[Array, " lanes channels taps"],
    num_new: Int32[Array, " lanes"],
    heads: LinearHeads,
):
    """Queries, keys and values of the delta rule.

    Convolved and through a SiLU; queries and keys of length 1, so that the correction
    of the delta rule never overshoots, and queries scaled by k_dim ** -0.5.

    Args:
      qkv: projected channels of Q, K and V, in this order, as the conv state has them.
      weight: of the convolution.
      conv: its state.
      num_new: tokens that count, by lane.
      heads: how the channels divide.

    Returns:
      ``(q, k, v, conv)``: [lanes, tokens, heads, dim] in float32, key heads repeated
      for the value heads that share them, and the state after the new tokens.
    """
    y, conv = short_conv(qkv, weight, conv, num_new)
    q, k, v = jnp.split(jax.nn.silu(y), [heads.k_width, 2 * heads.k_width], axis=-1)
    split = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)
    shared = heads.num_v_heads // heads.num_k_heads  # type: ignore[operator]

    def keyed(x):
        return jnp.repeat(l2_norm(split(x, heads.k_head_dim)), shared, axis=2)

    q = keyed(q) * heads.k_head_dim**-0.5  # type: ignore[operator]
    return q, keyed(k), split(v, heads.v_head_dim), conv


def log_decay(a, a_log, dt_bias):
    """Log decay g = -exp(a_log) softplus(a + dt_bias), at most 0, in float32.

    Mamba-2's gate (arXiv:2405.21060, section 7), which GDN and KDA took over. The
    three arguments have one rank.
    """
    return -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)


def init_a_log(key, num_heads: int) -> Array:
    """Rates from 1 to 16, uniform, as a logarithm: [heads]."""
    return jnp.log(jax.random.uniform(key, (num_heads,), minval=1.0, maxval=16.0))


def init_dt_bias(key, width: int) -> Array:
    """Biases whose softplus is 0.001 to 0.1, uniform by logarithm: [width]."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, (width,), minval=low, maxval=high))
    return step + jnp.log(-jnp.expm1(-step))


def init_conv(key, heads: LinearHeads, dtype) -> Array:
    """Weight of the convolution: [channels, kernel], uniform.

    Raises:
      ValueError: one tap, which is no convolution.
    """
    taps = heads.conv_kernel_size
    require(
        taps > 1,
        f"conv_kernel_size={taps}",
        "at least 2 for a layer of the delta rule",
        "Published models have 4.",
    )
    shape = (2 * heads.k_width + heads.v_width, taps)
    return jax.random.uniform(key, shape, dtype, -(taps**-0.5), taps**-0.5)
