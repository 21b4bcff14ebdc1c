"""Grouped-query attention over paged KV, of all tokens or of a sliding window."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...pools.kv import KVPool, SWAKVPool
from ..lanes import Lanes
from .config import ModelConfig
from .layers import init_linear, linear, rotary
from .norm import rms_norm
from .paging import attends, locations_of, positions_of, span_of


def masked_softmax(
    scores: Float[Array, " *batch keys"], mask: Bool[Array, " *batch keys"]
):
    """Softmax in float32 over the keys of `mask`; zeros where there is none."""
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    # An idle lane attends to nothing: its highest score must not be -inf.
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)


class GQAttention(eqx.Module):
    """Query heads that share key and value heads, https://arxiv.org/abs/2305.13245.

    With a window a token attends to the last `window` tokens, its own included.
    """

    query: Float[Array, " hidden queries"]
    key: Float[Array, " hidden keys"]
    value: Float[Array, " hidden keys"]
    out: Float[Array, " queries hidden"]
    query_norm: Float[Array, " head_dim"] | None
    key_norm: Float[Array, " head_dim"] | None
    config: ModelConfig = eqx.field(static=True)
    window: int = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, " lanes tokens hidden"], kv, layer: int, lanes: Lanes
    ):
        """Write the KV of new tokens, then attend to the lane's pages.

        Returns:
          ``(y, kv)``: [lanes, tokens, hidden], and the pool.
        """
        q, k, v = self._heads(x, lanes)
        kv, (keys, values), span = self._write_and_read(kv, layer, lanes, k, v)
        c = self.config
        group = c.num_heads // c.num_kv_heads
        q = q.reshape(*q.shape[:2], c.num_kv_heads, group, c.head_dim)
        mask = attends(lanes, span, self.window)[:, None, None]
        scores = jnp.einsum(
            "ltkgd,lskd->lkgts", q, keys, preferred_element_type=jnp.float32
        )
        weights = masked_softmax(
            scores * c.head_dim**-0.5, jnp.broadcast_to(mask, scores.shape)
        )
        y = jnp.einsum("lkgts,lskd->ltkgd", weights.astype(x.dtype), values)
        return linear(y.reshape(*x.shape[:2], -1), self.out), kv

    def _heads(self, x, lanes: Lanes):
        """Queries, keys and values by head, turned to their positions."""
        c = self.config
        split = lambda y: y.reshape(*x.shape[:2], -1, c.head_dim)
        q, k = split(linear(x, self.query)), split(linear(x, self.key))
        if self.query_norm is not None and self.key_norm is not None:
            q = rms_norm(q, self.query_norm, c.norm_eps)
            k = rms_norm(k, self.key_norm, c.norm_eps)
        at = positions_of(lanes)
        turn = lambda y: rotary(y, at, theta=c.rope_theta, rotary_dim=c.rotary_dim)  # type: ignore[arg-type]
        return turn(q), turn(k), split(linear(x, self.value))

    def _write_and_read(self, kv, layer: int, lanes: Lanes, k, v):
        """The pool with the new tokens, and keys and values of the pages to read."""
        table = lanes.swa_pages if self.window else lanes.pages
        pool = kv
        if isinstance(kv, SWAKVPool):
            pool = kv.swa if self.window else kv.full
        size = pool.config.page_size
        location = locations_of(lanes, table, size).reshape(-1)
        stored = lambda y: y.reshape(-1, *y.shape[2:]).astype(pool.config.dtype)
        pool = pool.set_kv_buffer(layer, location, stored(k), stored(v))
        span = span_of(lanes, table, size, self.window)
        # What others left in pages that this lane does not hold, NaN too, adds nothing.
        is_held = (span.positions >= 0)[..., None, None]
        flat = lambda y: y.reshape(*span.positions.shape, *y.shape[3:]).astype(k.dtype)
        keys, values = (flat(y) for y in pool.read_pages(layer, span.pages))
        values = jnp.where(is_held, values, jnp.zeros_like(values))
        return _with_pool(kv, pool, self.window), (keys, values), span


def _with_pool(kv, pool: KVPool, window: int):
    """Put the pool of one kind of layer back where it was taken from."""
    if not isinstance(kv, SWAKVPool):
        return pool
    return SWAKVPool(kv.full, pool) if window else SWAKVPool(pool, kv.swa)


def init_gqa(key, config: ModelConfig, *, window: int = 0) -> GQAttention:
    """A layer with random weights."""
    c = config
    q, k, v, out = jax.random.split(key, 4)
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norm = lambda: jnp.ones((c.head_dim,), c.dtype) if c.qk_norm else None
    return GQAttention(
        query=init_linear(q, c.hidden_size, queries, c.dtype),
        key=init_linear(k, c.hidden_size, keys, c.dtype),
        value=init_linear(v, c.hidden_size, keys, c.dtype),
        out=init_linear(out, queries, c.hidden_size, c.dtype),
        query_norm=norm(),
        key_norm=norm(),
        config=c,
        window=window,
    )
