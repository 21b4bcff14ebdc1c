"""Two forms of a function: which one a program holds, and that they agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from test_loop_free import equations

from uhrc_fn import CacheConfig
from uhrc_fn import tree_arrays as trees
from uhrc_fn.by_platform import by_platform
from uhrc_fn.ops import hashing, match, path

X = jnp.arange(4, dtype=jnp.int32)


# Unequal on purpose: the result tells which form ran.
def _sum(x, y):
    return x + y, {"more": jnp.cos(x.astype(jnp.float32))}


def _difference(x, y):
    return x - y, {"more": jnp.sin(x.astype(jnp.float32))}


either = by_platform(_sum, tpu=_difference)


def test_a_cpu_runs_the_default_however_it_is_called():
    def check(got, x=X):
        np.testing.assert_array_equal(got[0], 2 * x)
        np.testing.assert_allclose(got[1]["more"], np.cos(x), rtol=1e-6)

    check(either(X, X))
    check(jax.jit(either)(X, X))
    check(jax.jit(lambda x: either(x, x), donate_argnums=0)(X + 0))
    rows = jnp.stack([X, X + 1])
    check(jax.vmap(either)(rows, rows), rows)
    both = jax.jit(jax.vmap(either, in_axes=(1, None)))(rows.T, X)
    np.testing.assert_array_equal(both[0], rows + X[None])
    end, _ = jax.lax.scan(lambda c, _: (either(c, X)[0], None), X, None, length=3)
    np.testing.assert_array_equal(end, 4 * X)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(
        lambda x: either(x, x), mesh=mesh, in_specs=spec, out_specs=spec
    )
    check(jax.jit(mapped)(X))
    check(jax.jit(jax.vmap(mapped))(rows), rows)


def test_each_platform_gets_its_form_and_one_artifact_holds_both():
    traced = jax.jit(either).trace(X, X)
    cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "cosine" in cpu and "stablehlo.sine" not in cpu
    assert "stablehlo.sine" in tpu and "cosine" not in tpu
    assert "stablehlo.case" not in cpu + tpu
    exported = jax.export.export(jax.jit(either), platforms=("cpu", "tpu"))(X, X)
    again = jax.export.deserialize(exported.serialize())
    assert {"cpu", "tpu"} == set(again.platforms)
    np.testing.assert_array_equal(again.call(X, X)[0], 2 * X)


def test_a_search_of_a_jaxpr_finds_both_forms_and_no_branch():
    names = [e.primitive.name for e in equations(jax.make_jaxpr(either)(X, X).jaxpr)]
    assert {"by_platform", "sin", "cos"} <= set(names) and "cond" not in names


def test_forms_that_return_different_things_are_refused():
    other_dtype = by_platform(lambda x: x, tpu=lambda x: x.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"return different things.*int32.*float32"):
        other_dtype(X)
    other_structure = by_platform(lambda x: x, tpu=lambda x: (x, x))
    with pytest.raises(ValueError, match="same structure"):
        other_structure(X)


# The forms that the package has.


def same(default, tpu, *args):
    """Both forms return the same integers; they are handed back."""
    ours, theirs = jax.jit(default)(*args), jax.jit(tpu)(*args)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    return ours


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 3, 128), (1, 64, 128), (3, 9, 16)])
@pytest.mark.parametrize("few", [False, True])
def test_both_forms_hash_alike(shape, few):
    random = np.random.default_rng(sum(shape))
    most = 2 if few else 2**31
    tokens = random.integers(-most, most, shape).astype(np.int32)
    space = random.integers(-(2**31), 2**31, (shape[0], 4)).astype(np.int32)
    constants = hashing._constants(7, shape[-1], shape[1])
    same(hashing._chain_default, hashing._chain_tpu, tokens, space, constants)


def test_hashes_fill_buckets_evenly_and_differ():
    """Keys of few bits: single tokens, each of its own length and namespace."""
    config = CacheConfig(page_size=8, num_pages=2**14, max_prefix_pages=8)
    tokens = np.zeros((2048, 8, 8), np.int32)
    tokens[np.arange(2048), 0, np.arange(2048) % 8] = np.arange(2048) // 8
    space = np.zeros((2048, 4), np.int32)
    space[:1024, 3] = 1
    # The first eight keys are all zeros: leave one of them.
    keep = np.r_[0, 8:2048]
    bucket, print_ = map(np.asarray, hashing.chain_hashes(tokens, space, config))
    bucket, print_ = bucket[keep], print_[keep]
    assert bucket.min() >= 0 and bucket.max() < config.num_buckets
    assert len(np.unique(np.stack([bucket, print_]).reshape(2, -1), axis=1).T) == (
        bucket.size
    )
    load = np.bincount(bucket.ravel(), minlength=config.num_buckets)
    # Poisson: the variance is the mean.
    assert 0.8 < load.var() / load.mean() < 1.25


def test_both_forms_probe_alike():
    random = np.random.default_rng(3)
    table = np.full((8, 128), trees.NULL, np.int32)
    for bucket in range(32):
        start = bucket % 4 * 32
        ways = random.permutation(16)[: random.integers(17)]
        table[bucket // 4, start + ways] = random.permutation(40)[: ways.size]
        table[bucket // 4, start + 16 + ways] = 1 + random.integers(0, 99, ways.size)
        stale = random.integers(16)  # a print whose entry is free proposes nothing
        table[bucket // 4, start + 16 + stale] = trees.NULL
    bucket = np.repeat(np.arange(32, dtype=np.int32), 42).reshape(2, -1)
    print_ = np.tile(np.arange(-1, 41, dtype=np.int32), 32).reshape(2, -1)
    node, _ = same(trees._probe_default, trees._probe_tpu, table, bucket, print_)
    assert 0.1 < np.mean(np.asarray(node) != trees.NULL) < 0.8


@pytest.mark.parametrize("size", [1, 4, 8, 128])
def test_both_forms_see_any_word(size):
    x = np.random.default_rng(size).integers(-1, 2, (2, 65, size)).astype(np.int32)
    x[:, ::2] = np.abs(x[:, ::2])
    x[:, ::3] = 0
    same(path._any_word_default, path._any_word_tpu, x)


@pytest.mark.parametrize("num_pages", [1, 4, 9, 64])
def test_both_forms_find_the_same_run(num_pages):
    random = np.random.default_rng(num_pages)
    runs = set()
    for case in range(24):
        ok = np.ones((3, num_pages), bool)
        if case % 3:
            ok[np.arange(3), random.integers(num_pages, size=3)] = False
        if case % 3 == 2:
            ok &= random.random(ok.shape) < 0.7
        space = random.integers(0, 9, (3, 4)).astype(np.int32)
        words = random.integers(-1, 9, (3, 4 + 3 * num_pages)).astype(np.int32)
        words[:, :4] = space
        words[0, case % 4] += case % 2
        bad = random.random(ok.shape) < 0.02
        node = random.integers(-1, 99, ok.shape).astype(np.int32)
        reading = path.Reading(node, ok, bad, space, words)
        run, *_ = same(path._verified_run_default, path._verified_run_tpu, reading)
        runs |= set(np.asarray(run).tolist())
    assert {0, num_pages} <= runs


def test_both_forms_stack_alike():
    entries = [np.arange(3, dtype=np.int32) + k for k in range(10)]
    same(match._stack_default, match._stack_tpu, *entries)


def test_both_forms_pick_the_anchor_alike():
    """Fault: without a hit one form picks the first page, the other nothing."""
    rows = [np.arange(12, dtype=np.int32).reshape(3, 4) + 100 * k for k in range(3)]
    hit = np.array([[3], [0], [4]], np.int32)
    at_hit = np.arange(1, 5, dtype=np.int32)[None] == hit
    picked = same(match._at_hit_default, match._at_hit_tpu, at_hit, *rows)
    assert np.asarray(picked)[0].tolist() == [2, 0, 11]
