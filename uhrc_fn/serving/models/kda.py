"""KDA, Kimi Delta Attention: the delta rule with a decay for each channel of the key.

Kimi Linear, https://arxiv.org/abs/2510.26692, section 3 (recurrence) and section 4
(parametrisation). For each head, with x the hidden state of a token:

    q, k = L2Norm(SiLU(ShortConv(x W)))     v = SiLU(ShortConv(x W_v))
    g    = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias)          one a key channel
    beta = sigmoid(x W_b)
    S_t  = (I - beta k k^T) diag(exp(g)) S_{t-1} + beta k v^T
    y    = (sigmoid(x W_g1 W_g2) * RMSNorm(S_t^T q / sqrt(k_dim))) W_o
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


class KDA(LinearRecurrentAttnBackend):
    """A KDA layer; as many key heads as value heads."""

    qkv: Float[Array, " hidden channels"]
    conv: Float[Array, " channels kernel"]
    decay_down: Float[Array, " hidden rank"]
    decay_up: Float[Array, " rank k_width"]
    a_log: Float[Array, " heads"]
    dt_bias: Float[Array, " k_width"]
    beta: Float[Array, " hidden heads"]
    gate_down: Float[Array, " hidden rank"]
    gate_up: Float[Array, " rank v_width"]
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
        norm_eps: float = 1e-5,
        dtype="float32",
    ) -> "KDA":
        """A layer with random weights; its place in the model has no meaning here.

        Raises:
          ValueError: fewer key heads than value heads, or no convolution.
        """
        del layer_index, num_layers
        heads = LinearHeads(
            num_v_heads=num_v_heads,
            v_head_dim=v_head_dim,
            num_k_heads=num_k_heads,
            k_head_dim=k_head_dim,
            conv_kernel_size=conv_kernel_size,
        )
        heads.require_equal_heads("KDA")
        keys = iter(jax.random.split(key, 10))
        weight = lambda inner, outer: init_linear(next(keys), inner, outer, dtype)
        return cls(
            qkv=weight(hidden_size, 2 * heads.k_width + heads.v_width),
            conv=init_conv(next(keys), heads, dtype),
            decay_down=weight(hidden_size, v_head_dim),
            decay_up=weight(v_head_dim, heads.k_width),
            a_log=init_a_log(next(keys), num_v_heads),
            dt_bias=init_dt_bias(next(keys), heads.k_width),
            beta=weight(hidden_size, num_v_heads),
            gate_down=weight(hidden_size, v_head_dim),
            gate_up=weight(v_head_dim, heads.v_width),
            norm=jnp.ones(v_head_dim, dtype),
            out=weight(heads.v_width, hidden_size),
            heads=heads,
            norm_eps=norm_eps,
        )

    def mix(self, x, temporal, conv, lanes: Lanes):
        """See the contract."""
        heads = self.heads
        split = lambda y: y.reshape(*x.shape[:2], heads.num_v_heads, -1)
        per_channel = lambda y: y.reshape(1, 1, heads.num_v_heads, -1)
        q, k, v, conv = delta_inputs(
            linear(x, self.qkv), self.conv, conv, lanes.num_new, heads
        )
        decay = log_decay(
            split(linear(linear(x, self.decay_down), self.decay_up)),
            per_channel(self.a_log),
            per_channel(self.dt_bias),
        )
        beta = jax.nn.sigmoid(linear(x, self.beta).astype(jnp.float32))
        o, temporal = recur(q, k, v, decay, beta, temporal, new_tokens(x, lanes))
        gate = split(linear(linear(x, self.gate_down), self.gate_up))
        o = rms_norm(o, self.norm, self.norm_eps) * jax.nn.sigmoid(
            gate.astype(jnp.float32)
        )
        y = linear(o.reshape(*x.shape[:2], -1).astype(x.dtype), self.out)
        return y, temporal, conv
