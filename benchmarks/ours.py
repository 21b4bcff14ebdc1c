"""`uhrc_fn` as the benchmarks drive it: a filled cache and prepared arguments."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import uhrc_fn

# Pages that one call inserts while a cache is filled outside the clock.
_FILL_PAGES = 4096


@functools.cache
def config_for(page_size: int, nodes: int) -> uhrc_fn.CacheConfig:
    """Settings of every benchmark: FULL alone, as many pages as nodes."""
    return uhrc_fn.CacheConfig(
        page_size=page_size, num_pages=nodes, max_prefix_pages=nodes
    )


def stack(trees: Sequence[Any]) -> Any:
    """Stack equal records on a new leading axis, as NumPy arrays."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def key_of(tokens: np.ndarray, config: uhrc_fn.CacheConfig) -> uhrc_fn.RadixKey:
    """Build the key of `tokens` [..., tokens]; leading axes are batch axes."""
    if tokens.ndim == 1:
        return uhrc_fn.radix_key(tokens, config)
    return uhrc_fn.stack_keys([key_of(row, config) for row in tokens])


def insert_params(key: uhrc_fn.RadixKey, value: np.ndarray) -> uhrc_fn.InsertParams:
    """Arguments of an insert that shares nothing with the tree yet."""
    shared = np.zeros(value.shape[:-1], np.int32)
    return uhrc_fn.InsertParams(key=key, value=value, prev_prefix_len=shared)


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
        cache, ids = allocated(cache, batch * pages)
        key = key_of(tokens[start : start + batch], config)
        params = insert_params(key, ids.reshape(batch, pages))
        cache, result = uhrc_fn.jitted.insert_batch(cache, params)
        duplicates = np.where(result.duplicate()[..., 0], params.value, 0)
        cache = uhrc_fn.jitted.free_pages(cache, duplicates.ravel())
    uhrc_fn.raise_if_bad(cache)
    return cache


def allocated(cache: Any, num_pages: int) -> tuple[Any, np.ndarray]:
    """Take pages for requests, in a few calls of one size."""
    calls = -(-num_pages // _FILL_PAGES)
    if num_pages % calls:
        raise ValueError(f"{num_pages} pages do not split into {calls} equal calls")
    ids = []
    for _ in range(calls):
        size = num_pages // calls
        cache, got = uhrc_fn.jitted.alloc_pages(cache, np.int32(size), max_new=size)
        ids.append(np.asarray(got.ids))
    uhrc_fn.raise_if_bad(cache)
    return cache, np.concatenate(ids)


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
        result.scalars.block_until_ready()
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
