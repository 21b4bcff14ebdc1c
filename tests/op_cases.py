"""Every operation with arguments of given shapes, for tests of what it compiles to."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from harness import SMALL, Harness

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams

READS = ("peek", "peek_batch")
LOOKS_AND_LOCKS = (
    *READS,
    *("match", "match_batch", "lock", "lock_batch", "unlock", "unlock_batch"),
)


class OpCase(NamedTuple):
    """A function of a cache and, possibly, more."""

    function: Callable
    args: tuple
    """Arrays, the cache left out: they may be run as well as lowered."""

    def jaxpr(self, config: CacheConfig):
        return jax.make_jaxpr(self.function)(shapes(config), *self.args).jaxpr

    def jit(self, donate: bool = True):
        """Jit it as `uhrc_fn.jitted` does."""
        is_read = self.function.__name__.startswith("peek")
        return jax.jit(
            self.function,
            donate_argnums=0 if donate and not is_read else (),
            keep_unused=self.function is uhrc_fn.reset,
        )

    def lower(self, config: CacheConfig, donate: bool = True):
        return self.jit(donate).lower(shapes(config), *self.args)


def shapes(config: CacheConfig):
    """A cache of which only the shapes are there."""
    return jax.eval_shape(functools.partial(uhrc_fn.init, config))


def zeros(tree):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def op_cases(config: CacheConfig, pages: int, batch: int) -> dict[str, OpCase]:
    """All operations for keys of `pages` pages and batches of `batch` requests."""
    cache = shapes(config)
    key = uhrc_fn.radix_key(
        np.arange(pages * config.page_size), config, num_pages=pages
    )
    keys = uhrc_fn.stack_keys([key] * batch)
    match = zeros(jax.eval_shape(uhrc_fn.peek_prefix_len, cache, key))
    matches = zeros(jax.eval_shape(uhrc_fn.peek_prefix_len_batch, cache, keys))
    receipt = zeros(jax.eval_shape(uhrc_fn.inc_lock_ref, cache, match)[1])
    receipts = zeros(jax.eval_shape(uhrc_fn.inc_lock_ref_batch, cache, matches)[1])
    ids = np.arange(1, pages + 1, dtype=np.int32)
    insert = InsertParams(key=key, value=ids, prev_prefix_len=np.int32(0))
    inserts = InsertParams(
        key=keys,
        value=np.stack([ids] * batch),
        prev_prefix_len=np.zeros(batch, np.int32),
    )
    evict = functools.wraps(uhrc_fn.evict)(
        functools.partial(uhrc_fn.evict, max_victims=pages)
    )
    alloc = functools.wraps(uhrc_fn.alloc_pages)(
        functools.partial(uhrc_fn.alloc_pages, max_new=pages)
    )
    alloc_batch = functools.wraps(uhrc_fn.alloc_pages_batch)(
        functools.partial(uhrc_fn.alloc_pages_batch, max_new=pages)
    )
    wanted = EvictParams(num_tokens=np.int32(2 * config.page_size))
    cases = {
        "match": (uhrc_fn.match_prefix, MatchPrefixParams(key=key)),
        "match_batch": (uhrc_fn.match_prefix_batch, MatchPrefixParams(key=keys)),
        "peek": (uhrc_fn.peek_prefix_len, key),
        "peek_batch": (uhrc_fn.peek_prefix_len_batch, keys),
        "lock": (uhrc_fn.inc_lock_ref, match),
        "lock_batch": (uhrc_fn.inc_lock_ref_batch, matches),
        "unlock": (uhrc_fn.dec_lock_ref, receipt),
        "unlock_batch": (uhrc_fn.dec_lock_ref_batch, receipts),
        "insert": (uhrc_fn.insert, insert),
        "insert_batch": (uhrc_fn.insert_batch, inserts),
        "evict": (evict, wanted),
        "evict_any_number": (uhrc_fn.evict, wanted),
        "alloc": (alloc, np.int32(2)),
        "alloc_batch": (alloc_batch, np.ones(batch, np.int32)),
        "free": (uhrc_fn.free_pages, ids),
        "compact_clock": (uhrc_fn.compact_clock,),
        "reset": (uhrc_fn.reset,),
    }
    return {name: OpCase(case[0], case[1:]) for name, case in cases.items()}


def busy_harness(*prompts) -> Harness:
    """A tree with these prompts in it, and five pages with a request."""
    harness = Harness(SMALL, is_checked=False)
    for prompt in prompts:
        harness.publish(prompt)
    harness.alloc(5)
    return harness


OPS = tuple(op_cases(CacheConfig(page_size=2, num_pages=8), pages=4, batch=3))
"""Their names."""
