"""A model whose heads lie over devices computes what it does on one device."""

import jax
import numpy as np
import pytest
from harness import stack
from jax.sharding import PartitionSpec as P
from model_cases import LANES, SHARED, config_of, draw, lanes_of, prompts, serve
from serving_harness import FAST

from uhrc_fn.mesh import init_ranks, make_mesh, partition_specs, per_rank, place
from uhrc_fn.serving import forward, init_pools, shard_model

PAGE = 4
BF16 = 16 * 2.0**-8
NONE, MIDDLE, ENDS = np.zeros(LANES), np.array([9, 16, 0]), np.array([24, 17, 11])
CHUNKS = [(NONE, MIDDLE), (MIDDLE, ENDS - MIDDLE)]


def server(mesh, config):
    """``serve(chunks)``: logits of two ranks, the second with the lanes in reverse."""
    model = shard_model(draw(jax.random.key(1), config), mesh)
    make = lambda: init_pools(config, page_size=PAGE, num_ranks=2, **SHARED)
    specs = (partition_specs(jax.eval_shape(make)), P("data"))
    mapped = per_rank(forward, mesh, out_specs=specs, check_vma=False)
    step = jax.jit(mapped, donate_argnums=1, compiler_options=FAST)

    def serve(chunks):
        pools = init_ranks(mesh, make)
        logits = np.zeros((2, LANES, config.vocab_size), np.float32)
        for start, num_new in chunks:
            lanes = lanes_of(prompts(), start, num_new, PAGE)
            turned = jax.tree.map(lambda x: np.asarray(x)[::-1], lanes)
            ranks = stack([lanes, turned])
            pools, new = step(model, pools, place(mesh, ranks))
            is_new = np.asarray(ranks.num_new)[..., None] > 0
            logits = np.where(is_new, np.asarray(new), logits)
        return logits

    return serve


def slow(family: str):
    return pytest.param(family, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "family",
    ["gqa", "mla", "gla-gqa", *map(slow, ("swa-gqa", "kda-mla", "gdn-gqa"))],
)
def test_heads_over_devices_give_the_logits_of_one(family):
    config = config_of(family)
    wanted, _ = serve(config, CHUNKS, PAGE)
    logits = server(make_mesh(2, 2), config)(CHUNKS)
    # Sums of a device's heads are added to those of the other: another order.
    np.testing.assert_allclose(logits[0], wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits[1], wanted[::-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gqa", slow("kda-mla")])
def test_half_precision_on_a_mesh_is_near(family):
    """Near one device, and in pieces near one forward, as a hit is near no cache.

    What each device adds is rounded to 8 bits before it is summed, so that a logit of
    size 1 moves by a few units of 2^-8.
    """
    config = config_of(family, dtype="bfloat16")
    serve_on_mesh = server(make_mesh(2, 2), config)
    pieces, whole = serve_on_mesh(CHUNKS), serve_on_mesh([(NONE, ENDS)])
    alone, _ = serve(config, CHUNKS, PAGE)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=BF16)
    np.testing.assert_allclose(pieces[0], alone, rtol=0, atol=BF16)
    assert np.abs(pieces[0] - alone).max() > 0


def test_each_device_has_its_heads_only():
    mesh, config = make_mesh(2, 2), config_of("kda-mla")
    model = shard_model(draw(jax.random.key(1), config), mesh)
    part = lambda array: array.addressable_shards[0].data.shape
    kda, mla = (block.mixer for block in model.blocks)
    assert part(kda.qkv) == (64, 3 * 2 * 16) and part(kda.conv) == (3 * 2 * 16, 4)
    assert part(mla.key_up) == (32, 2, 16) and part(mla.out) == (2 * 16, 64)
    assert part(mla.latent) == mla.latent.shape
    assert part(model.blocks[0].mlp.down) == (64, 64)
    assert model.config.num_heads == 2 and model.config.tensor_axis == "tensor"


def test_a_model_that_devices_do_not_divide_is_refused():
    model = draw(jax.random.key(1), config_of("gqa"))
    with pytest.raises(ValueError, match="num_kv_heads=2 over 4 devices of 'tensor'"):
        shard_model(model, make_mesh(2, 4))
