"""The models: against dense references, and against themselves in other pieces."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.attention import init_gqa
from uhrc_fn.serving.models.config import ModelConfig, small_config
from uhrc_fn.serving.models.mla import init_mla
from uhrc_fn.serving.models.model import forward, init_model, init_pools

FAMILIES = ("swa-gqa", "gqa", "mla")
LANES, LENGTH, WINDOW = 3, 24, 9
SHARED = {"num_pages": 80, "num_swa_pages": 80, "num_slots": 5}
step = jax.jit(forward, donate_argnums=1)
draw = jax.jit(init_model, static_argnums=1)


def config_of(family: str, **changes) -> ModelConfig:
    window = {"sliding_window": WINDOW} if family == "swa-gqa" else {}
    return small_config(family, vocab_size=97, **window, **changes)


def tables(page_size: int, *, first: int = 1) -> np.ndarray:
    """A table of pages for each lane; no two hold the same, and none in order."""
    columns = -(-LENGTH // page_size)
    pages = np.arange(first, first + LANES * columns, dtype=np.int32)
    return np.random.default_rng(7).permutation(pages).reshape(LANES, columns)


def lanes_of(tokens, start, num_new, page_size: int, *, width: int = LENGTH, **changes):
    """Lanes that compute `tokens[lane][start : start + num_new]`, padded to `width`."""
    start, num_new = np.asarray(start, np.int32), np.asarray(num_new, np.int32)
    ids = np.zeros((LANES, width), np.int32)
    for lane, (begin, count) in enumerate(zip(start, num_new, strict=True)):
        ids[lane, :count] = tokens[lane][begin : begin + count]
    is_idle = num_new[:, None] == 0
    zeros = jnp.zeros(LANES, jnp.int32)
    lanes = Lanes(
        token_ids=jnp.asarray(ids),
        start=jnp.asarray(start),
        num_new=jnp.asarray(num_new),
        pages=jnp.asarray(np.where(is_idle, 0, tables(page_size))),
        swa_pages=jnp.asarray(np.where(is_idle, 0, tables(page_size, first=2))),
        slots=jnp.where(jnp.asarray(num_new) > 0, jnp.arange(1, LANES + 1), 0),
        track=TrackMetadata(zeros, zeros > 0),
    )
    return dataclasses.replace(lanes, **changes)


def prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 97, (LANES, LENGTH)).astype(np.int32)


def serve(config, chunks, page_size: int, *, width: int = LENGTH, **changes):
    """Logits of each lane after the last of ``chunks``, and the pools.

    Args:
      config: of the model.
      chunks: of ``(start, num_new)``, one entry of each a lane.
      page_size: tokens a page.
      width: tokens of a forward.
      changes: fields of `Lanes` to set in every chunk.
    """
    model = draw(jax.random.key(1), config)
    pools = init_pools(config, page_size=page_size, **SHARED)
    logits = np.zeros((LANES, config.vocab_size), np.float32)
    for start, num_new in chunks:
        lanes = lanes_of(prompts(), start, num_new, page_size, width=width, **changes)
        pools, new = step(model, pools, lanes)
        logits = np.where(np.asarray(num_new)[:, None] > 0, np.asarray(new), logits)
    return logits, jax.device_get(pools)


# Dense references.


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


# One forward, in pieces.

ENDS = np.array([LENGTH, 17, 16])
FAMILY_AND_PAGE = [(f, p) for f in FAMILIES for p in (1, 16)]
CLOSE = {"rtol": 0, "atol": 5e-5}


def whole(config, page_size):
    return serve(config, [(np.zeros(LANES), ENDS)], page_size)


@pytest.mark.parametrize(("family", "page_size"), FAMILY_AND_PAGE)
def test_chunks_and_steps_are_one_forward(family, page_size):
    config = config_of(family)
    wanted, at_once = whole(config, page_size)
    # Lanes are cut at places of their own; the last one waits for a while.
    cuts = [np.zeros(LANES), np.array([5, 16, 0]), np.array([17, 16, 7]), ENDS]
    chunks = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    by_chunk, chunked = serve(config, chunks, page_size)
    np.testing.assert_allclose(by_chunk, wanted, **CLOSE)
    steps = [(np.minimum(t, ENDS), (t < ENDS) * 1) for t in range(LENGTH)]
    by_step, stepped = serve(config, steps, page_size, width=1)
    np.testing.assert_allclose(by_step, wanted, **CLOSE)
    for pools in (chunked, stepped):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), pools, at_once
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_do_not_influence_each_other(family):
    config, page_size = config_of(family), 4
    together, pools = whole(config, page_size)
    for lane in range(LANES):
        ends = np.where(np.arange(LANES) == lane, ENDS, 0)
        alone, own = serve(config, [(np.zeros(LANES), ends)], page_size)
        np.testing.assert_array_equal(alone[lane], together[lane])
        # And what it wrote is what it wrote before, and nothing but that.
        written = jax.tree.map(lambda a, b: np.where(a != 0, b, 0), own, pools)
        jax.tree.map(np.testing.assert_array_equal, written, own)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_others_left_behind_is_not_read(family):
    config, page_size = config_of(family), 4
    model = draw(jax.random.key(1), config)
    lanes = lanes_of(prompts(), np.zeros(LANES), ENDS, page_size)
    fill = lambda b: jnp.full_like(b, jnp.nan).at[0].set(0.0)
    clean = init_pools(config, page_size=page_size, **SHARED)
    dirty = jax.tree.map(fill, clean)
    _, wanted = step(model, clean, lanes)
    _, got = step(model, dirty, lanes)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_idle_lanes_write_nothing(family):
    config, page_size = config_of(family), 4
    _, before = whole(config, page_size)
    model = draw(jax.random.key(1), config)
    idle = lanes_of(prompts(), ENDS, np.zeros(LANES), page_size)
    after, logits = step(model, jax.device_put(before), idle)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_page_changes_the_logits(family):
    config, page_size = config_of(family), 4
    model = draw(jax.random.key(1), config)

    def second_chunk(**changes):
        first = (np.zeros(LANES), ENDS - 8)
        _, pools = serve(config, [first], page_size)
        lanes = lanes_of(prompts(), ENDS - 8, np.full(LANES, 8), page_size, **changes)
        return np.asarray(step(model, jax.device_put(pools), lanes)[1])

    right = second_chunk()
    kinds = {"pages": tables(page_size)}
    if config.has("swa"):
        kinds["swa_pages"] = tables(page_size, first=2)
    for name, table in kinds.items():
        shifted = table.copy()
        # The page before the new tokens: inside every window.
        shifted[0, (LENGTH - 8) // page_size - 1] += 1
        wrong = second_chunk(**{name: jnp.asarray(shifted)})
        assert np.abs(wrong[0] - right[0]).max() > 1e-2
        np.testing.assert_array_equal(wrong[1:], right[1:])


def test_a_window_reads_no_page_that_slid_out():
    config, page_size = config_of("swa-gqa"), 4
    steps = [(np.minimum(t, ENDS), (t < ENDS) * 1) for t in range(LENGTH)]
    wanted, _ = serve(config, steps, page_size, width=1)
    model = draw(jax.random.key(1), config)
    pools = init_pools(config, page_size=page_size, **SHARED)
    for start, num_new in steps:
        lanes = lanes_of(prompts(), start, num_new, page_size, width=1)
        first = np.maximum(start - WINDOW + 1, 0) // page_size
        is_out = np.arange(LENGTH // page_size) < first[:, None]
        lanes = dataclasses.replace(
            lanes, swa_pages=jnp.where(is_out, 0, lanes.swa_pages)
        )
        pools, logits = step(model, pools, lanes)
    np.testing.assert_array_equal(logits[0], wanted[0])


# What is compiled.

LARGE = {"num_pages": 4098, "num_swa_pages": 4098, "num_slots": 4098}


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_pools_are_written_in_place(family, width):
    config = config_of(family)
    model = jax.eval_shape(lambda key: init_model(key, config), jax.random.key(0))
    pools = jax.eval_shape(lambda: init_pools(config, page_size=4, **LARGE))
    lanes = lanes_of(prompts(), np.zeros(LANES), np.ones(LANES), 4, width=width)
    compiled = step.lower(model, pools, lanes).compile()
    memory = compiled.memory_analysis()
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    assert memory.alias_size_in_bytes >= pools.memory_bytes
    assert memory.temp_size_in_bytes < smallest
    rows = "4099|16396"  # of a buffer, by page or slot, and by token
    assert not re.findall(rf"= \w+\[({rows}),[\d,]*\]\S* copy\(", compiled.as_text())


def test_half_precision_is_near():
    wide, half = config_of("gqa"), config_of("gqa", dtype="bfloat16")
    model = draw(jax.random.key(1), wide)
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(1), half))
    leaves = [leaf.astype(jnp.bfloat16) for leaf in jax.tree.leaves(model)]
    rounded = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    lanes = lanes_of(prompts(), np.zeros(LANES), ENDS, 4)
    _, got = step(rounded, init_pools(half, page_size=4, **SHARED), lanes)
    _, wanted = step(model, init_pools(wide, page_size=4, **SHARED), lanes)
    assert got.dtype == jnp.float32
    # Eight bits of mantissa through four layers; logits are of size 1.
    np.testing.assert_allclose(got, wanted, atol=0.1)
    assert np.abs(got - wanted).max() > 1e-3
