"""Engines over small models, for the tests of serving: few shapes, compiled once."""

import functools

import jax
import numpy as np

import uhrc_fn as u
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.engine import Engine
from uhrc_fn.serving.models.config import ModelConfig, small_config
from uhrc_fn.serving.models.model import init_model, init_pools

FAMILIES = ("gqa", "mla", "swa-gqa", "kda-mla", "gdn-gqa", "gla-gqa")
MAX_LENGTH = 128
VOCABULARY = 97
CHUNK = 32

# The models are tiny: compile them fast rather than well.
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def model_config(family: str) -> ModelConfig:
    return small_config(family, vocab_size=VOCABULARY)


@functools.cache
def model_of(family: str):
    return init_model(jax.random.key(0), model_config(family))


def cache_config(family: str, page_size: int, **changes) -> u.CacheConfig:
    """A cache for a family, with room for four requests and as much again."""
    components = model_config(family).components
    pages = MAX_LENGTH // page_size
    settings = {
        "components": components,
        "page_size": page_size,
        "num_pages": 8 * pages,
        "max_prefix_pages": pages,
        "max_live_receipts": 16,
        "victim_plan_size": 32,
    }
    if "SWA" in components:
        window = model_config(family).sliding_window
        settings |= {"num_swa_pages": 8 * pages, "sliding_window_size": window}
    if "RECURRENT" in components:
        settings |= {
            "num_recurrent_slots": 24,
            "enable_recurrent_extra_buffer": page_size > 1,
            "recurrent_track_interval": CHUNK if page_size > 1 else None,
        }
    return u.CacheConfig(**settings | changes)


def make_engine(
    family: str, page_size: int = 16, *, use_cache: bool = True, steps: int = 1, **more
) -> Engine:
    """An engine of four lanes; `more` changes the cache's settings."""
    config = ServeConfig(
        cache=cache_config(family, page_size, **more),
        max_length=MAX_LENGTH,
        num_requests=6,
        decode_lanes=4,
        prefill_lanes=2,
        chunk_tokens=CHUNK,
        use_cache=use_cache,
    )
    pages, swa_pages, slots = config.pool_pages
    pools = init_pools(
        model_config(family),
        num_pages=pages,
        page_size=page_size,
        num_swa_pages=swa_pages,
        num_slots=slots,
    )
    return Engine(
        model_of(family), config, pools, steps_per_call=steps, compiler_options=FAST
    )


def outputs(engine: Engine, prompts, tokens: int, **options) -> list[list[int]]:
    """Serve one after another, so that each may hit what those before published."""
    return [engine.generate([prompt], tokens, **options)[0] for prompt in prompts]


def check(engine: Engine) -> None:
    """No trouble, every invariant, and every entry of every pool accounted for."""
    engine.check()
    state = engine.state
    assert state.cache is not None
    owned = state.tables.owned()
    u.check_invariants(state.cache, owned)
    held = [np.count_nonzero(np.asarray(part)) for part in owned]
    cache = state.cache
    in_tree = np.asarray(cache.evictable + cache.protected)
    total = np.asarray(cache.num_free) + in_tree + held
    assert total.tolist() == list(cache.config.capacities)


def check_idle(engine: Engine) -> None:
    """Nobody holds or locks anything: what is not free is the tree's."""
    check(engine)
    cache = engine.state.cache
    assert cache is not None and engine.is_idle
    assert not np.asarray(cache.protected).any()
    free = np.asarray(cache.num_free + cache.evictable)
    assert free.tolist() == list(cache.config.capacities)


def run_checked(engine: Engine) -> None:
    """Serve everybody, with every invariant checked after each call."""
    while not engine.is_idle:
        engine.step()
        check(engine)


def prompts_around(points, tokens: int = 100, tail: int = 9) -> list[np.ndarray]:
    """Prompts that share a first one's tokens up to each of `points`."""
    random = np.random.default_rng(3)
    draw = lambda count: random.integers(1, VOCABULARY, count).astype(np.int32)
    first = draw(tokens)
    return [first, *(np.concatenate([first[:point], draw(tail)]) for point in points)]
