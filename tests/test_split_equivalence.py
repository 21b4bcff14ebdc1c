"""A prompt cut at boundaries is one forward: logits, temporal and conv state, KV.

Whole models, at the lengths of the reference implementation's check: 256 tokens, which
end at a boundary, and 300, which do not; and cuts at random.
"""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_fn.pools.boundaries import cut_prefill
from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.config import small_config
from uhrc_fn.serving.models.model import forward, init_model, init_pools

HYBRIDS = ("kda-mla", "gdn-gqa", "gla-gqa")
VOCABULARY, PAGE, INTERVAL = 97, 16, 128
LENGTHS = np.array([256, 300, 211], np.int32)
LANES, WIDE = len(LENGTHS), 304
COLUMNS = WIDE // PAGE
# Sums over a prompt are taken in another order; states and logits are of size 1.
CLOSE = {"rtol": 0, "atol": 5e-5}

step = jax.jit(forward, donate_argnums=1)


@functools.cache
def model_of(family: str):
    kinds = tuple(family.split("-"))
    config = small_config(family, layers=kinds, vocab_size=VOCABULARY)
    return jax.jit(init_model, static_argnums=1)(jax.random.key(2), config)


@functools.cache
def prompts() -> np.ndarray:
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (LANES, WIDE))
    return ids.astype(np.int32)


def lanes_of(start, num_new, width: int, track) -> Lanes:
    ids = np.zeros((LANES, width), np.int32)
    for lane, (begin, count) in enumerate(zip(start, num_new, strict=True)):
        ids[lane, :count] = prompts()[lane, begin : begin + count]
    is_idle = num_new == 0
    pages = 1 + np.arange(LANES * COLUMNS).reshape(LANES, COLUMNS)
    return Lanes(
        token_ids=jnp.asarray(ids),
        start=jnp.asarray(start, jnp.int32),
        num_new=jnp.asarray(num_new, jnp.int32),
        pages=jnp.asarray(np.where(is_idle[:, None], 0, pages), jnp.int32),
        swa_pages=jnp.zeros((LANES, 0), jnp.int32),
        slots=jnp.asarray(np.where(is_idle, 0, 1 + np.arange(LANES)), jnp.int32),
        track=TrackMetadata(jnp.asarray(track, jnp.int32), jnp.asarray(track) > 0),
    )


def serve(family: str, ends, width: int):
    """Logits at the last of each lane's ends, and the pools.

    Args:
      family: of the model.
      ends: by forward, the tokens of each lane that are done after it.
      width: tokens of a forward.
    """
    model = model_of(family)
    pools = init_pools(
        model.config, num_pages=LANES * COLUMNS, page_size=PAGE, num_slots=4 * LANES
    )
    logits = np.zeros((LANES, VOCABULARY), np.float32)
    steps = [np.zeros(LANES, np.int32), *ends]
    for start, end in itertools.pairwise(steps):
        num_new = end - start
        # The n-th boundary's snapshot goes to the lane's n-th track slot.
        nth = end // INTERVAL
        ends_there = (num_new > 0) & (end % INTERVAL == 0)
        track = np.where(ends_there, LANES * nth + 1 + np.arange(LANES), 0)
        lanes = lanes_of(start, num_new, width, track)
        pools, new = step(model, pools, lanes)
        logits = np.where(num_new[:, None] > 0, np.asarray(new), logits)
    return logits, jax.device_get(pools)


def boundary_ends() -> list[np.ndarray]:
    """Ends of the chunks that the scheduler cuts."""
    ends, done = [], np.zeros(LANES, np.int32)
    while (done < LENGTHS).any():
        cut = cut_prefill(done, LENGTHS, WIDE, interval=INTERVAL, page_size=PAGE)
        done = done + np.asarray(cut.num_tokens)
        ends.append(done)
    return ends


def random_ends(seed: int) -> list[np.ndarray]:
    """Ends at random places, some of them those of a single token."""
    random = np.random.default_rng(seed)
    ends, done = [], np.zeros(LANES, np.int32)
    while (done < LENGTHS).any():
        most = np.minimum(LENGTHS - done, random.choice([1, 5, 90, INTERVAL], LANES))
        done = done + random.integers(0, most + 1).astype(np.int32)
        ends.append(done)
    return ends


def rows_of(pools, slots):
    """Temporal and conv state of some slots, by layer."""
    return jax.tree.map(lambda x: x[slots], pools.states)


@functools.cache
def whole(family: str):
    return serve(family, [LENGTHS], WIDE)


def assert_same(got, wanted):
    (logits, pools), (wanted_logits, wanted_pools) = got, wanted
    np.testing.assert_allclose(logits, wanted_logits, **CLOSE)
    close = lambda a, b: np.testing.assert_allclose(a, b, **CLOSE)
    jax.tree.map(close, pools.kv, wanted_pools.kv)
    running = 1 + np.arange(LANES)
    jax.tree.map(close, rows_of(pools, running), rows_of(wanted_pools, running))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_cut_at_boundaries_is_one_forward(family):
    ends = boundary_ends()
    assert [end[0] for end in ends] == [128, 256, 256]
    assert [end[1] for end in ends] == [128, 256, 300]
    assert_same(serve(family, ends, WIDE), whole(family))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prompt_cut_anywhere_is_one_forward(family, seed):
    ends = random_ends(seed)
    assert len(ends) > 3
    assert_same(serve(family, ends, WIDE), whole(family))


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_snapshot_of_a_boundary_is_the_state_of_a_prompt_that_ends_there(family):
    _, pools = serve(family, boundary_ends(), WIDE)
    first = 1 + np.arange(LANES)
    for nth in (1, 2):
        end = np.minimum(np.full(LANES, nth * INTERVAL, np.int32), LENGTHS)
        _, ended = serve(family, [end], WIDE)
        there = nth * INTERVAL <= LENGTHS
        snapshot = rows_of(pools, (LANES * nth + first)[there])
        wanted = rows_of(ended, first[there])
        close = lambda a, b: np.testing.assert_allclose(a, b, **CLOSE)
        jax.tree.map(close, snapshot, wanted)
        assert all(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(snapshot))


@pytest.mark.parametrize("name", ["temporal", "conv"])
def test_a_state_that_is_not_handed_on_would_be_seen(name):
    """Halfway the state is lost, as if a clone had copied only the other buffer."""
    model = model_of("kda-mla")
    half, none = np.full(LANES, 128, np.int32), np.zeros(LANES, np.int32)
    _, pools = serve("kda-mla", [half], WIDE)
    lost = jax.tree.map(np.zeros_like, getattr(pools.states, name))
    states = eqx.tree_at(lambda s: getattr(s, name), pools.states, lost)
    pools = jax.device_put(eqx.tree_at(lambda p: p.states, pools, states))
    lanes = lanes_of(half, LENGTHS - half, WIDE, none)
    pools, logits = step(model, pools, lanes)
    with pytest.raises(AssertionError):
        assert_same((np.asarray(logits), jax.device_get(pools)), whole("kda-mla"))
