"""The step is one program: no host in it, the state in place, no copy of a pool.

Programs are made of shapes alone; nothing runs. Numbers of pages, nodes and slots are
odd, so that an array with a row for each can be told from everything else.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from serving_harness import FAMILIES, FAST, MAX_LENGTH, cache_config, model_config
from test_loop_free import equations
from tpu_chip import compiled_for_tpu, needs_libtpu

from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.config import ModelConfig, small_config
from uhrc_fn.serving.models.model import forward, init_model, init_pools
from uhrc_fn.serving.state import init_serving
from uhrc_fn.serving.step import serve_steps

PAGES, SWA_PAGES, SLOTS = 16_410, 16_416, 4_098
ROWS = {PAGES + 1, SWA_PAGES + 1, SLOTS + 1}
CHUNK = 16
# One family of each set of components where time is short.
QUICK = ("gqa", "swa-gqa", "kda-mla")
BY_COST = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in FAMILIES
]


def two_layers(family: str, **changes) -> ModelConfig:
    """One layer of each kind: more add nothing but copies of themselves."""
    model = dataclasses.replace(model_config(family), **changes)
    return dataclasses.replace(model, layers=model.layers[-2:])


def shapes_of(family: str, *, use_cache: bool = True, **changes):
    """Shapes of a model and of a server's state."""
    model = two_layers(family, **changes)
    sizes = {"num_pages": PAGES}
    if model.has("swa"):
        sizes |= {"num_swa_pages": SWA_PAGES}
    if model.recurrent_layers:
        sizes |= {"num_recurrent_slots": SLOTS, "recurrent_track_interval": CHUNK}
    config = ServeConfig(
        cache=cache_config(family, 16, **sizes),
        max_length=MAX_LENGTH,
        num_requests=6,
        decode_lanes=4,
        prefill_lanes=2,
        chunk_tokens=CHUNK,
        use_cache=use_cache,
    )
    pages, swa_pages, slots = config.pool_pages

    def make():
        many = {"num_swa_pages": swa_pages, "num_slots": slots}
        pools = init_pools(model, num_pages=pages, page_size=16, **many)
        return init_model(jax.random.key(0), model), init_serving(config, pools)

    return jax.eval_shape(make)


@functools.cache
def traced(family: str, use_cache: bool = True):
    jit = jax.jit(
        serve_steps, static_argnums=2, donate_argnums=1, compiler_options=FAST
    )
    return jit.trace(*shapes_of(family, use_cache=use_cache), 2)


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def whole_copies(text: str) -> list[str]:
    """Copies in a compiled program of arrays with a row for each page, node or slot."""
    copies = re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", text)
    return [dims for dims in copies if ROWS & {int(d) for d in dims.split(",")}]


def leaves_the_program(jaxpr) -> list[str]:
    """Primitives that call the host, or code that is not XLA's."""
    names = {equation.primitive.name for equation in equations(jaxpr)}
    return [n for n in names if "callback" in n or n in ("ffi_call", "debug_print")]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_never_calls_the_host(family):
    assert not leaves_the_program(traced(family).jaxpr.jaxpr)


def test_a_call_of_the_host_would_be_seen():
    def noisy(x):
        jax.debug.callback(lambda _: None, x)
        return x + 1

    loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jax.jit(noisy)(x), x)
    found = leaves_the_program(jax.make_jaxpr(loop)(jnp.int32(0)).jaxpr)
    assert found == ["debug_callback"]


@pytest.mark.parametrize("family", BY_COST)
def test_the_state_stays_in_place_and_no_pool_is_copied(family):
    compiled = traced(family).lower().compile()
    _, state = shapes_of(family)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= bytes_of(state)
    # One buffer of one layer would be more.
    assert memory.temp_size_in_bytes < bytes_of(state) / 100
    text = compiled.as_text() or ""
    assert text.count("ENTRY") == 1 and "callback" not in text
    assert not whole_copies(text)


@pytest.mark.slow
def test_a_copy_of_the_state_would_be_seen():
    """Undonated, what is written must be copied first."""
    jitted = jax.jit(serve_steps, static_argnums=2, compiler_options=FAST)
    compiled = jitted.lower(*shapes_of("gqa"), 1).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert whole_copies(compiled.as_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache_the_program_holds_nothing_of_it(family):
    """No array with a row a node, in or between; and far fewer equations."""
    with_cache = traced(family).jaxpr.jaxpr
    without = traced(family, use_cache=False).jaxpr.jaxpr
    assert rows_of(with_cache) & ROWS
    assert not rows_of(without) & ROWS
    count = lambda jaxpr: sum(1 for _ in equations(jaxpr))
    assert count(without) < count(with_cache) / 2


def rows_of(jaxpr) -> set[int]:
    """Leading axes of every array of a program."""
    variables = [v for e in equations(jaxpr) for v in (*e.invars, *e.outvars)]
    shapes = [getattr(v.aval, "shape", ()) for v in [*jaxpr.invars, *variables]]
    return {size for shape in shapes for size in shape}


# What is compiled for a TPU.

# States that fill tiles, so that the kernels move them.
WIDE = {"dtype": "bfloat16", "recurrent_v_dim": 128, "recurrent_k_dim": 128}


@needs_libtpu
@pytest.mark.parametrize("family", ["kda-mla", "gdn-gqa"])
def test_on_a_tpu_a_layer_writes_its_states_in_place(family):
    """The conv buffer too, whose new rows come in a layout of their own."""
    model = small_config(family, num_layers=1, **WIDE)
    lanes = lambda *axes, dtype=jnp.int32: jnp.zeros((4, *axes), dtype)

    def make():
        pools = init_pools(model, num_pages=1, page_size=16, num_slots=SLOTS)
        track = TrackMetadata(lanes(), lanes(dtype=bool))
        decode = Lanes(lanes(1), lanes(), lanes(), lanes(8), lanes(0), lanes(), track)
        return pools, init_model(jax.random.key(0), model), decode

    pools, *rest = jax.eval_shape(make)
    step = lambda pools, model, lanes: forward(model, pools, lanes)
    compiled = compiled_for_tpu(step, pools, *rest)
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of(pools)
    text = compiled.as_text() or ""
    assert kernels(text) == {"track_scatter"}
    assert not whole_copies(text)


@needs_libtpu
@pytest.mark.slow
def test_on_a_tpu_the_step_holds_the_kernels_and_keeps_its_state_in_place():
    model, state = shapes_of("kda-mla", **WIDE)
    steps = lambda state, model: serve_steps(model, state, 2)
    compiled = compiled_for_tpu(steps, state, model)
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of(state)
    text = compiled.as_text() or ""
    assert kernels(text) == {"copy_slots", "track_scatter"}
    assert "callback" not in text
    # A buffer of narrow rows may change its layout where a call begins and ends, not
    # from step to step: what is not the entry computation is the loop over steps.
    loops, entry = text.split("\nENTRY ")
    assert "while(" in entry and kernels(loops) == kernels(text)
    assert not whole_copies(loops)


def kernels(text: str) -> set[str]:
    """Names of the Pallas kernels in a compiled text."""
    calls = [line for line in text.splitlines() if "tpu_custom_call" in line]
    names = ("copy_slots", "track_scatter")
    return {name for name in names if any(name in call for call in calls)}
