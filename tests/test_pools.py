"""KV and recurrent pools: what is written is read back, and nothing else changes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_chip import compiled_for_tpu, needs_libtpu

from uhrc_fn.pools import entry_bytes
from uhrc_fn.pools.kv import KVConfig, init_kv_pool, init_swa_kv_pool
from uhrc_fn.pools.layout import shardings
from uhrc_fn.pools.mla import MLAConfig, init_mla_pool
from uhrc_fn.pools.recurrent_state import RecurrentConfig, init_recurrent_state_pool

BF16 = jnp.bfloat16
KV = dict(num_pages=5, page_size=4, layers=(0, 3), num_kv_heads=3, head_dim=16)
MLA = dict(num_pages=5, page_size=5, layers=(1, 2), kv_lora_rank=24, rope_head_dim=8)
KINDS = {
    "kda": dict(num_v_heads=2, v_head_dim=128, conv_kernel_size=4),
    "gdn": dict(
        num_v_heads=4, v_head_dim=24, num_k_heads=2, k_head_dim=16, conv_kernel_size=4
    ),
    "gla": dict(num_v_heads=2, v_head_dim=128),
}
LAYERS = (1, 2, 6)


def draw(seed: int, *shape, dtype=BF16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def same(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    return len(left) == len(right) and all(map(np.array_equal, left, right))


# K and V.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_k_and_v_are_read_where_they_were_written(dtype, num_kv_heads):
    config = KVConfig(**KV | dict(dtype=dtype, num_kv_heads=num_kv_heads))
    location = [9, 4, 22, 23, 8]  # pages 2, 1, 5, 5, 2
    k = draw(1, 5, num_kv_heads, 16).astype(dtype)
    v = draw(2, 5, num_kv_heads, 16).astype(dtype)
    pool = init_kv_pool(config).set_kv_buffer(3, ints(*location), k, v)
    wanted_k = np.zeros((6 * 4, num_kv_heads, 16), dtype)
    wanted_v = wanted_k.copy()
    wanted_k[location], wanted_v[location] = k, v
    read = pool.read_pages(3, jnp.arange(6))
    for found, wanted in zip(read, (wanted_k, wanted_v), strict=True):
        np.testing.assert_array_equal(np.asarray(found).reshape(wanted.shape), wanted)
    assert not any(np.any(np.asarray(b, np.float32)) for b in pool.buffers[:1])


def test_heads_are_interleaved_and_packed_into_words():
    config = KVConfig(**KV)
    k, v = draw(1, 1, 3, 16), draw(2, 1, 3, 16)
    pool = init_kv_pool(config).set_kv_buffer(0, ints(6), k, v)
    assert pool.buffers[0].shape == (6, 4, 3, 2, 128)
    row = pool.buffers[0][1, 2]
    assert same(row[:, 0, :16], k[0]) and same(row[:, 1, :16], v[0])
    assert not np.any(row[..., 16:])


@pytest.mark.parametrize("location", [-1, 0, 3, 24, 2**30])
def test_a_token_without_a_page_is_not_written(location):
    pool = init_kv_pool(KVConfig(**KV))
    token = draw(1, 1, 3, 16)
    assert same(pool.set_kv_buffer(0, ints(location), token, token), pool)
    latents = init_mla_pool(MLAConfig(**MLA))
    location = location if location < 24 else location + 6
    written = latents.set_kv_buffer(1, ints(location), draw(1, 1, 24), draw(2, 1, 8))
    assert location == 3 or same(written, latents)


def test_the_last_token_of_the_dummy_page_is_not_written():
    latents = init_mla_pool(MLAConfig(**MLA))
    written = latents.set_kv_buffer(1, ints(4), draw(1, 1, 24), draw(2, 1, 8))
    assert same(written, latents)


# Latents.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_latents_that_share_words_are_joined(dtype):
    config = MLAConfig(**MLA | dict(dtype=dtype))
    pool = init_mla_pool(config)
    wanted = np.zeros((6 * 5, 32), dtype)
    # Both tokens of a word, the second alone, the first where the second is held.
    for seed, location in enumerate([[5, 6, 8], [7, 9, 12], [11, 29, 13, 10]]):
        latent = draw(seed, len(location), 24).astype(dtype)
        rope = draw(seed + 9, len(location), 8).astype(dtype)
        pool = pool.set_kv_buffer(2, ints(*location), latent, rope)
        wanted[location] = np.concatenate([latent, rope], 1)
    read = np.concatenate(pool.read_pages(2, jnp.arange(6)), -1).reshape(wanted.shape)
    np.testing.assert_array_equal(read, wanted)


def test_latent_and_rotary_part_are_padded_apart():
    pool = init_mla_pool(MLAConfig(**MLA))
    latent, rope = draw(1, 1, 24), draw(2, 1, 8)
    row = pool.set_kv_buffer(1, ints(7), latent, rope).buffers[0]
    assert row.shape == (6, 3, 2, 256)
    assert same(row[1, 1, 0, :24], latent[0]) and same(row[1, 1, 0, 128:136], rope[0])
    assert not np.any(row[1, 1, 0, 24:128]) and not np.any(row[1, 1, 0, 136:])


# Sliding windows.


def test_swa_layers_have_a_page_space_of_their_own():
    full = KVConfig(**KV)
    swa = KVConfig(**KV | dict(layers=(1, 2), num_pages=2, num_kv_heads=1))
    pool = init_swa_kv_pool(full, swa)
    k, v = draw(1, 1, 3, 16), draw(2, 1, 3, 16)
    pool = pool.set_kv_buffer(3, ints(20), ints(4), k, v)
    pool = pool.set_kv_buffer(2, ints(20), ints(4), k[:, :1], v[:, :1])
    assert same(pool.read_pages(3, ints(5), ints(1))[0][0, 0], k[0])
    assert same(pool.read_pages(2, ints(5), ints(1))[1][0, 0], v[0, :1])
    assert pool.memory_bytes == pool.full.memory_bytes + pool.swa.memory_bytes


# Recurrent states.


def recurrent(kind: str, **more):
    config = RecurrentConfig(num_slots=7, layers=LAYERS, **KINDS[kind] | more)
    pool = init_recurrent_state_pool(config)
    random = [
        draw(seed, *leaf.shape, dtype=leaf.dtype).at[0].set(0)
        for seed, leaf in enumerate(jax.tree.leaves(pool))
    ]
    return jax.tree.unflatten(jax.tree.structure(pool), random)


def states(pool, requests: int, seed=50):
    """Final states of one layer, of `requests` requests."""
    make = lambda buffer: draw(seed, requests, *buffer.shape[1:], dtype=buffer.dtype)
    return make(pool.temporal[0]), make(pool.conv[0]) if pool.conv else None


def test_the_shapes_of_each_kind():
    shapes = lambda kind: [leaf.shape for leaf in jax.tree.leaves(recurrent(kind))]
    assert shapes("kda") == [(8, 2, 128, 128)] * 3 + [(8, 768, 3)] * 3
    assert shapes("gdn") == [(8, 4, 16, 24)] * 3 + [(8, 160, 3)] * 3
    assert shapes("gla") == [(8, 2, 128, 128)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_takes_temporal_and_conv_of_all_layers(kind):
    pool = recurrent(kind)
    copied = jax.jit(lambda pool, *lanes: pool.copy_slots(*lanes))(
        pool, ints(3, 0, 5), ints(1, 2, 7)
    )
    for old, new in zip(jax.tree.leaves(pool), jax.tree.leaves(copied), strict=True):
        assert same(new, old.at[1].set(old[3]).at[7].set(old[5]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_request_reads_zeros_and_nothing_is_zeroed(kind):
    pool = recurrent(kind)
    slots, is_fresh = ints(4, 4, 0, 6), jnp.asarray([False, True, False, False])
    temporal, conv = pool.gather_state(2, slots, is_fresh)
    assert same(temporal[0], pool.temporal[1][4]) and same(
        temporal[3], pool.temporal[1][6]
    )
    assert not np.any(temporal[1:3])
    assert (conv is None) == (kind == "gla")
    if conv is None:
        return
    assert same(conv[0], pool.conv[1][4]) and not np.any(conv[1:3])


class TestTrackScatter:
    """Final states go to the running slot and, where masked, to the track slot too."""

    def put(self, kind, slots, index, mask):
        pool = recurrent(kind)
        final = states(pool, len(slots))
        track = (ints(*index), jnp.asarray(mask))
        return pool, final, pool.put_state(6, ints(*slots), *final, track)

    @pytest.mark.parametrize("kind", KINDS)
    def test_mask_on_writes_the_slot_with_the_running_slots_bits(self, kind):
        pool, final, written = self.put(kind, [1, 2], [5, 7], [True, True])
        before, after = pool.temporal + pool.conv, written.temporal + written.conv
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            if place % 3 != 2:  # another layer's
                assert same(old, new)
                continue
            state = jax.tree.leaves(final)[place // 3]
            wanted = old.at[1].set(state[0]).at[2].set(state[1])
            assert same(new, wanted.at[5].set(state[0]).at[7].set(state[1]))

    @pytest.mark.parametrize("kind", KINDS)
    def test_mask_off_preserves_the_slot(self, kind):
        pool, final, written = self.put(kind, [1, 2], [5, 7], [False, True])
        assert same(written.temporal[2][5], pool.temporal[2][5])
        assert same(written.temporal[2][7], final[0][1])
        assert not pool.conv or same(written.conv[2][5], pool.conv[2][5])

    @pytest.mark.parametrize("kind", KINDS)
    def test_index_0_is_a_no_op(self, kind):
        pool, final, written = self.put(kind, [1, 2], [0, 0], [True, True])
        assert same(written, pool.put_state(6, ints(1, 2), *final))
        assert not any(np.any(leaf[0]) for leaf in jax.tree.leaves(written))

    @pytest.mark.parametrize("kind", KINDS)
    def test_none_equals_a_batch_without_boundaries(self, kind):
        pool, final, written = self.put(kind, [3, 0], [0, 0], [False, False])
        assert same(written, pool.put_state(6, ints(3, 0), *final))
        assert same(written, pool.put_state(6, ints(3, 0), *final, None))

    def test_a_padded_lane_never_writes_the_dummy(self):
        _, _, written = self.put("gdn", [0, 0], [0, 4], [True, True])
        assert not any(np.any(leaf[0]) for leaf in jax.tree.leaves(written))


# Sizes, sharding, settings.


def test_bytes_are_those_that_sizing_counts():
    pool = init_kv_pool(KVConfig(**KV))
    page = entry_bytes.kv_page_bytes(
        page_size=4, num_layers=2, num_kv_heads=3, head_dim=16
    )
    assert pool.memory_bytes == 6 * page
    page = entry_bytes.mla_page_bytes(
        page_size=5, num_layers=2, kv_lora_rank=24, rope_head_dim=8
    )
    assert init_mla_pool(MLAConfig(**MLA)).memory_bytes == 6 * page
    for kind, shape in KINDS.items():
        slot = entry_bytes.recurrent_slot_bytes(num_layers=3, **shape)
        assert recurrent(kind).slot_bytes == slot
        assert recurrent(kind).memory_bytes == 8 * slot


def test_known_models_have_known_slots():
    kda = RecurrentConfig(
        num_slots=1,
        layers=tuple(range(20)),
        num_v_heads=32,
        v_head_dim=128,
        conv_kernel_size=4,
    )
    gdn = dataclasses.replace(kda, layers=tuple(range(30)), num_k_heads=16)
    slot = lambda c: jax.eval_shape(lambda: init_recurrent_state_pool(c)).slot_bytes
    assert slot(kda) == 43_417_600
    assert slot(gdn) == 64_389_120


def on_one_device(tree):
    return jax.tree.map(jnp.asarray, jax.device_get(tree))


def two_by_two():
    return jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])


def test_heads_lie_over_tensor_and_slots_over_data():
    mesh = two_by_two()
    config = RecurrentConfig(num_slots=3, layers=(0,), num_ranks=2, **KINDS["gdn"])
    shapes = jax.eval_shape(lambda: init_recurrent_state_pool(config))
    specs = shapes.partition_specs()
    assert specs.temporal == (P("data", "tensor", None, None),)
    make = jax.jit(
        lambda: init_recurrent_state_pool(config),
        out_shardings=shardings(mesh, specs, shapes),
    )
    pool = make()
    assert pool.temporal[0].sharding == NamedSharding(mesh, specs.temporal[0])
    assert pool.conv[0].addressable_shards[0].data.shape == (4, 80, 3)
    copy = jax.shard_map(
        lambda pool, src, dst: pool.copy_slots(src, dst),
        mesh=mesh,
        in_specs=(specs, P("data"), P("data")),
        out_specs=specs,
    )
    pool = jax.tree.map(lambda x: x.at[2].set(1).at[4 + 3].set(2), on_one_device(pool))
    pool = jax.device_put(pool, shardings(mesh, specs, shapes))
    lanes = jax.device_put((ints(2, 3), ints(1, 2)), NamedSharding(mesh, P("data")))
    copied = jax.device_get(jax.jit(copy, donate_argnums=0)(pool, *lanes))
    for leaf in jax.tree.leaves(copied):
        rows = leaf.reshape(8, -1)
        assert rows.min(1).tolist() == rows.max(1).tolist() == [0, 1, 1, 0, 0, 0, 2, 2]


def test_kv_is_written_by_each_shard():
    mesh = two_by_two()
    config = KVConfig(**KV | dict(num_kv_heads=4, num_ranks=2))
    shapes = jax.eval_shape(lambda: init_kv_pool(config))
    specs = shapes.partition_specs()
    pool = jax.device_put(init_kv_pool(config), shardings(mesh, specs, shapes))
    tokens = P("data", "tensor", None)
    write = jax.shard_map(
        lambda pool, *rest: pool.set_kv_buffer(3, *rest),
        mesh=mesh,
        in_specs=(specs, P("data"), tokens, tokens),
        out_specs=specs,
    )
    k, v = draw(1, 2, 4, 16), draw(2, 2, 4, 16)
    place = lambda spec, *arrays: jax.device_put(arrays, NamedSharding(mesh, spec))
    args = place(P("data"), ints(4, 9)) + place(tokens, k, v)
    written = on_one_device(jax.jit(write, donate_argnums=0)(pool, *args))
    read_k, read_v = written.read_pages(3, ints(1, 6 + 2))
    assert same(read_k[[0, 1], [0, 1]], k) and same(read_v[[0, 1], [0, 1]], v)


def test_uneven_shards_are_refused():
    shapes = jax.eval_shape(lambda: init_kv_pool(KVConfig(**KV | dict(num_ranks=2))))
    with pytest.raises(ValueError, match=r"axis 2 of .* over 2 devices of 'tensor'"):
        shardings(two_by_two(), shapes.partition_specs(), shapes)


BAD = [
    (KVConfig, KV, dict(num_pages=0), "num_pages=0; wanted"),
    (KVConfig, KV, dict(head_dim=True), "head_dim=True"),
    (KVConfig, KV, dict(layers=()), r"layers=\(\)"),
    (KVConfig, KV, dict(layers=(1, 1)), "distinct"),
    (MLAConfig, MLA, dict(rope_head_dim=-8), "rope_head_dim=-8"),
    (
        RecurrentConfig,
        KINDS["gdn"] | dict(num_slots=7, layers=LAYERS),
        dict(num_k_heads=3),
        "num_v_heads=4 with num_k_heads=3",
    ),
    (
        RecurrentConfig,
        KINDS["gla"] | dict(num_slots=7, layers=LAYERS),
        dict(conv_kernel_size=0),
        "conv_kernel_size=0",
    ),
]


@pytest.mark.parametrize(("config", "good", "bad", "message"), BAD)
def test_bad_settings_are_named(config, good, bad, message):
    config(**good)
    with pytest.raises(ValueError, match=message):
        config(**good | bad)


def test_bad_arguments_are_named():
    pool, token = init_kv_pool(KVConfig(**KV)), draw(1, 1, 3, 16)
    with pytest.raises(ValueError, match="layer 1; wanted one of"):
        pool.set_kv_buffer(1, ints(4), token, token)
    with pytest.raises(ValueError, match="k float32"):
        pool.set_kv_buffer(0, ints(4), token.astype(jnp.float32), token)
    with pytest.raises(ValueError, match="one a layer"):
        pool.replace_buffer(pool.buffers[:1])
    with pytest.raises(ValueError, match="both pools"):
        init_swa_kv_pool(KVConfig(**KV), KVConfig(**KV))
    states_ = recurrent("gla")
    with pytest.raises(ValueError, match="conv given, conv_kernel_size=1"):
        states_.put_state(1, ints(1), *states(recurrent("kda"), 1))
    with pytest.raises(ValueError, match="conv missing"):
        recurrent("kda").put_state(1, ints(1), states(states_, 1)[0])


def test_buffers_of_a_step_are_taken_as_they_are():
    pool = init_kv_pool(KVConfig(**KV))
    taken = pool.replace_buffer([b + 1 for b in pool.buffers])
    assert same(taken.buffers, tuple(b + 1 for b in pool.buffers))
    kda = recurrent("kda")
    assert same(
        kda.replace_buffer(kda.temporal[::-1], kda.conv).temporal, kda.temporal[::-1]
    )


# What is compiled. The numbers of rows are odd, to be found in the text.


def large_kv(tokens: int):
    config = KVConfig(
        num_pages=136, page_size=64, layers=(0, 1), num_kv_heads=8, head_dim=128
    )
    pool = jax.eval_shape(lambda: init_kv_pool(config))
    token = jax.ShapeDtypeStruct((tokens, 8, 128), BF16)
    write = lambda pool, *rest: pool.set_kv_buffer(1, *rest)
    return write, pool, jax.ShapeDtypeStruct((tokens,), jnp.int32), token, token


def large_mla(tokens: int):
    config = MLAConfig(
        num_pages=136, page_size=64, layers=(0, 1), kv_lora_rank=512, rope_head_dim=64
    )
    pool = jax.eval_shape(lambda: init_mla_pool(config))
    part = lambda width: jax.ShapeDtypeStruct((tokens, width), BF16)
    write = lambda pool, *rest: pool.set_kv_buffer(1, *rest)
    return write, pool, jax.ShapeDtypeStruct((tokens,), jnp.int32), part(512), part(64)


def large_recurrent():
    return jax.eval_shape(
        lambda: init_recurrent_state_pool(
            RecurrentConfig(num_slots=136, layers=(0, 1), **KINDS["kda"])
        )
    )


def large_put(requests: int):
    pool = large_recurrent()
    index = jax.ShapeDtypeStruct((requests,), jnp.int32)
    final = [
        jax.ShapeDtypeStruct((requests, *buffer.shape[1:]), buffer.dtype)
        for buffer in (pool.temporal[0], pool.conv[0])
    ]
    mask = jax.ShapeDtypeStruct((requests,), bool)
    put = lambda pool, *rest: pool.put_state(1, *rest)
    return put, pool, index, *final, (index, mask)


def large_copy(lanes: int):
    index = jax.ShapeDtypeStruct((lanes,), jnp.int32)
    return lambda pool, *rest: pool.copy_slots(*rest), large_recurrent(), index, index


WRITES = [(large_kv, 48), (large_kv, 512), (large_mla, 512), (large_put, 4)]
WRITES += [(large_copy, 4)]


def assert_in_place(compiled, pool):
    """All of the pool aliased, no buffer copied, and no room to hold one."""
    memory = compiled.memory_analysis()
    smallest = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= pool.memory_bytes
    assert memory.temp_size_in_bytes < smallest
    whole = re.compile(r"= \w+\[(137|8768|4384),[\d,]*\]\S* copy\(")
    assert not whole.findall(compiled.as_text() or "")


@pytest.mark.parametrize(("make", "lanes"), WRITES)
def test_on_the_cpu_writes_are_in_place(make, lanes):
    function, *args = make(lanes)
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    assert_in_place(compiled, args[0])


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("make", "lanes"), WRITES)
def test_on_a_tpu_writes_are_in_place(make, lanes):
    function, *args = make(lanes)
    compiled = compiled_for_tpu(function, *args)
    assert_in_place(compiled, args[0])
    assert "tpu_custom_call" in (compiled.as_text() or "")


def test_replaced_buffers_are_the_donated_ones():
    _, pool, *_ = large_kv(1)
    replace = lambda pool: pool.replace_buffer(b.at[1].add(1) for b in pool.buffers)
    compiled = jax.jit(replace, donate_argnums=0).lower(pool).compile()
    assert_in_place(compiled, pool)
