"""The models against themselves in other pieces, and what they compile to."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    LANES,
    LENGTH,
    SHARED,
    WINDOW,
    config_of,
    draw,
    lanes_of,
    prompts,
    serve,
    step,
    tables,
)

from uhrc_fn.serving.models.config import FAMILIES
from uhrc_fn.serving.models.model import init_model, init_pools

# One forward, in pieces.

ENDS = np.array([LENGTH, 17, 16])
FAMILY_AND_PAGE = [
    pytest.param(f, p, marks=pytest.mark.slow if p == 1 and f != "kda-mla" else ())
    for f in FAMILIES
    for p in (1, 16)
]
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
    assert not re.findall(
        rf"= \w+\[({rows}),[\d,]*\]\S* copy\(", compiled.as_text() or ""
    )


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


@pytest.mark.parametrize("family", ["gqa", "kda-mla"])
def test_half_precision_in_pieces_is_near_one_forward(family):
    """Where bf16 differs: a sum over a chunk is taken in another order, and rounded.

    What a layer adds is rounded to 8 bits once more or once less, so a logit of size 1
    moves by a few units of 2^-8; an argmax may fall on another token of equal rank.
    """
    config = config_of(family, dtype="bfloat16")
    wanted, _ = whole(config, 4)
    cuts = [np.zeros(LANES), np.array([5, 16, 0]), np.array([17, 16, 7]), ENDS]
    chunks = [(a, b - a) for a, b in itertools.pairwise(cuts)]
    got, _ = serve(config, chunks, 4)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=8 * 2.0**-8)
