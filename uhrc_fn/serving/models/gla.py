"""GLA, gated linear attention with a fixed decay a head: Lightning Attention.

Lightning Attention-2 (https://arxiv.org/abs/2401.04658, section 3) in the form of
Ling 2.5 and Ring 2.5 (Bailing V2.5; https://arxiv.org/abs/2510.19338, section 2). For
each head, with x the hidden state of a token:

    q, k = RoPE(RMSNorm(x W))               v = x W_v
    S_t  = exp(-slope) S_{t-1} + k v^T
    y    = (sigmoid(x W_g) * GroupRMSNorm(S_t^T q / sqrt(k_dim))) W_o

Slopes are ALiBi's (https://arxiv.org/abs/2108.12409, section 3), smaller in deeper
layers. There is no convolution and no delta rule.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...pools.layout import require
from ..lanes import Lanes
from .layers import init_linear, linear, rotary
from .linear_attention import LinearHeads, LinearRecurrentAttnBackend, new_tokens
from .norm import rms_norm
from .recurrence import recur


class GLA(LinearRecurrentAttnBackend):
    """A Lightning Attention layer; as many key heads as value heads."""

    qkv: Float[Array, " hidden channels"]
    q_norm: Float[Array, " k_dim"]
    k_norm: Float[Array, " k_dim"]
    gate: Float[Array, " hidden v_width"]
    norm: Float[Array, " v_width"]
    out: Float[Array, " v_width hidden"]
    heads: LinearHeads = eqx.field(static=True)
    norm_groups: int = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)
    rope_theta: float = eqx.field(static=True)
    rotary_dim: int = eqx.field(static=True)
    layer_index: int = eqx.field(static=True)
    num_layers: int = eqx.field(static=True)
    tensor_axis: str | None = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        key,
        *,
        hidden_size: int,
        num_v_heads: int,
        v_head_dim: int,
        num_k_heads: int | None = None,
        k_head_dim: int | None = None,
        conv_kernel_size: int = 1,
        layer_index: int = 0,
        num_layers: int = 1,
        norm_groups: int | None = None,
        norm_eps: float = 1e-6,
        rope_theta: float = 10_000.0,
        partial_rotary_factor: float = 0.5,
        dtype="float32",
        tensor_axis: str | None = None,
    ) -> "GLA":
        """A layer with random weights.

        Args:
          key: of the random numbers.
          hidden_size: width of the hidden states.
          num_v_heads: heads.
          v_head_dim: width of a value head.
          num_k_heads: as many, or `None`.
          k_head_dim: width of a query or key head; `None` for that of a value head.
          conv_kernel_size: 1, no convolution.
          layer_index: place in the model, from 0: deeper layers decay less.
          num_layers: layers of the model, attention layers included.
          norm_groups: groups of heads, each normed as one; `None` for each head alone.
          norm_eps: of all norms.
          rope_theta: base of the rotary positions.
          partial_rotary_factor: share of a head's channels that turn.
          dtype: of the weights.
          tensor_axis: mesh axis whose devices each have so many of the heads.

        Raises:
          ValueError: other numbers of key heads or taps, an odd number of channels
            that turn, or heads that the groups do not divide.
        """
        heads = LinearHeads(
            num_v_heads=num_v_heads,
            v_head_dim=v_head_dim,
            num_k_heads=num_k_heads,
            k_head_dim=k_head_dim,
            conv_kernel_size=conv_kernel_size,
        )
        heads.require_equal_heads("GLA")
        norm_groups = num_v_heads if norm_groups is None else norm_groups
        k_dim = heads.k_width // num_v_heads
        rotary_dim = int(k_dim * partial_rotary_factor)
        _check(heads, norm_groups, rotary_dim)
        keys = iter(jax.random.split(key, 3))
        weight = lambda inner, outer: init_linear(next(keys), inner, outer, dtype)
        return cls(
            qkv=weight(hidden_size, 2 * heads.k_width + heads.v_width),
            q_norm=jnp.ones(k_dim, dtype),
            k_norm=jnp.ones(k_dim, dtype),
            gate=weight(hidden_size, heads.v_width),
            norm=jnp.ones(heads.v_width, dtype),
            out=weight(heads.v_width, hidden_size),
            heads=heads,
            norm_groups=norm_groups,
            norm_eps=norm_eps,
            rope_theta=rope_theta,
            rotary_dim=rotary_dim,
            layer_index=layer_index,
            num_layers=num_layers,
            tensor_axis=tensor_axis,
        )

    def mix(self, x, temporal, conv, lanes: Lanes):
        """See the contract."""
        q, k, v = self._inputs(x, lanes)
        slopes = self._slopes().reshape(1, 1, -1, 1)
        decay = jnp.broadcast_to(-slopes, (*q.shape[:3], 1))
        o, temporal = recur(q, k, v, decay, None, temporal, new_tokens(x, lanes))
        groups = (*x.shape[:2], self.norm_groups, -1)
        ones = jnp.ones(self.heads.v_width // self.norm_groups)
        o = rms_norm(o.reshape(groups), ones, self.norm_eps).reshape(*x.shape[:2], -1)
        gate = jax.nn.sigmoid(linear(x, self.gate).astype(jnp.float32))
        o = o * self.norm.astype(jnp.float32)[None, None] * gate
        return linear(o.astype(x.dtype), self.out), temporal, conv

    def _slopes(self):
        """Those of the heads that this device has."""
        heads, axis = self.heads.num_v_heads, self.tensor_axis
        ways = 1 if axis is None else jax.lax.axis_size(axis)
        slopes = decay_slopes(heads * ways, self.layer_index, self.num_layers)
        if axis is None:
            return slopes
        first = jax.lax.axis_index(axis) * heads
        return jax.lax.dynamic_slice(jnp.asarray(slopes), (first,), (heads,))

    def _inputs(self, x, lanes: Lanes):
        """Queries, keys and values: [lanes, tokens, heads, dim] in float32."""
        width = self.heads.k_width
        qkv = linear(x, self.qkv).astype(jnp.float32)
        q, k, v = jnp.split(qkv, [width, 2 * width], axis=-1)
        split = lambda y: y.reshape(*x.shape[:2], self.heads.num_v_heads, -1)
        tokens = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = lanes.start[:, None] + tokens[None]

        def turned(y, weight):
            y = rms_norm(split(y), weight, self.norm_eps)
            return rotary(
                y, positions, theta=self.rope_theta, rotary_dim=self.rotary_dim
            )

        scale = self.q_norm.shape[0] ** -0.5
        return turned(q, self.q_norm) * scale, turned(k, self.k_norm), split(v)


def decay_slopes(num_heads: int, layer_index: int, num_layers: int):
    """What a token takes off the logarithm of a state: float32 [heads], positive.

    ALiBi's slopes, times a factor that falls with depth, from a bit above 1. As
    published, it counts from the layer before: no layer has a decay of none.
    """
    depth = (layer_index - 1) / max(num_layers - 1, 1)
    slopes = [s * (1 - depth + 1e-5) for s in alibi_slopes(num_heads)]
    return np.asarray(slopes, np.float32)


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes 2^(-8 i / heads), i from 1; between those of powers of two for others."""
    if num_heads & (num_heads - 1) == 0:
        return [2.0 ** (-8 * (i + 1) / num_heads) for i in range(num_heads)]
    below = 1 << int(math.log2(num_heads))
    between = alibi_slopes(2 * below)[::2]
    return alibi_slopes(below) + between[: num_heads - below]


def _check(heads: LinearHeads, norm_groups: int, rotary_dim: int) -> None:
    """Refuse what the layer cannot be built with."""
    require(
        heads.conv_kernel_size == 1,
        f"conv_kernel_size={heads.conv_kernel_size}",
        "1 for GLA, which has no convolution",
        "Leave it out.",
    )
    require(
        norm_groups > 0 and heads.v_width % norm_groups == 0,
        f"norm_groups={norm_groups} with {heads.v_width} channels",
        "a number that divides the channels",
        "Read it from the model, where it is called group_norm_size.",
    )
    require(
        rotary_dim % 2 == 0,
        f"{rotary_dim} channels of a head that turn",
        "an even number, as they turn in pairs",
        "Choose another partial_rotary_factor or k_head_dim.",
    )
