"""Multi-head latent attention over paged latents, in its absorbed form.

https://arxiv.org/abs/2405.04434, section 2.1. A token caches one latent for all heads
and one key for the rotary part. What would expand a latent to keys and values of heads
is applied to the query, and to the sum of latents, instead: attention then reads the
cache as it is.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...pools.mla import MLAPool
from ..lanes import Lanes
from .attention import masked_softmax
from .config import ModelConfig
from .layers import init_linear, linear, rotary
from .norm import rms_norm
from .paging import attends, locations_of, positions_of, span_of


class MLAttention(eqx.Module):
    """Heads that share a latent and a rotary key."""

    query: Float[Array, " hidden queries"]
    latent: Float[Array, " hidden latent_and_rope"]
    latent_norm: Float[Array, " kv_lora_rank"]
    key_up: Float[Array, " kv_lora_rank heads nope_head_dim"]
    value_up: Float[Array, " kv_lora_rank heads v_head_dim"]
    out: Float[Array, " values hidden"]
    config: ModelConfig = eqx.field(static=True)

    def __call__(
        self,
        x: Float[Array, " lanes tokens hidden"],
        kv: MLAPool,
        layer: int,
        lanes: Lanes,
    ):
        """Write the latents of new tokens, then attend to the lane's pages.

        Returns:
          ``(y, kv)``: [lanes, tokens, hidden], and the pool.
        """
        q_nope, q_rope = self.queries(x, lanes)
        latent, rope = self.latents(x, lanes)
        size = kv.config.page_size
        location = locations_of(lanes, lanes.pages, size).reshape(-1)
        stored = lambda y: y.reshape(-1, y.shape[-1]).astype(kv.config.dtype)
        kv = kv.set_kv_buffer(layer, location, stored(latent), stored(rope))
        span = span_of(lanes, lanes.pages, size)
        # What others left in pages that this lane does not hold, NaN too, adds nothing.
        is_held = (span.positions >= 0)[..., None]
        flat = lambda y: y.reshape(*span.positions.shape, -1).astype(x.dtype)
        latents, ropes = (flat(y) for y in kv.read_pages(layer, span.pages))
        latents = jnp.where(is_held, latents, jnp.zeros_like(latents))
        mask = attends(lanes, span)[:, None]
        return self.attend(q_nope, q_rope, latents, ropes, mask), kv

    def queries(self, x, lanes: Lanes):
        """What meets the latents, and what meets the rotary keys, by head."""
        c = self.config
        q = linear(x, self.query).reshape(*x.shape[:2], c.num_heads, -1)
        return q[..., : c.nope_head_dim], self._turn(q[..., c.nope_head_dim :], lanes)

    def latents(self, x, lanes: Lanes):
        """What each token caches: latent and rotary key."""
        c = self.config
        y = linear(x, self.latent)
        rope = self._turn(y[..., None, c.kv_lora_rank :], lanes)[..., 0, :]
        return rms_norm(y[..., : c.kv_lora_rank], self.latent_norm, c.norm_eps), rope

    def attend(self, q_nope, q_rope, latents, ropes, mask):
        """Attend to cached tokens: [lanes, tokens, hidden].

        Args:
          q_nope: [lanes, tokens, heads, nope_head_dim].
          q_rope: [lanes, tokens, heads, rope_head_dim].
          latents: [lanes, keys, kv_lora_rank].
          ropes: [lanes, keys, rope_head_dim].
          mask: bool [lanes, 1, tokens, keys].
        """
        c = self.config
        wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        absorbed = jnp.einsum("lthn,rhn->lthr", q_nope, self.key_up)
        scores = wide("lthr,lsr->lhts", absorbed, latents)
        scores = scores + wide("lthp,lsp->lhts", q_rope, ropes)
        scores = scores * (c.nope_head_dim + c.rope_head_dim) ** -0.5
        weights = masked_softmax(scores, jnp.broadcast_to(mask, scores.shape))
        summed = jnp.einsum("lhts,lsr->lthr", weights.astype(latents.dtype), latents)
        values = jnp.einsum("lthr,rhv->lthv", summed, self.value_up)
        return linear(values.reshape(*values.shape[:2], -1), self.out)

    def _turn(self, y, lanes: Lanes):
        c = self.config
        if not c.mla_rope:
            return y
        at = positions_of(lanes)
        return rotary(y, at, theta=c.rope_theta, rotary_dim=c.rope_head_dim)


def init_mla(key, config: ModelConfig) -> MLAttention:
    """A layer with random weights."""
    c = config
    q, latent, up, value, out = jax.random.split(key, 5)
    heads, rank = c.num_heads, c.kv_lora_rank
    queries = heads * (c.nope_head_dim + c.rope_head_dim)
    expand = lambda key, width: init_linear(key, rank, heads * width, c.dtype).reshape(
        rank, heads, width
    )
    return MLAttention(
        query=init_linear(q, c.hidden_size, queries, c.dtype),
        latent=init_linear(latent, c.hidden_size, rank + c.rope_head_dim, c.dtype),
        latent_norm=jnp.ones((rank,), c.dtype),
        key_up=expand(up, c.nope_head_dim),
        value_up=expand(value, c.v_head_dim),
        out=init_linear(out, heads * c.v_head_dim, c.hidden_size, c.dtype),
        config=c,
    )
