"""Every operation with arguments of given shapes, for tests of what it compiles to."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from harness import SMALL, Harness

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams

SETS = ("FULL", "FULL,SWA", "FULL,RECURRENT")

READS = ("peek", "peek_batch")
LOOKS_AND_LOCKS = (
    *READS,
    *("match", "match_batch", "lock", "lock_batch", "unlock", "unlock_batch"),
    *("release_window", "release_window_batch"),
)


class OpCase(NamedTuple):
    """A function of a cache and, possibly, more."""

    function: Callable
    args: tuple
    """Arrays, the cache left out: they may be run as well as lowered."""

    @property
    def donated(self) -> tuple[int, ...]:
        """Arguments that `uhrc_fn.jitted` donates: the cache, and states beside it."""
        name = self.function.__name__
        if name.startswith("peek"):
            return ()
        return (0, 1) if name == "cow_clone" else (0,)

    def jaxpr(self, config: CacheConfig):
        return jax.make_jaxpr(self.function)(shapes(config), *self.args).jaxpr

    def jit(self, donate: bool = True):
        """Jit it as `uhrc_fn.jitted` does."""
        return jax.jit(
            self.function,
            donate_argnums=self.donated if donate else (),
            keep_unused=self.function is uhrc_fn.reset,
        )

    def lower(self, config: CacheConfig, donate: bool = True):
        return self.jit(donate).lower(shapes(config), *self.args)


def config_of(components: str, page_size: int, nodes: int, **more) -> CacheConfig:
    """A cache of one of `SETS`, with less room in the pool of its other component."""
    settings = {
        "FULL": {},
        "FULL,SWA": dict(num_swa_pages=nodes // 2, sliding_window_size=5 * page_size),
        "FULL,RECURRENT": dict(
            num_recurrent_slots=max(nodes // 16, 2),
            enable_recurrent_extra_buffer=page_size > 1,
        ),
    }
    return CacheConfig(
        components=components,
        page_size=page_size,
        num_pages=nodes,
        **settings[components],
        **more,
    )


def shapes(config: CacheConfig):
    """A cache of which only the shapes are there."""
    return jax.eval_shape(functools.partial(uhrc_fn.init, config))


def zeros(tree):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def bound(operation: Callable, **static) -> Callable:
    """An operation with its static arguments, under its own name."""
    return functools.wraps(operation)(functools.partial(operation, **static))


def op_cases(config: CacheConfig, pages: int, batch: int) -> dict[str, OpCase]:
    """All operations for keys of `pages` pages and batches of `batch` requests."""
    key = uhrc_fn.radix_key(
        np.arange(pages * config.page_size), config, num_pages=pages
    )
    cases = _reads_and_locks(config, key, batch)
    cases |= _inserts(config, key, batch)
    cases |= _evictions(config, pages)
    cases |= _pools(config, pages, batch)
    if config.has_recurrent:
        cases["cow_clone"] = (uhrc_fn.cow_clone, _states(config), cases["lock"][1])
        cases["cow_move"] = (uhrc_fn.cow_move, cases["lock"][1])
    cases["compact_clock"] = (uhrc_fn.compact_clock,)
    cases["reset"] = (uhrc_fn.reset,)
    return {name: OpCase(case[0], case[1:]) for name, case in cases.items()}


def _reads_and_locks(config: CacheConfig, key, batch: int) -> dict[str, tuple]:
    cache = shapes(config)
    keys = uhrc_fn.stack_keys([key] * batch)
    match = zeros(jax.eval_shape(uhrc_fn.peek_prefix_len, cache, key))
    matches = zeros(jax.eval_shape(uhrc_fn.peek_prefix_len_batch, cache, keys))
    receipt = zeros(jax.eval_shape(uhrc_fn.inc_lock_ref, cache, match)[1])
    receipts = zeros(jax.eval_shape(uhrc_fn.inc_lock_ref_batch, cache, matches)[1])
    return {
        "match": (uhrc_fn.match_prefix, MatchPrefixParams(key=key)),
        "match_batch": (uhrc_fn.match_prefix_batch, MatchPrefixParams(key=keys)),
        "peek": (uhrc_fn.peek_prefix_len, key),
        "peek_batch": (uhrc_fn.peek_prefix_len_batch, keys),
        "lock": (uhrc_fn.inc_lock_ref, match),
        "lock_batch": (uhrc_fn.inc_lock_ref_batch, matches),
        "unlock": (uhrc_fn.dec_lock_ref, receipt),
        "unlock_batch": (uhrc_fn.dec_lock_ref_batch, receipts),
        "release_window": (uhrc_fn.release_window, receipt),
        "release_window_batch": (uhrc_fn.release_window_batch, receipts),
    }


def _inserts(config: CacheConfig, key, batch: int) -> dict[str, tuple]:
    pages = key.token_ids.size // config.page_size
    ids = np.arange(1, pages + 1, dtype=np.int32)
    also = {}
    if config.has_swa:
        also = dict(swa_value=ids, swa_evicted_seqlen=np.int32(0))
    elif config.has_recurrent:
        also = dict(recurrent_value=np.int32(1), recurrent_length=key.length)
    one = InsertParams(key=key, value=ids, prev_prefix_len=np.int32(0), **also)
    many = jax.tree.map(lambda *leaves: np.stack(leaves), *[one] * batch)
    return {
        "insert": (uhrc_fn.insert, one),
        "insert_batch": (uhrc_fn.insert_batch, many),
    }


def _evictions(config: CacheConfig, pages: int) -> dict[str, tuple]:
    tokens = np.int32(2 * config.page_size)
    wanted = EvictParams(
        num_tokens=tokens,
        swa_num_tokens=tokens if config.has_swa else 0,
        recurrent_num=np.int32(2) if config.has_recurrent else 0,
    )
    return {
        "evict": (bound(uhrc_fn.evict, max_victims=pages), wanted),
        "evict_any_number": (uhrc_fn.evict, wanted),
    }


def _pools(config: CacheConfig, pages: int, batch: int) -> dict[str, tuple]:
    two, ids = np.int32(2), np.arange(1, pages + 1, dtype=np.int32)
    counts = (two, two * config.has_swa, np.int32(config.has_recurrent))
    request = bound(uhrc_fn.alloc_request, max_pages=pages, max_swa_pages=pages)
    alloc_batch = bound(uhrc_fn.alloc_pages_batch, max_new=pages)
    cases = {
        "alloc": (bound(uhrc_fn.alloc_pages, max_new=pages), two),
        "alloc_batch": (alloc_batch, np.ones(batch, np.int32)),
        "alloc_request": (request, *counts),
        "free": (uhrc_fn.free_pages, ids),
    }
    if config.has_swa:
        cases["alloc_swa"] = (bound(uhrc_fn.alloc_swa_pages, max_new=pages), two)
        cases["free_swa"] = (uhrc_fn.free_swa_pages, ids)
    if config.has_recurrent:
        cases["alloc_slots"] = (bound(uhrc_fn.alloc_slots, max_new=pages), two)
        cases["free_slots"] = (uhrc_fn.free_slots, ids)
    return cases


def _states(config: CacheConfig):
    """States of one layer, with a row for each of the cache's slots."""
    layer = dict(layers=(0,), num_v_heads=2, v_head_dim=128, conv_kernel_size=2)
    shape = uhrc_fn.RecurrentConfig(num_slots=config.num_recurrent_slots, **layer)
    return zeros(
        jax.eval_shape(functools.partial(uhrc_fn.init_recurrent_state_pool, shape))
    )


def busy_harness(*prompts) -> Harness:
    """A tree with these prompts in it, and five pages with a request."""
    harness = Harness(SMALL, is_checked=False)
    for prompt in prompts:
        harness.publish(prompt)
    harness.alloc(5)
    return harness


def names_of(components: str) -> tuple[str, ...]:
    """The operations of a cache of one of `SETS`."""
    return tuple(op_cases(config_of(components, 2, 64), pages=4, batch=3))


OPS = names_of("FULL")
SETS_AND_OPS = tuple((c, name) for c in SETS for name in names_of(c))
