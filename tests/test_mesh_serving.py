"""The serving step on a mesh: ranks of their own, and heads over devices."""

import jax
import numpy as np
import pytest
from harness import row
from mesh_engines import mesh_engine, serve

import uhrc_fn as u


def check_idle(engine) -> None:
    """No trouble, every invariant, and nothing held or locked on any rank."""
    engine.check()
    state = jax.device_get(engine.state)
    for rank in range(len(engine.ranks)):
        cache, tables = row((state.cache, state.tables), rank)
        u.check_invariants(cache, tables.owned())
        assert not cache.protected.any()
        free = cache.num_free + cache.evictable
        assert free.tolist() == list(cache.config.capacities)


def check_copies(engine) -> None:
    """All devices of a rank hold the same cache, tables and requests."""
    state = engine.state
    leaves = jax.tree.leaves((state.cache, state.tables, state.requests))
    for leaf in (leaf for leaf in leaves if leaf.size):
        by_rank = {}
        for shard in leaf.addressable_shards:
            held = np.asarray(shard.data)
            first = by_rank.setdefault(shard.index[0].start, held)
            assert np.array_equal(held, first)
        assert len(by_rank) == len(engine.ranks)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gqa", (4, 2)),
        pytest.param("kda-mla", (2, 4), marks=pytest.mark.slow),
        pytest.param("gdn-gqa", (2, 2), marks=pytest.mark.slow),
        pytest.param("gla-gqa", (2, 2), marks=pytest.mark.slow),
        pytest.param("swa-gqa", (2, 2), marks=pytest.mark.slow),
    ],
)
def test_ranks_serve_the_tokens_of_no_cache(family, shape):
    """A hit, a miss and the control on the same mesh, in float32."""
    control = serve(mesh_engine(family, shape, use_cache=False))
    engine = mesh_engine(family, shape)
    assert serve(engine) == control
    assert all(rank.stats.hit_tokens > 0 for rank in engine.ranks)
    hits = [rank.stats.hit_tokens for rank in engine.ranks]
    assert serve(engine) == control
    for rank, before in zip(engine.ranks, hits, strict=True):
        assert rank.stats.hit_tokens > 2 * before
    check_idle(engine)
    check_copies(engine)
