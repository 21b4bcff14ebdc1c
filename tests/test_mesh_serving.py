"""The serving step on a mesh: ranks of their own, and heads over devices."""

import functools

import jax
import numpy as np
import pytest
from harness import row, same
from mesh_engines import (
    OUTPUT,
    mesh_engine,
    pools_of,
    prompts_of,
    serve,
    serve_config,
    two_layers,
)
from serving_harness import FAST

import uhrc_fn as u
from uhrc_fn.serving import Engine, init_model
from uhrc_fn.serving import mesh_engine as module

GQA = (4, 2)


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


@functools.cache
def engine_of(family: str, shape, use_cache: bool = True):
    """Built and compiled once."""
    return mesh_engine(family, shape, use_cache)


@functools.cache
def control_of(family: str, shape):
    """Outputs of the same model on the same mesh without a cache."""
    return serve(engine_of(family, shape, use_cache=False))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gqa", GQA),
        pytest.param("kda-mla", (2, 4), marks=pytest.mark.slow),
        pytest.param("gdn-gqa", (2, 2), marks=pytest.mark.slow),
        pytest.param("gla-gqa", (2, 2), marks=pytest.mark.slow),
        pytest.param("swa-gqa", (2, 2), marks=pytest.mark.slow),
    ],
)
def test_ranks_serve_the_tokens_of_no_cache(family, shape):
    """A hit, a miss and the control on the same mesh, in float32."""
    control, engine = control_of(family, shape), engine_of(family, shape)
    assert serve(engine) == control
    assert all(rank.stats.hit_tokens > 0 for rank in engine.ranks)
    hits = [rank.stats.hit_tokens for rank in engine.ranks]
    assert serve(engine) == control
    for rank, before in zip(engine.ranks, hits, strict=True):
        assert rank.stats.hit_tokens > 2 * before
    check_idle(engine)
    check_copies(engine)


def test_a_clock_is_compacted_in_time(monkeypatch):
    engine = engine_of("gqa", GQA)
    most = engine.config.cache.num_nodes + 1
    serve(engine)
    assert (np.asarray(engine.state.cache.clock) > most).all()
    monkeypatch.setattr(module, "COMPACT_AT", 0)
    assert serve(engine) == control_of("gqa", GQA)
    assert (np.asarray(engine.state.cache.clock) <= most).all()
    check_idle(engine)


def test_a_request_is_cancelled_on_its_rank_alone():
    engine = engine_of("gqa", GQA)
    prompts = [prompts_of(rank)[0] for rank in range(GQA[0])]
    requests = [
        [engine.submit(prompt, OUTPUT, rank=rank) for _ in range(6)]
        for rank, prompt in enumerate(prompts)
    ]
    while not requests[1][0].output:
        engine.step()
    engine.cancel(requests[1][0], rank=1)  # runs
    engine.cancel(requests[1][5], rank=1)  # waits on the host
    engine.run()
    check_idle(engine)
    for rank, of_rank in enumerate(requests):
        cancelled = [n for n, request in enumerate(of_rank) if request.is_cancelled]
        assert cancelled == ([0, 5] if rank == 1 else [])
        wanted = control_of("gqa", GQA)[rank][0]
        kept = [request for request in of_rank if not request.is_cancelled]
        assert all(request.output == wanted for request in kept)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_none_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank}; wanted one of 4 ranks"):
        engine_of("gqa", GQA).submit([1, 2], 1, rank=rank)


@pytest.mark.slow
def test_a_rank_ends_with_the_integers_of_an_engine_alone():
    """Prompts of other lengths on the other ranks, and steps that they alone need."""
    engine = mesh_engine("gqa", GQA)
    outputs = serve(engine)
    held = jax.device_get(integers(engine.state))
    model, config = two_layers("gqa"), serve_config("gqa")
    for rank in range(GQA[0]):
        alone = Engine(
            init_model(jax.random.key(0), model),
            config,
            pools_of(model, config, 1),
            compiler_options=FAST,
        )
        wanted = [alone.generate([prompt], OUTPUT)[0] for prompt in prompts_of(rank)]
        assert outputs[rank] == wanted
        assert same(row(held, rank), integers(alone.state))


def integers(state):
    return state.cache, state.tables, state.requests
