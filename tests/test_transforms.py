"""The operations under JAX's transformations, and the shape of the state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SMALL, Harness, numpy, same, stack
from jax import export
from jax.sharding import AxisType, PartitionSpec
from op_cases import (
    OPS,
    READS,
    SETS,
    busy_harness,
    config_of,
    op_cases,
    shapes,
    zeros,
)

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams, jitted

PAGES = SMALL.max_prefix_pages


@functools.cache
def busy():
    """``(state, cases)``, on the host: every case finds something to do."""
    harness = busy_harness([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 9, 9])
    match = harness.match([0, 1, 2, 3, 4, 5])
    receipt = harness.lock(match)
    cases = op_cases(SMALL, PAGES, batch=3)
    records = {"lock": match, "unlock": receipt, "release_window": receipt}
    for name, record in records.items():
        cases[name] = cases[name]._replace(args=(record,))
        batch = f"{name}_batch"
        cases[batch] = cases[batch]._replace(args=(stack([record] * 3),))
    return harness.snapshot(), cases


def on_device(tree):
    return jax.tree.map(jnp.array, tree)


@functools.cache
def compiled(name: str):
    """One operation, donated where it writes; compiled once for all tests."""
    return busy()[1][name].jit()


# jit.


def test_match_prefix_jits_as_it_is():
    harness = busy_harness([0, 1, 2, 3, 4, 5])
    cache = on_device(harness.snapshot())
    params = MatchPrefixParams(key=harness.key([0, 1, 2, 3, 8, 8]))
    plain = jax.jit(uhrc_fn.match_prefix)(cache, params)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    donated = jax.jit(uhrc_fn.match_prefix, donate_argnums=0)(cache, params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert same(numpy(plain), numpy(donated))
    assert int(plain[1].hit_length) == 4


@pytest.mark.parametrize("name", sorted({*OPS} - {*READS}))
def test_donated_states_live_on_in_the_result(name):
    """All of the state is handed over, and the result is that of an undonated call."""
    state, cases = busy()
    cache = on_device(state)
    donated = compiled(name)(cache, *cases[name].args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    plain = cases[name].jit(donate=False)(on_device(state), *cases[name].args)
    assert same(numpy(donated), numpy(plain))
    assert not same(numpy(state_of(donated)), state)  # it did something


def test_a_jitted_reset_reuses_the_buffers():
    cache = on_device(busy()[0])
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    fresh = jitted.reset(cache)
    assert places == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh)]


def state_of(output) -> uhrc_fn.CacheState:
    return output if isinstance(output, uhrc_fn.CacheState) else output[0]


def test_an_undonated_state_can_be_gone_back_to():
    """Rollback is to keep the old value."""
    harness = busy_harness([0, 1, 2, 3, 4, 5])
    before, old = harness.snapshot(), on_device(harness.snapshot())
    evict = jax.jit(functools.partial(uhrc_fn.evict, max_victims=PAGES))
    new, result = evict(old, EvictParams(num_tokens=np.int32(4)))
    assert int(result.num_tokens_evicted) == 4
    assert same(numpy(old), before) and not same(numpy(new), before)
    harness.cache = old
    harness.is_checked = True
    assert harness.hit([0, 1, 2, 3, 4, 5]) == 6
    assert harness.evict(4) == 4
    assert same(harness.snapshot(), numpy(new))


@pytest.mark.parametrize("name", sorted({*OPS} - {*READS}))
def test_a_state_keeps_its_type(name):
    """Shape, dtype and weak type: a state can be carried by any loop."""
    cache, case = shapes(SMALL), busy()[1][name]
    after = state_of(jax.eval_shape(case.function, cache, *case.args))
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    for mine, its in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
        assert mine.weak_type == its.weak_type


def test_the_tests_run_with_strict_promotion():
    """So no operation of any test relies on a promotion of dtypes or ranks."""
    with pytest.raises(ValueError, match="strict"):
        _ = jnp.int32(1) + jnp.float32(1)
    with pytest.raises(ValueError, match="rank_promotion"):
        _ = jnp.zeros((2, 3)) + jnp.zeros(3)


# scan.


def serve(cache, key):
    """One request, whole."""
    cache, match = uhrc_fn.match_prefix(cache, MatchPrefixParams(key=key))
    cache, receipt = uhrc_fn.inc_lock_ref(cache, match)
    size = cache.config.page_size
    missing = (key.length - match.hit_length) // size
    cache, new = uhrc_fn.alloc_pages(cache, missing, max_new=PAGES)
    params = InsertParams(
        key=key,
        value=uhrc_fn.page_table(match, new),
        prev_prefix_len=match.hit_length,
    )
    cache, result = uhrc_fn.insert(cache, params)
    cache, _ = uhrc_fn.dec_lock_ref(cache, receipt)
    return cache, (match, result)


def test_a_scan_over_requests_is_a_loop_over_them():
    harness = Harness(SMALL)
    dice = np.random.default_rng(3)
    keys = [
        harness.key(dice.integers(0, 2, 2 * dice.integers(1, PAGES + 1)))
        for _ in range(20)
    ]
    looped, step, results = uhrc_fn.init(SMALL), jax.jit(serve), []
    for key in keys:
        looped, result = step(looped, key)
        results.append(numpy(result))
    scan = jax.jit(functools.partial(jax.lax.scan, serve), donate_argnums=0)
    scanned, stacked = scan(uhrc_fn.init(SMALL), uhrc_fn.stack_keys(keys))
    assert same(numpy(scanned), numpy(looped))
    assert same(numpy(stacked), stack(results))
    harness.cache = scanned
    harness.check()
    uhrc_fn.raise_if_bad(scanned)
    hits = stacked[0].hit_length
    assert int((hits > 0).sum()) > 5 and int(scanned.num_free[0]) == 0


# export.


@pytest.mark.parametrize("name", OPS)
def test_exported_operations_come_back(name):
    """Serialized for CPU and TPU, read back, and called here.

    Records are taken apart first: JAX serializes calls of plain containers only.
    """
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    state, cases = busy()
    function, args = cases[name]
    leaves, structure = jax.tree.flatten((state, *args))

    def flat(leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    exported = export.export(jax.jit(flat), platforms=["cpu", "tpu"])(leaves)
    back = export.deserialize(exported.serialize())
    assert set(back.platforms) == {"cpu", "tpu"}
    wanted = compiled(name)(on_device(state), *args)
    assert same(numpy(back.call(leaves)), numpy(wanted))


# Transfers.


def test_a_session_moves_nothing_between_host_and_device():
    """Records stay whole outside jit: to read one field is to send an index."""
    harness = Harness(SMALL)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 7]]
    keys = [on_device(harness.key(prompt)) for prompt in prompts]
    wanted, count = on_device((EvictParams(num_tokens=4), 3))

    @jax.jit
    def to_insert(key, match, new):
        table = uhrc_fn.page_table(match, new)
        return InsertParams(
            key=key, value=table, prev_prefix_len=match.hit_length
        ), jnp.where(jnp.arange(PAGES) < 3, 0, table)

    cache, found = uhrc_fn.init(SMALL), []
    with jax.transfer_guard("disallow"):
        for key in keys:
            cache, match = jitted.match_prefix(cache, MatchPrefixParams(key=key))
            cache, receipt = jitted.inc_lock_ref(cache, match)
            cache, new = jitted.alloc_pages(cache, count, max_new=PAGES)
            params, rest = to_insert(key, match, new)
            cache, _ = jitted.insert(cache, params)
            cache, _ = jitted.dec_lock_ref(cache, receipt)
            cache = jitted.free_pages(cache, rest)
            found.append(jitted.peek_prefix_len(cache, key))
            cache, _ = jitted.evict(cache, wanted, max_victims=PAGES)
            cache = jitted.compact_clock(cache)
        with pytest.raises(Exception, match="Disallowed"):
            jitted.free_pages(cache, np.zeros(PAGES, np.int32))
    assert [int(match.hit_length) for match in found] == [6, 6]
    assert int(cache.num_live_nodes) == 1
    uhrc_fn.raise_if_bad(cache)


# The state.


@pytest.mark.parametrize("components", SETS)
def test_a_state_has_few_leaves(components):
    assert len(jax.tree.leaves(shapes(config_of(components, 2, 16)))) <= 16


def test_a_state_costs_at_most_eight_bytes_a_token():
    """Four of them are the token itself."""
    config = CacheConfig(page_size=128, num_pages=16_384)
    size = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(config))
    )
    assert 4 < size / (config.num_pages * config.page_size) <= 8


# shard_map.


@pytest.mark.parametrize("components", SETS)
def test_every_operation_traces_under_shard_map(components):
    """With JAX's check of what varies over the ranks, which loops can fail."""
    config = config_of(components, 4, 64, max_prefix_pages=8)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    for case in op_cases(config, 4, 3).values():
        args = jax.tree.map(np.asarray, case.args)
        ranks = stack([zeros((shapes(config), *args))] * 2)
        step = jax.vmap(case.function)
        jax.eval_shape(
            jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec), *ranks
        )
