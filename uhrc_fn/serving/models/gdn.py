"""GDN, Gated DeltaNet: the delta rule with one decay a head.

https://arxiv.org/abs/2412.06464, section 3, in the form of Qwen3-Next and Qwen3.5,
whose value heads may be more than the key heads and of another width. For each value
head, with x the hidden state of a token:

    q, k = L2Norm(SiLU(ShortConv(x W)))     v = SiLU(ShortConv(x W_v))
    g    = -exp(A_log) softplus(x W_a + dt_bias)                one a value head
    beta = sigmoid(x W_b)
    S_t  = exp(g) (I - beta k k^T) S_{t-1} + beta k v^T
    y    = (SiLU(x W_z) * RMSNorm(S_t^T q / sqrt(k_dim))) W_o

Value heads that follow one another share a key head.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..lanes import Lanes
from .delta import delta_inputs, init_a_log, init_conv, init_dt_bias, log_decay
from .layers import init_linear, linear
from .linear_attention import LinearHeads, LinearRecurrentAttnBackend, new_tokens
from .norm import rms_norm
from .recurrence import recur


class GDN(LinearRecurrentAttnBackend):
    """A Gated DeltaNet layer."""

    qkv: Float[Array, " hidden channels"]
    conv: Float[Array, " channels kernel"]
    decay: Float[Array, " hidden v_heads"]
    a_log: Float[Array, " v_heads"]
    dt_bias: Float[Array, " v_heads"]
    beta: Float[Array, " hidden v_heads"]
    gate: Float[Array, " hidden v_width"]
    norm: Float[Array, " v_dim"]
    out: Float[Array, " v_width hidden"]
    heads: LinearHeads = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

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
        conv_kernel_size: int = 4,
        layer_index: int = 0,
        num_layers: int = 1,
        norm_eps: float = 1e-6,
        dtype="float32",
    ) -> "GDN":
        """A layer with random weights; its place in the model has no meaning here.

        Raises:
          ValueError: key heads that do not divide the value heads, or no convolution.
        """
        del layer_index, num_layers
        heads = LinearHeads(
            num_v_heads=num_v_heads,
            v_head_dim=v_head_dim,
            num_k_heads=num_k_heads,
            k_head_dim=k_head_dim,
            conv_kernel_size=conv_kernel_size,
        )
        keys = iter(jax.random.split(key, 8))
        weight = lambda inner, outer: init_linear(next(keys), inner, outer, dtype)
        return cls(
            qkv=weight(hidden_size, 2 * heads.k_width + heads.v_width),
            conv=init_conv(next(keys), heads, dtype),
            decay=weight(hidden_size, num_v_heads),
            a_log=init_a_log(next(keys), num_v_heads),
            dt_bias=init_dt_bias(next(keys), num_v_heads),
            beta=weight(hidden_size, num_v_heads),
            gate=weight(hidden_size, heads.v_width),
            norm=jnp.ones(v_head_dim, dtype),
            out=weight(heads.v_width, hidden_size),
            heads=heads,
            norm_eps=norm_eps,
        )

    def mix(self, x, temporal, conv, lanes: Lanes):
        """See the contract."""
        heads = self.heads
        q, k, v, conv = delta_inputs(
            linear(x, self.qkv), self.conv, conv, lanes.num_new, heads
        )
        per_head = lambda y: y.reshape(1, 1, -1)
        decay = log_decay(
            linear(x, self.decay), per_head(self.a_log), per_head(self.dt_bias)
        )[..., None]
        beta = jax.nn.sigmoid(linear(x, self.beta).astype(jnp.float32))
        o, temporal = recur(q, k, v, decay, beta, temporal, new_tokens(x, lanes))
        gate = linear(x, self.gate).reshape(o.shape).astype(jnp.float32)
        o = rms_norm(o, self.norm, self.norm_eps) * jax.nn.silu(gate)
        y = linear(o.reshape(*x.shape[:2], -1).astype(x.dtype), self.out)
        return y, temporal, conv
