"""KDA, GDN and GLA: chunks, steps, published equations, cut forwards and the pool."""

import functools

import jax
import jax.numpy as jnp
import linear_reference
import numpy as np
import pytest

from uhrc_fn.pools.recurrent_state import (
    RecurrentStatePool,
    init_recurrent_state_pool,
)
from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.delta import init_a_log, init_dt_bias
from uhrc_fn.serving.models.gdn import GDN
from uhrc_fn.serving.models.gla import GLA, alibi_slopes, decay_slopes
from uhrc_fn.serving.models.kda import KDA
from uhrc_fn.serving.models.recurrence import recur, recur_chunks, recur_steps
from uhrc_fn.serving.models.short_conv import short_conv

HIDDEN, TOKENS, SLOTS, LAYER = 24, 300, 6, 2
CASES = {
    "kda": (KDA, {"num_v_heads": 2, "v_head_dim": 8}),
    "gdn": (
        GDN,
        {"num_v_heads": 4, "v_head_dim": 8, "num_k_heads": 2, "k_head_dim": 6},
    ),
    "gla": (
        GLA,
        {"num_v_heads": 4, "v_head_dim": 8, "layer_index": 2, "num_layers": 5}
        | {"norm_groups": 2, "rope_theta": 100.0},
    ),
}
FAMILIES = pytest.mark.parametrize("family", CASES)

# Float32 against float64, or one order of sums against another: outputs are of order
# 1 and the errors seen below 4e-6. What the planted faults change is of order 0.1.
CLOSE = 2e-5


@functools.cache
def layer_of(family, dtype="float32"):
    cls, settings = CASES[family]
    return cls.init(jax.random.key(3), hidden_size=HIDDEN, dtype=dtype, **settings)


@functools.cache
def inputs(count=3):
    shape = (count, TOKENS, HIDDEN)
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def empty_pool(family, conv_dtype="float32"):
    config = layer_of(family).recurrent_config(SLOTS, (0, LAYER), conv_dtype=conv_dtype)
    return init_recurrent_state_pool(config)


def used_pool(family, seed=0):
    """A pool whose slots all hold something, also zeros with a sign."""
    rng = np.random.default_rng(seed)

    def fill(buffer):
        rows = rng.standard_normal(buffer.shape) * rng.integers(0, 2, buffer.shape)
        rows[0] = 0
        return jnp.asarray(rows, buffer.dtype)

    return jax.tree.map(fill, empty_pool(family))


def lanes_of(start, num_new, slots, tracks=None, tokens=TOKENS):
    count = len(start)
    tracks = np.zeros(count, np.int32) if tracks is None else np.int32(tracks)
    return Lanes(
        token_ids=np.zeros((count, tokens), np.int32),
        start=np.int32(start),
        num_new=np.int32(num_new),
        pages=np.zeros((count, 0), np.int32),
        swa_pages=np.zeros((count, 0), np.int32),
        slots=np.int32(slots),
        track=TrackMetadata(tracks, tracks > 0),
    )


@jax.jit
def forward(layer, x, states, lanes):
    return layer(x, states, LAYER, lanes)


def run_cut(family, lengths, slot, states, x, between=lambda states: states):
    """One request's tokens in forwards of the given lengths; one of 1 decodes."""
    outputs, done = [], 0
    for length in lengths:
        tokens = 1 if length == 1 else TOKENS
        part = np.zeros((3, tokens, HIDDEN), np.float32)
        part[1, :length] = x[done : done + length]
        lanes = lanes_of([0, done, 0], [0, length, 0], [0, slot, 0], tokens=tokens)
        y, states = forward(layer_of(family), part, between(states), lanes)
        outputs.append(np.asarray(y)[1, :length])
        done += length
    return np.concatenate(outputs), states


def row(states: RecurrentStatePool, slot, layer_at=1):
    """What a slot holds in the layer under test: temporal, and conv if there is one."""
    buffers = [states.temporal[layer_at], *states.conv[layer_at : layer_at + 1]]
    return [np.asarray(buffer[slot]) for buffer in buffers]


def assert_bits(got, wanted):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(
            np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
        )


def assert_close(got, wanted, tolerance=CLOSE):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def distance(got, wanted):
    return float(np.max(np.abs(np.asarray(got) - np.asarray(wanted))))


# The recurrence itself


def recurrence_inputs(kind, strength, tokens=150):
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.standard_normal((3, tokens, 2, *shape))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    decay = -strength * np.exp(2 * draw(6 if kind == "channel" else 1))
    beta = None if kind == "plain" else 1 / (1 + np.exp(-2 * draw()))
    state = rng.standard_normal((3, 2, 6, 10))
    parts = (unit(draw(6)), unit(draw(6)), draw(10), decay, beta, state)
    return jax.tree.map(np.float32, parts)


@functools.cache
def in_chunks(chunk):
    return jax.jit(functools.partial(recur_chunks, chunk=chunk))


@pytest.mark.parametrize(
    ("kind", "chunk"), [("channel", 16), ("head", 64), ("plain", 32)]
)
def test_chunks_equal_steps_and_the_equations(kind, chunk):
    """Also with strong decay, and lanes that end within a chunk or have no token."""
    num_new = np.array([150, 97, 0])
    is_new = np.arange(150)[None] < num_new[:, None]
    chunks, steps = in_chunks(chunk), jax.jit(recur_steps)
    for strength in (0.0, 1e-3, 1.0, 100.0, 1e30):
        arrays = recurrence_inputs(kind, strength)
        got, wanted = chunks(*arrays, is_new), steps(*arrays, is_new)
        assert np.isfinite(got[0]).all() and np.isfinite(got[1]).all()
        assert_close(got, wanted)
        assert_bits(got[1][2], arrays[-1][2])
        for lane, head in ((0, 1), (1, 0)):
            n = num_new[lane]
            q, k, v, g, beta = jax.tree.map(
                lambda x, at=(lane, slice(n), head): np.float64(x[at]), arrays[:-1]
            )
            o, state = linear_reference.recurrence(
                q, k, v, np.exp(g), beta, np.float64(arrays[-1][lane, head])
            )
            assert_close(got[0][lane, :n, head], o)
            assert_close(got[1][lane, head], state)


def test_equal_keys_do_not_spoil_the_inverse():
    """The hardest chunk: one key, full correction, no decay. Each value replaces."""
    _, k, v, g, beta, state = recurrence_inputs("head", 0.0, tokens=150)
    k = np.broadcast_to(k[:, :1], k.shape)
    beta, is_new = np.ones_like(g[..., 0]), np.ones((3, 150), bool)
    got, _ = in_chunks(64)(k, k, v, g, beta, state, is_new)
    assert_close(got, v)


def test_one_token_takes_the_step_form():
    arrays = recurrence_inputs("channel", 1.0, tokens=1)
    is_new = np.array([[True], [True], [False]])
    text = str(jax.make_jaxpr(recur)(*arrays, is_new))
    assert text == str(jax.make_jaxpr(recur_steps)(*arrays, is_new))


# Layers against published equations


@FAMILIES
def test_layer_agrees_with_the_equations(family):
    layer = _uneven(layer_of(family))
    x = inputs()
    lanes = lanes_of([0, 0, 0], [40, 3, 0], [2, 5, 0])
    y, states = forward(layer, x, empty_pool(family), lanes)
    for lane, (n, slot) in enumerate(((40, 2), (3, 5))):
        wanted_y, state = getattr(linear_reference, family)(layer, x[lane, :n])
        assert_close(np.asarray(y)[lane, :n], wanted_y)
        assert_close(row(states, slot)[0], state)


def _uneven(layer):
    """The layer with norm weights that are not all 1."""
    ramp = lambda w: jnp.linspace(0.5, 1.5, w.size, dtype=w.dtype)
    return jax.tree.map(
        lambda w: ramp(w) if w.ndim == 1 and bool((w == 1).all()) else w, layer
    )


@FAMILIES
def test_bfloat16_layer_stays_near_float32(family):
    """The weights rounded alike; activations round to 8 bits after each map."""
    layer = layer_of(family, "bfloat16")
    x = jnp.asarray(inputs()[:, :8], jnp.bfloat16)
    lanes = lanes_of([0, 0, 0], [8, 3, 0], [2, 5, 0], tokens=8)
    y, states = forward(layer, x, empty_pool(family, "bfloat16"), lanes)
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), layer)
    padded = np.zeros((3, TOKENS, HIDDEN), np.float32)
    padded[:, :8] = x.astype(jnp.float32)
    wide_lanes = lanes_of([0, 0, 0], [8, 3, 0], [2, 5, 0])
    wanted, _ = forward(wide, padded, empty_pool(family), wide_lanes)
    assert y.dtype == jnp.bfloat16
    assert states.temporal[1].dtype == jnp.float32
    assert distance(y.astype(jnp.float32)[0], wanted[0, :8]) < 0.1


# Cut forwards


@functools.cache
def whole(family, tokens):
    return run_cut(family, [tokens], 4, used_pool(family), inputs()[1])


def _random_cuts(seed):
    """Lengths that sum to 300, some shorter than the convolution, some decoded."""
    rng = np.random.default_rng(seed)
    ends = rng.choice(np.arange(1, TOKENS), 6, replace=False)
    ends = np.unique(np.concatenate([ends, ends + 1, ends[:2] + 3, [0]]))
    return np.diff([*ends[ends < TOKENS], TOKENS]).tolist()


CUTS = ([128, 128], [128, 128, 44], [299, 1], _random_cuts(0), _random_cuts(1))


@FAMILIES
def test_cut_forwards_equal_one(family):
    assert {1, 2} < set(_random_cuts(0) + _random_cuts(1))
    for lengths in CUTS:
        wanted, one = whole(family, sum(lengths))
        got, states = run_cut(family, lengths, 2, used_pool(family), inputs()[1])
        assert_close(got, wanted)
        assert_close(row(states, 2), row(one, 4))


@FAMILIES
def test_cut_forwards_can_differ(family):
    """Planted faults are seen: lost states, a temporal-only clone, a token too many."""
    x, lengths = inputs()[1], [128, 172]
    wanted, one = whole(family, 300)

    def lose(name):
        empty = lambda states: jax.tree.map(jnp.zeros_like, getattr(states, name))
        change = lambda states: {
            "temporal": states.temporal,
            "conv": states.conv,
            name: empty(states),
        }
        return lambda states: RecurrentStatePool(**change(states), config=states.config)

    for name in ("temporal", "conv") if family != "gla" else ("temporal",):
        got, _ = run_cut(family, lengths, 2, used_pool(family), x, lose(name))
        assert distance(got[:128], wanted[:128]) < CLOSE * 10
        assert distance(got[128:], wanted[128:]) > CLOSE * 1000
    got, states = run_cut(family, [128, 171], 2, used_pool(family), x)
    for a, b in zip(row(states, 2), row(one, 4), strict=True):
        assert distance(a, b) > CLOSE * 1000


def test_short_convolution_is_cut_without_a_trace():
    """Bit for bit, with the state in bfloat16, `num_new` below the taps and of 0."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 9, 5)).astype(np.float32)
    weight = rng.standard_normal((5, 4)).astype(np.float32)
    state = jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.bfloat16)
    y, last = short_conv(x, weight, state, np.int32([9, 7]))
    assert last.dtype == jnp.bfloat16
    assert_bits(last[0], jnp.asarray(x[0, 6:].T, jnp.bfloat16))
    part, done = state, np.zeros(2, np.int32)
    for num_new in ([2, 1], [1, 0], [0, 2], [6, 4]):
        at = np.minimum(done[:, None] + np.arange(6), 8)
        piece = np.take_along_axis(x, at[:, :, None], 1)
        piece[np.arange(6)[None] >= np.array(num_new)[:, None]] = np.nan
        got, part = short_conv(piece, weight, part, np.int32(num_new))
        for lane, n in enumerate(num_new):
            assert_bits(got[lane, :n], y[lane, done[lane] : done[lane] + n])
        done += np.int32(num_new)
    assert_bits(part, last)
    for t in range(9):
        past = np.concatenate([state[0], x[0].T], axis=1)[:, t : t + 4]
        past = np.float64(jnp.asarray(past, jnp.bfloat16))
        assert_close(np.asarray(y[0, t]), (past * weight).sum(1))


# The pool


@FAMILIES
def test_only_running_and_track_slots_change(family):
    """Padding may hold anything; idle lanes and lanes without new tokens write none."""
    before = used_pool(family)
    clean_x = np.zeros_like(inputs())
    clean_x[0, :70] = inputs()[0, :70]
    x = np.full_like(clean_x, np.nan)
    x[0, :70], x[2] = clean_x[0, :70], np.inf
    lanes = lanes_of([128, 128, 0], [70, 0, 0], [3, 5, 1], tracks=[6, 0, 0])
    y, after = forward(layer_of(family), x, before, lanes)
    assert np.isfinite(np.asarray(y)[0, :70]).all()
    for slot in (0, 1, 2, 4, 5):
        assert_bits(row(after, slot), row(before, slot))
    assert_bits(
        (after.temporal[0], after.conv[:1]), (before.temporal[0], before.conv[:1])
    )
    assert_bits(row(after, 6), row(after, 3))
    for a, b in zip(row(after, 3), row(before, 3), strict=True):
        assert distance(a, b) > 0.01
    clean_y, clean = forward(layer_of(family), clean_x, before, lanes)
    assert_bits(
        (np.asarray(y)[0, :70], row(after, 3)), (clean_y[0, :70], row(clean, 3))
    )


@FAMILIES
def test_lanes_do_not_influence_each_other(family):
    x, states = inputs(), used_pool(family)
    first = lanes_of([128, 0, 64], [70, 300, 1], [3, 5, 1])
    y, after = forward(layer_of(family), x, states, first)
    x = np.concatenate([x[:1], -x[1:]])
    other = lanes_of([128, 0, 0], [70, 3, 0], [3, 2, 0])
    other_y, other_after = forward(layer_of(family), x, states, other)
    assert_bits(y[0, :70], other_y[0, :70])
    assert_bits(row(after, 3), row(other_after, 3))
    assert distance(y[1, :3], other_y[1, :3]) > 0.01


@FAMILIES
def test_fresh_request_ignores_what_its_slot_holds(family):
    lanes = lanes_of([0, 0, 0], [0, 90, 1], [0, 3, 5])
    spoilt = jax.tree.map(lambda b: jnp.full_like(b, jnp.nan), used_pool(family))
    y, after = forward(layer_of(family), inputs(), spoilt, lanes)
    clean_y, clean = forward(layer_of(family), inputs(), empty_pool(family), lanes)
    assert_bits((y[1, :90], y[2, :1]), (clean_y[1, :90], clean_y[2, :1]))
    for slot in (3, 5):
        assert_bits(row(after, slot), row(clean, slot))
    lanes = lanes_of([0, 90, 0], [0, 1, 0], [0, 3, 0])
    y, _ = forward(layer_of(family), inputs(), used_pool(family, 1), lanes)
    other, _ = forward(layer_of(family), inputs(), used_pool(family, 2), lanes)
    assert distance(y[1, 0], other[1, 0]) > 0.01


# Construction


def test_decay_is_drawn_from_the_published_ranges():
    rates = np.exp(init_a_log(jax.random.key(0), 4096))
    steps = np.log1p(np.exp(np.float64(init_dt_bias(jax.random.key(1), 4096))))
    assert rates.min() >= 1 and rates.max() <= 16.001 and rates.std() > 4
    assert steps.min() > 0.00099 and steps.max() < 0.101
    assert 0.007 < np.exp(np.log(steps).mean()) < 0.014


def test_slopes_are_alibis_and_fall_with_depth():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(
        alibi_slopes(12), alibi_slopes(8) + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    )
    by_depth = np.array([decay_slopes(8, i, 20)[0] for i in range(20)])
    np.testing.assert_allclose(by_depth[[0, 1]], [0.5 * (20 / 19 + 1e-5), 0.500005])
    assert (np.diff(by_depth) < 0).all() and by_depth[-1] > 0.02


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (KDA, {"num_k_heads": 2}, "num_k_heads=2 with num_v_heads=4"),
        (KDA, {"conv_kernel_size": 1}, "conv_kernel_size=1"),
        (GDN, {"num_k_heads": 3}, "a multiple of the key heads"),
        (GDN, {"v_head_dim": 0}, "v_head_dim=0"),
        (GLA, {"conv_kernel_size": 4}, "1 for GLA"),
        (GLA, {"norm_groups": 3}, "norm_groups=3"),
        (GLA, {"k_head_dim": 6}, "an even number"),
    ],
)
def test_layers_that_cannot_be_are_refused(cls, settings, message):
    settings = {"num_v_heads": 4, "v_head_dim": 8} | settings
    with pytest.raises(ValueError, match=message):
        cls.init(jax.random.key(0), hidden_size=HIDDEN, **settings)
