"""Compiled for a described v6e 2x2: which operations need another chip."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_engines import pools_of, serve_config, two_layers
from op_cases import config_of
from test_mesh import collectives
from tpu_chip import described_chips, needs_libtpu, no_cache_entry

import uhrc_fn as u
from uhrc_fn.mesh import make_mesh, per_rank, placed_shapes, shapes_of_ranks
from uhrc_fn.serving import init_model, init_serving
from uhrc_fn.serving.mesh_engine import serve_steps_on
from uhrc_fn.serving.models.shard import as_shards

pytestmark = [needs_libtpu, pytest.mark.slow]
PAGES, PAGE = 8, 16


def cache_step(cache, states, key):
    """All that a step asks of the cache, around a model that is not there."""
    cache, match = u.match_prefix(cache, u.MatchPrefixParams(key=key))
    cache, receipt = u.inc_lock_ref(cache, match)
    if cache.config.has_recurrent:
        cache, states, _ = u.cow_clone(cache, states, match)
    num_new = PAGES - match.hit_length // PAGE
    cache, alloc = u.alloc_pages(cache, num_new, max_new=PAGES)
    table = u.page_table(match, alloc)
    params = u.InsertParams(key=key, value=table, prev_prefix_len=match.hit_length)
    cache, result = u.insert(cache, params)
    cache, _ = u.dec_lock_ref(cache, receipt)
    return u.free_pages(cache, alloc.ids), states, result


def states_of(num_slots: int):
    """A layer of states of two ranks, with heads for two chips."""
    shape = dict(num_v_heads=4, v_head_dim=128, conv_kernel_size=2)
    config = u.RecurrentConfig(num_slots=num_slots, layers=(0,), num_ranks=2, **shape)
    return u.init_recurrent_state_pool(config)


@pytest.mark.parametrize("components", ["FULL,SWA", "FULL,RECURRENT"])
def test_the_cache_part_of_a_step_holds_no_collective(components):
    mesh = make_mesh(2, 2, described_chips())
    config = config_of(components, PAGE, 64, max_prefix_pages=PAGES)
    key = u.radix_key(np.arange(PAGES * PAGE), config, num_pages=PAGES)
    args = shapes_of_ranks(
        mesh,
        lambda: (u.init(config), states_of(max(config.num_recurrent_slots, 1)), key),
    )
    specs = (P("data"), args[1].partition_specs(), P("data"))
    step = jax.jit(per_rank(cache_step, mesh, specs), donate_argnums=(0, 1))
    with no_cache_entry():
        text = step.lower(*args).compile().as_text() or ""
    assert "num_partitions=4" in text
    assert ("copy_slots" in text) == config.has_recurrent
    assert not collectives(text)


def test_the_collectives_of_a_serving_step_are_the_model_s():
    """Two sums a layer over the chips of a rank, in each of two forwards."""
    mesh = make_mesh(2, 2, described_chips())
    wide = dict(dtype="bfloat16", recurrent_v_dim=128, recurrent_k_dim=128)
    model, config = two_layers("kda-mla", **wide), serve_config("kda-mla")
    make = lambda: init_serving(config, pools_of(model, config, 2))
    state = shapes_of_ranks(mesh, make)
    weights = jax.eval_shape(lambda: as_shards(init_model(jax.random.key(0), model), 2))
    step = jax.jit(serve_steps_on(mesh, state, 1), donate_argnums=1)
    with no_cache_entry():
        compiled = step.lower(placed_shapes(mesh, weights), state).compile()
    text = compiled.as_text() or ""
    assert collectives(text) == {"all-reduce"}
    sums = [line for line in text.splitlines() if " all-reduce(" in line]
    assert 0 < len(sums) <= 2 * 2 * model.num_layers
    assert all("psum" in line for line in sums)
