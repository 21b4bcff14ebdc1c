"""Attention layers on paged KV against dense references in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import LANES, LENGTH, SHARED, WINDOW, lanes_of, prompts

from uhrc_fn.serving.models.attention import init_gqa
from uhrc_fn.serving.models.config import small_config
from uhrc_fn.serving.models.mla import init_mla
from uhrc_fn.serving.models.model import init_pools
from uhrc_fn.serving.models.paging import span_of


def turned(x, theta, rotary_dim):
    """Rotary positions of [tokens, heads, dim], pair by pair."""
    y = x.copy()
    half = rotary_dim // 2
    for position in range(x.shape[0]):
        for i in range(half):
            angle = position / theta ** (2 * i / rotary_dim)
            cos, sin = np.cos(angle), np.sin(angle)
            a, b = x[position, :, i], x[position, :, i + half]
            y[position, :, i] = a * cos - b * sin
            y[position, :, i + half] = b * cos + a * sin
    return y


def normed(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def attended(q, k, v, window, scale):
    """Causal attention of [tokens, heads, dim], one query head at a time."""
    tokens, heads, _ = q.shape
    out = np.zeros((tokens, heads, v.shape[-1]))
    for t in range(tokens):
        first = max(0, t - window + 1) if window else 0
        for h in range(heads):
            g = h * k.shape[1] // heads
            scores = k[first : t + 1, g] @ q[t, h] * scale
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[first : t + 1, g]
    return out


def one_layer(init, config, kind: str, page_size: int):
    """A layer's output for random hidden states, in two chunks, and both."""
    layer = init(jax.random.key(3), config)
    config = dataclasses.replace(config, layers=(kind, *config.layers[1:]))
    kv = init_pools(config, page_size=page_size, **SHARED).kv
    x = jax.random.normal(jax.random.key(4), (LANES, LENGTH, config.hidden_size))
    run = jax.jit(lambda x, kv, lanes: layer(x, kv, 0, lanes))
    cut, done = 13, np.zeros(LANES)
    lanes = lanes_of(prompts(), done, done + cut, page_size)
    first, kv = run(x, kv, lanes)
    later = jnp.pad(x[:, cut:], ((0, 0), (0, cut), (0, 0)))
    lanes = lanes_of(prompts(), done + cut, done + LENGTH - cut, page_size)
    second, kv = run(later, kv, lanes)
    y = np.concatenate([first[:, :cut], second[:, : LENGTH - cut]], axis=1)
    return layer, np.asarray(x, np.float64), y


GQA_CASES = {
    "all tokens": ({}, 0, 4),
    "page of one": ({}, 0, 1),
    "window": ({}, WINDOW, 4),
    "window of one page": ({}, 4, 4),
    "window of one token": ({}, 1, 4),
    "window, page of one": ({}, WINDOW, 1),
    "window beyond all": ({}, 100, 16),
    "qk norm": ({"qk_norm": True}, 0, 4),
    "half turns": ({"rotary_dim": 8}, 0, 4),
}


@pytest.mark.parametrize("name", GQA_CASES)
def test_gqa_is_dense_attention(name):
    changes, window, page_size = GQA_CASES[name]
    family, kind = ("swa-gqa", "swa") if window else ("gqa", "gqa")
    c = small_config(family, **changes)
    init = lambda key, config: init_gqa(key, config, window=window)
    layer, x, y = one_layer(init, c, kind, page_size)
    heads = lambda row, weight: (row @ np.asarray(weight)).reshape(LENGTH, -1, 16)
    for row, got in zip(x, y, strict=True):
        q, k, v = (heads(row, w) for w in (layer.query, layer.key, layer.value))
        if c.qk_norm:
            q, k = normed(q, c.norm_eps), normed(k, c.norm_eps)
        q, k = (turned(h, c.rope_theta, c.rotary_dim) for h in (q, k))
        wanted = attended(q, k, v, window, 16**-0.5).reshape(LENGTH, -1)
        np.testing.assert_allclose(got, wanted @ np.asarray(layer.out), atol=2e-5)


@pytest.mark.parametrize(("mla_rope", "page_size"), [(True, 4), (False, 4), (True, 1)])
def test_absorbed_mla_is_the_expanded_one(mla_rope, page_size):
    c = small_config("mla", mla_rope=mla_rope)
    layer, x, y = one_layer(init_mla, c, "mla", page_size)
    up = lambda latent, weight: np.einsum("tr,rhd->thd", latent, np.asarray(weight))
    turn = lambda h: turned(h, c.rope_theta, c.rope_head_dim) if mla_rope else h
    for row, got in zip(x, y, strict=True):
        q = (row @ np.asarray(layer.query)).reshape(LENGTH, c.num_heads, -1)
        q = np.concatenate([q[..., :16], turn(q[..., 16:])], axis=-1)
        cached = row @ np.asarray(layer.latent)
        latent, rope = normed(cached[:, :32], c.norm_eps), turn(cached[:, None, 32:])
        rope = np.repeat(rope, c.num_heads, axis=1)
        k = np.concatenate([up(latent, layer.key_up), rope], axis=-1)
        wanted = attended(q, k, up(latent, layer.value_up), 0, 24**-0.5)
        wanted = wanted.reshape(LENGTH, -1) @ np.asarray(layer.out)
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("width", "page_size", "count"), [(1, 4, 3), (4, 4, 4), (1, 1, 9), (24, 4, 6)]
)
def test_a_window_reads_as_many_pages_as_it_can_touch(width, page_size, count):
    lanes = lanes_of(prompts(), [0, 9, 17], [1, 1, 1], page_size, width=width)
    span = span_of(lanes, lanes.swa_pages, page_size, WINDOW)
    assert span.pages.shape == (LANES, count)
    assert span_of(lanes, lanes.pages, page_size).pages is lanes.pages
