"""`uhrc_fn` as the benchmarks drive it: a filled cache and prepared arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import uhrc_fn

# Pages that one call inserts while a cache is filled outside the clock.
_FILL_PAGES = 4096


# Of hybrid sets: tokens of the sliding window.
WINDOW = 4096


@functools.cache
def config_for(
    page_size: int, nodes: int, components: str = "FULL"
) -> uhrc_fn.CacheConfig:
    """Settings of every benchmark: as many entries in each pool as nodes."""
    others = {
        "FULL": {},
        "FULL,SWA": dict(num_swa_pages=nodes, sliding_window_size=WINDOW),
        "FULL,RECURRENT": dict(
            num_recurrent_slots=nodes, enable_recurrent_extra_buffer=page_size > 1
        ),
    }
    return uhrc_fn.CacheConfig(
        components=components,
        page_size=page_size,
        num_pages=nodes,
        max_prefix_pages=nodes,
        **others[components],
    )


def stack(trees: Sequence[Any]) -> Any:
    """Stack equal records on a new leading axis, as NumPy arrays."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def key_of(tokens: np.ndarray, config: uhrc_fn.CacheConfig) -> uhrc_fn.RadixKey:
    """Build the key of `tokens` [..., tokens]; leading axes are batch axes."""
    if tokens.ndim == 1:
        return uhrc_fn.radix_key(tokens, config)
    return uhrc_fn.stack_keys([key_of(row, config) for row in tokens])


def insert_params(
    key: uhrc_fn.RadixKey, value: np.ndarray, **others: np.ndarray
) -> uhrc_fn.InsertParams:
    """Arguments of an insert that shares nothing with the tree yet."""
    shared = np.zeros(value.shape[:-1], np.int32)
    return uhrc_fn.InsertParams(key=key, value=value, prev_prefix_len=shared, **others)


def on_device(tree: Any) -> Any:
    """Put prepared arguments where an engine's step has them."""
    return jax.block_until_ready(jax.device_put(tree))


def copy(cache: Any) -> Any:
    """Copy a cache, so that the original survives the next donation."""
    return jax.block_until_ready(jax.tree.map(lambda leaf: leaf.copy(), cache))


def filled(config: uhrc_fn.CacheConfig, tokens: np.ndarray) -> uhrc_fn.CacheState:
    """Build a cache that holds the keys of `tokens` [keys, tokens]."""
    cache = uhrc_fn.init(config)
    pages = tokens.shape[1] // config.page_size
    most = max(1, _FILL_PAGES // pages)
    batch = max(n for n in range(1, most + 1) if len(tokens) % n == 0)
    for start in range(0, len(tokens), batch):
        key = key_of(tokens[start : start + batch], config)
        cache, brought = entries_for(cache, (batch, pages))
        params = insert_params(key, **brought)
        cache, result = uhrc_fn.jitted.insert_batch(cache, params)
        duplicate = np.asarray(result.duplicate())
        twice = np.where(duplicate[..., 0], params.value, 0).ravel()
        cache = uhrc_fn.jitted.free_pages(cache, twice)
        if config.has_swa:
            twice = np.where(duplicate[..., 1], brought["swa_value"], 0).ravel()
            cache = uhrc_fn.jitted.free_swa_pages(cache, twice)
    uhrc_fn.raise_if_bad(cache)
    return cache


def entries_for(
    cache: Any, shape: tuple[int, ...]
) -> tuple[Any, dict[str, np.ndarray]]:
    """Take what inserts of keys [..., pages] bring: one entry a page of each pool.

    Of recurrent slots one a key, for a snapshot at its end.
    """
    config, pages = cache.config, shape[-1]
    count = int(np.prod(shape))
    cache, ids = allocated(cache, count)
    brought = {"value": ids.reshape(shape)}
    if config.has_swa:
        cache, ids = allocated(cache, count, uhrc_fn.jitted.alloc_swa_pages)
        brought["swa_value"] = ids.reshape(shape)
        brought["swa_evicted_seqlen"] = np.zeros(shape[:-1], np.int32)
    if config.has_recurrent:
        cache, ids = allocated(cache, count // pages, uhrc_fn.jitted.alloc_slots)
        brought["recurrent_value"] = ids.reshape(shape[:-1])
        length = pages * config.page_size
        brought["recurrent_length"] = np.full(shape[:-1], length, np.int32)
    return cache, brought


def allocated(
    cache: Any, count: int, alloc: Callable = uhrc_fn.jitted.alloc_pages
) -> tuple[Any, np.ndarray]:
    """Take entries of a pool for requests, in a few calls of one size."""
    calls = -(-count // _FILL_PAGES)
    if count % calls:
        raise ValueError(f"{count} entries do not split into {calls} equal calls")
    ids = []
    for _ in range(calls):
        size = count // calls
        cache, got = alloc(cache, np.int32(size), max_new=size)
        ids.append(np.asarray(got.ids))
    uhrc_fn.raise_if_bad(cache)
    return cache, np.concatenate(ids)


def values_wanted(config: uhrc_fn.CacheConfig, pages: int) -> uhrc_fn.EvictParams:
    """Evict so many SWA pages, or snapshots, and no FULL page."""
    return uhrc_fn.EvictParams(
        num_tokens=np.int32(0),
        swa_num_tokens=np.int32(pages * config.page_size) if config.has_swa else 0,
        recurrent_num=np.int32(pages) if config.has_recurrent else 0,
    )


def cow_clone(both: Any, match: Any) -> tuple[Any, Any]:
    """`uhrc_fn.cow_clone` with cache and states as one donated argument."""
    cache, states = both
    cache, states, result = uhrc_fn.cow_clone(cache, states, match)
    return (cache, states), result


class Runner:
    """Call one jitted operation with the cache donated, and keep the new cache."""

    def __init__(self, function: Callable, cache: Any = None) -> None:
        # A new function object, so that its compilation is this benchmark's own.
        self.function = functools.partial(function)
        self.jitted = jax.jit(self.function, donate_argnums=0, keep_unused=True)
        self.cache = cache

    def __call__(self, *args: Any) -> Any:
        """Run, and wait for the result only."""
        self.cache, result = self.jitted(self.cache, *args)
        waited = getattr(result, "scalars", None)
        if waited is None:  # a record of records
            waited = jax.tree.leaves(result)[-1]
        waited.block_until_ready()
        return result


def floor(function: Callable, cache: Any, *args: Any) -> Callable:
    """Build a function with the leaves of `function` that computes nothing."""
    _, shapes = jax.eval_shape(function, cache, *args)

    def nothing(cache: Any, *_args: Any) -> Any:
        zeros = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), shapes)
        # The barrier keeps JAX from handing the cache back without a call.
        return jax.lax.optimization_barrier(cache), zeros

    return nothing


def in_loop(function: Callable) -> Callable:
    """Lift `function(cache, args)` to a loop over stacked arguments."""

    def loop(cache: Any, stacked: Any) -> Any:
        return jax.lax.scan(lambda c, args: function(c, *args), cache, stacked)

    return loop
