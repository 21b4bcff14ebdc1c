"""Kernels: every implementation gives the same bits on every row, in place.

One class a kernel runs for each implementation. The TPU's runs in interpret mode,
which also looks for races between its DMAs.
"""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_chip import TPU, compiled_for_tpu, needs_libtpu

from uhrc_fn.kernels import copy_slots, row_dma, track_scatter
from uhrc_fn.kernels.copy_slots import cpu as copy_cpu
from uhrc_fn.kernels.copy_slots import reference as copy_reference
from uhrc_fn.kernels.copy_slots import tpu as copy_tpu
from uhrc_fn.kernels.track_scatter import reference as track_reference
from uhrc_fn.kernels.track_scatter import tpu as track_tpu

NUM_SLOTS = 8
# A layer's temporal state in both dtypes, which a DMA can move; a conv state and a
# vector, which none can.
SHAPES = [
    ((2, 8, 128), "float32"),
    ((2, 16, 128), "bfloat16"),
    ((24, 3), "bfloat16"),
    ((5,), "float32"),
]


def states(rows: int, seed: int = 0) -> list[jax.Array]:
    """Arrays of random bits: a state may hold any.

    But for the payload of a bfloat16 NaN, which JAX 0.10 does not keep on CPU.
    """
    random = np.random.default_rng(seed)

    def bits(shape, dtype):
        size = (rows, *shape, jnp.dtype(dtype).itemsize)
        array = random.integers(0, 256, size, np.uint8).view(dtype)
        array[np.isnan(array) & (dtype == "bfloat16")] = np.nan
        return jnp.asarray(array.reshape(rows, *shape))

    return [bits(shape, dtype) for shape, dtype in SHAPES]


def as_bytes(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint8).reshape(array.shape[0], -1)


def assert_same_bits(arrays, wanted):
    for array, expected in zip(arrays, wanted, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(as_bytes(array), as_bytes(expected))


def lanes(*values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# Older versions only warn of a race, and have no setting for it.
_CAN_RAISE = "on_race" in inspect.signature(pltpu.InterpretParams).parameters
# A clock of the default size has one entry for all DMAs, which hides their races.
INTERPRET = pltpu.InterpretParams(
    detect_races=True,
    vector_clock_size=1024,
    **({"on_race": "warn"} if _CAN_RAISE else {}),
)


def without_races(kernel):
    """`kernel` in interpret mode; fails where two of its accesses are a race."""

    def run(*args):
        jax.block_until_ready(args)
        found = jax.block_until_ready(kernel(*args, interpret=INTERPRET))
        # None where nothing has been interpreted yet: no lanes, no kernel.
        assert interpreter.races is None or not interpreter.races.races_found
        return found

    return run


COPIES = {
    "api": copy_slots,
    "reference": copy_reference.copy_slots,
    "cpu": copy_cpu.copy_slots,
    "tpu": without_races(copy_tpu.copy_slots),
}


@pytest.fixture(params=COPIES)
def copy(request):
    return COPIES[request.param]


def copied_by_hand(buffers, src, dst):
    wanted = [np.array(buffer) for buffer in buffers]
    for old, new in zip(buffers, wanted, strict=True):
        for read, write in zip(np.asarray(src), np.asarray(dst), strict=True):
            if read and write:
                new[write] = np.asarray(old)[read]
    return wanted


class TestCopySlots:
    """Implementations take 0 in both lanes for nothing; the API in either."""

    @pytest.mark.parametrize(
        ("src", "dst"),
        [
            ([0, 0, 0], [0, 0, 0]),
            ([], []),
            ([1, 0, 3], [2, 0, 4]),
            ([5, 6, 7], [1, 2, 8]),
            ([4, 4], [1, 8]),
            ([3], [3]),
        ],
        ids=["all_zero", "empty", "mixed", "all_nonzero", "one_source", "onto_itself"],
    )
    def test_each_destination_holds_its_sources_bits(self, copy, src, dst):
        buffers = states(NUM_SLOTS + 1)
        wanted = copied_by_hand(buffers, src, dst)
        assert_same_bits(copy(buffers, lanes(*src), lanes(*dst)), wanted)

    @pytest.mark.parametrize("seed", range(3))
    def test_any_slots_that_do_not_meet(self, copy, seed):
        random = np.random.default_rng(seed)
        slots = random.permutation(np.arange(1, NUM_SLOTS + 1))
        src, dst = slots[:4], slots[4:]
        is_live = random.random(4) < 0.7
        src, dst = src * is_live, dst * is_live
        buffers = states(NUM_SLOTS + 1, seed)
        wanted = copied_by_hand(buffers, src, dst)
        assert_same_bits(copy(buffers, lanes(*src), lanes(*dst)), wanted)


class TestCopySlotsApi:
    @pytest.mark.parametrize(
        ("src", "dst"), [(0, 3), (3, 0), (-1, 3), (3, -1), (9, 3), (3, 9), (2**30, 3)]
    )
    def test_a_lane_without_two_slots_copies_nothing(self, src, dst):
        buffers = states(NUM_SLOTS + 1)
        assert_same_bits(copy_slots(buffers, lanes(src), lanes(dst)), buffers)

    def test_a_tree_of_buffers_comes_back_as_it_came(self):
        one, *others = states(NUM_SLOTS + 1)
        tree = {"temporal": (one,), "conv": others}
        found = copy_slots(tree, lanes(1), lanes(2))
        wanted = copied_by_hand([one, *others], [1], [2])
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert_same_bits([*found["temporal"], *found["conv"]], wanted)
        assert_same_bits([copy_slots(one, lanes(1), lanes(2))], wanted[:1])
        assert copy_slots((), lanes(1), lanes(2)) == ()

    def test_ranks_copy_their_own_slots_under_vmap(self):
        ranks = [states(NUM_SLOTS + 1, seed) for seed in range(2)]
        src, dst = [[1, 0, 2], [8, 9, 7]], [[3, 4, 0], [1, 2, 6]]
        together = jax.vmap(copy_slots)(
            [jnp.stack(both) for both in zip(*ranks, strict=True)],
            jnp.asarray(src, jnp.int32),
            jnp.asarray(dst, jnp.int32),
        )
        for rank, buffers in enumerate(ranks):
            alone = copy_slots(buffers, lanes(*src[rank]), lanes(*dst[rank]))
            assert_same_bits([buffer[rank] for buffer in together], alone)

    def test_ranks_copy_their_own_slots_under_shard_map(self):
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        buffers = states(2 * (NUM_SLOTS + 1))
        args = (buffers, lanes(1, 0, 8, 9), lanes(3, 4, 1, 2))
        args = jax.device_put(args, NamedSharding(mesh, P("data")))
        copy = jax.shard_map(
            copy_slots, mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        found = jax.jit(copy)(*args)
        # Slot 9 is none: each rank has eight, and a dummy.
        wanted = copied_by_hand(buffers, [1, 9 + 8], [3, 9 + 1])
        assert_same_bits(found, wanted)

    @pytest.mark.parametrize(
        ("buffers", "src", "dst", "message"),
        [
            ([jnp.zeros(3), jnp.zeros(4)], lanes(1), lanes(2), "same number of rows"),
            (jnp.zeros(3), lanes(1, 2), lanes(2), "as long as the others"),
            (jnp.zeros(3), jnp.ones(1), lanes(2), "int32"),
        ],
    )
    def test_bad_arguments_are_named(self, buffers, src, dst, message):
        with pytest.raises(ValueError, match=message):
            copy_slots(buffers, src, dst)


TRACKS = {
    "api": track_scatter,
    "reference": lambda buffers, rows, index, mask: track_reference.track_scatter(
        buffers, rows, jnp.where(mask, index, 0)
    ),
    "tpu": lambda buffers, rows, index, mask: without_races(track_tpu.track_scatter)(
        buffers, rows, jnp.where(mask, index, 0)
    ),
}


@pytest.fixture(params=TRACKS)
def track(request):
    return TRACKS[request.param]


class TestTrackScatter:
    @pytest.mark.parametrize(
        ("index", "mask", "written"),
        [
            ([3], [True], {3: 0}),
            ([3], [False], {}),
            ([0], [True], {}),
            ([5, 2, 0, 7], [True, False, True, True], {5: 0, 7: 3}),
            ([], [], {}),
        ],
        ids=["mask_on", "mask_off", "index_0", "mixed", "empty"],
    )
    def test_a_slot_is_written_where_mask_and_index_say_so(
        self, track, index, mask, written
    ):
        buffers, rows = states(NUM_SLOTS + 1), states(len(index), seed=1)
        wanted = [np.array(buffer) for buffer in buffers]
        for held, new in zip(wanted, rows, strict=True):
            for slot, request in written.items():
                held[slot] = np.asarray(new)[request]
        found = track(buffers, rows, lanes(*index), jnp.asarray(mask, bool))
        assert_same_bits(found, wanted)


class TestTrackScatterApi:
    @pytest.mark.parametrize("slot", [-1, NUM_SLOTS + 1, 2**30])
    def test_a_slot_out_of_range_writes_nothing(self, slot):
        buffers = states(NUM_SLOTS + 1)
        rows = states(1, seed=1)
        found = track_scatter(buffers, rows, lanes(slot), jnp.ones(1, bool))
        assert_same_bits(found, buffers)

    def test_ranks_write_their_own_slots_under_vmap(self):
        buffers = [jnp.stack([b, b]) for b in states(NUM_SLOTS + 1)]
        rows = [jnp.stack([r, r]) for r in states(2, seed=1)]
        index = jnp.asarray([[1, 9], [0, 8]], jnp.int32)
        mask = jnp.ones((2, 2), bool)
        together = jax.vmap(track_scatter)(buffers, rows, index, mask)
        for rank in range(2):
            of_rank = functools.partial(jax.tree.map, lambda array: array[rank])  # noqa: B023
            alone = track_scatter(*of_rank((buffers, rows, index, mask)))
            assert_same_bits(of_rank(together), alone)

    @pytest.mark.parametrize(
        ("rows", "index", "mask"),
        [
            (jnp.zeros((2, 3), jnp.bfloat16), lanes(1, 2), jnp.ones(2, bool)),
            (jnp.zeros((2, 4)), lanes(1, 2), jnp.ones(2, bool)),
            (jnp.zeros((1, 3)), lanes(1, 2), jnp.ones(2, bool)),
            (jnp.zeros((2, 3)), lanes(1, 2), jnp.ones(3, bool)),
            (jnp.zeros((2, 3)), lanes(1, 2), lanes(1, 1)),
        ],
        ids=["dtype", "shape", "rows", "masks", "mask_dtype"],
    )
    def test_bad_arguments_are_named(self, rows, index, mask):
        with pytest.raises(ValueError, match=r"track_scatter.*wanted"):
            track_scatter(jnp.zeros((9, 3)), rows, index, mask)


def test_the_race_detection_sees_a_race():
    buffer = states(NUM_SLOTS + 1)[0]
    with pytest.raises(AssertionError):
        without_races(copy_tpu.copy_slots)([buffer], lanes(1, 2), lanes(3, 3))


def test_narrow_rows_are_left_to_xla():
    assert [row_dma.fills_tiles(buffer) for buffer in states(1)] == [1, 1, 0, 0]
    assert not row_dma.fills_tiles(jnp.zeros((9, 0, 8, 128)))


# What is compiled. The numbers of rows are odd, to be found in the text.

ROWS = 43


def large(dtype_of_temporal="float32", layers=2):
    make = lambda shape, dtype: jax.ShapeDtypeStruct((ROWS, *shape), dtype)
    temporal = [make((4, 128, 128), dtype_of_temporal)] * layers
    return temporal + [make((1536, 3), jnp.bfloat16)] * layers


def arguments(kernel):
    index = jax.ShapeDtypeStruct((6,), jnp.int32)
    if kernel is copy_slots:
        return large(), index, index
    rows = [jax.ShapeDtypeStruct((6, *b.shape[1:]), b.dtype) for b in large()]
    return large(), rows, index, jax.ShapeDtypeStruct((6,), bool)


def size(arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def assert_in_place(compiled, buffers, temporary: int):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size(buffers)
    assert memory.temp_size_in_bytes < temporary
    whole = re.compile(rf"= \w+\[{ROWS},[\d,]*\]\S* copy\(")
    assert not whole.findall(compiled.as_text())


@pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    reason="on CPU JAX 0.10 makes float32 of what it moves in a bfloat16 buffer",
)
@pytest.mark.parametrize("kernel", [copy_slots, track_scatter])
def test_on_the_cpu_the_buffers_stay_in_place(kernel):
    args = arguments(kernel)
    compiled = jax.jit(kernel, donate_argnums=0).lower(*args).compile()
    assert_in_place(compiled, args[0], temporary=size(args[0]) / ROWS)


@pytest.mark.parametrize("shape", [(1, 64, 64), (768, 1)])
def test_on_the_cpu_states_of_one_head_or_tap_stay_in_place(shape):
    """A rank of a sharded pool may hold one: XLA must not lay them out anew."""
    state = [jax.ShapeDtypeStruct((ROWS, *shape), jnp.float32)]
    index = jax.ShapeDtypeStruct((6,), jnp.int32)
    copy = jax.jit(copy_slots, donate_argnums=0)
    compiled = copy.lower(state, index, index).compile()
    assert_in_place(compiled, state, temporary=64 * 1024)


def test_on_the_cpu_single_rows_written_in_turn_stay_in_place():
    """One request alone: XLA must not make slices, and then copies, of its scatters."""
    buffer = [jax.ShapeDtypeStruct((ROWS, 8, 128), jnp.float32)]
    slot = jax.ShapeDtypeStruct((1,), jnp.int32)

    def write_twice(buffers, slot):
        for _ in range(2):
            rows = [buffer[slot] + 1 for buffer in buffers]
            buffers = track_scatter(buffers, rows, slot, slot > 0)
        return buffers

    compiled = jax.jit(write_twice, donate_argnums=0).lower(buffer, slot).compile()
    assert_in_place(compiled, buffer, temporary=4 * size(buffer) / ROWS)


def test_the_search_for_copies_finds_one():
    args = arguments(copy_slots)
    compiled = jax.jit(copy_slots).lower(*args).compile()
    with pytest.raises(AssertionError):
        assert_in_place(compiled, args[0], temporary=2**40)
    assert re.findall(rf"= \w+\[{ROWS},[\d,]*\]\S* copy\(", compiled.as_text() or "")


@pytest.mark.parametrize("kernel", [copy_slots, track_scatter])
def test_the_platform_is_chosen_when_lowering(kernel):
    named = lambda platform: f'kernel_name = "{kernel.__name__}"' in lowered(platform)

    def lowered(platform):
        with jax.sharding.use_abstract_mesh(TPU):
            exported = jax.export.export(jax.jit(kernel), platforms=[platform])
            return exported(*arguments(kernel)).mlir_module()

    assert named("tpu")
    assert not named("cpu") and not named("cuda")


@needs_libtpu
@pytest.mark.parametrize("kernel", [copy_slots, track_scatter])
def test_on_a_tpu_the_kernel_moves_rows_in_place(kernel):
    args = arguments(kernel)
    compiled = compiled_for_tpu(kernel, *args)
    assert_in_place(compiled, args[0], temporary=size(args[0]) / ROWS)
    text = compiled.as_text().splitlines()
    calls = [line for line in text if "tpu_custom_call" in line]
    assert len(calls) == 1 and kernel.__name__ in calls[0]
