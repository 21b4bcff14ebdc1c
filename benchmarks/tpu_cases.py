"""The programs that `tpu_estimate.py` compiles: shapes only, nothing is run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ours import config_for, insert_params, stack

import uhrc_fn


@dataclasses.dataclass(frozen=True)
class TpuCase:
    """One operation and the shapes of its arguments, the cache first."""

    op: str
    page_size: int
    pages: int
    batch: int
    config: Any
    function: Callable
    args: tuple
    donate: bool = True


def _key(config: Any, pages: int, batch: int | None = None) -> Any:
    """Shapes of a key, or of a batch of them."""
    tokens = np.zeros(pages * config.page_size, np.int32)
    key = uhrc_fn.radix_key(tokens, config, num_pages=pages)
    return key if batch is None else stack([key] * batch)


def tpu_cases(nodes: int) -> list[TpuCase]:
    """Every row of the table, for a tree of `nodes` nodes."""
    cases = []
    for page_size, pages in ((128, 64), (128, 1024), (16, 64), (16, 512)):
        cases += _one_request(config_for(page_size, nodes), pages)
    config = config_for(128, nodes)
    cases += _pools(config)
    cases += _batches(config, pages=64, batch=64)
    return cases


def _case(
    op: str, config: Any, pages: int, function: Callable, *args: Any, **rest: Any
) -> TpuCase:
    shapes = jax.eval_shape(lambda: args)
    return TpuCase(
        op=op,
        page_size=config.page_size,
        pages=pages,
        config=config,
        function=function,
        args=(_cache(config), *shapes),
        **{"batch": 1} | rest,
    )


def _cache(config: Any) -> Any:
    """Shapes of a cache."""
    return jax.eval_shape(functools.partial(uhrc_fn.init, config))


def _one_request(config: Any, pages: int) -> list[TpuCase]:
    """Operations on one key of `pages` pages."""
    key = _key(config, pages)
    params = uhrc_fn.MatchPrefixParams(key=key)
    _, match = jax.eval_shape(uhrc_fn.match_prefix, _cache(config), params)
    _, receipt = jax.eval_shape(uhrc_fn.inc_lock_ref, _cache(config), match)
    # Shapes are enough, but an argument has to be an array to have one.
    match, receipt = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), (match, receipt.to_dec_params())
    )
    value = insert_params(key, np.zeros(pages, np.int32))
    return [
        _case("match", config, pages, uhrc_fn.match_prefix, params),
        _case("peek", config, pages, uhrc_fn.peek_prefix_len, key, donate=False),
        _case("lock", config, pages, uhrc_fn.inc_lock_ref, match),
        _case("unlock", config, pages, uhrc_fn.dec_lock_ref, receipt),
        _case("insert", config, pages, uhrc_fn.insert, value),
    ]


def _pools(config: Any) -> list[TpuCase]:
    """Operations on pages: 64 ids, and victims at most so many."""
    evict = functools.partial(uhrc_fn.evict, max_victims=64)
    alloc = functools.partial(uhrc_fn.alloc_pages, max_new=64)
    wanted = uhrc_fn.EvictParams(num_tokens=np.int32(64 * config.page_size))
    return [
        _case("evict", config, 64, evict, wanted),
        _case("alloc", config, 64, alloc, np.int32(64)),
        _case("free", config, 64, uhrc_fn.free_pages, np.zeros(64, np.int32)),
    ]


def _batches(config: Any, pages: int, batch: int) -> list[TpuCase]:
    """Operations on a batch of keys."""
    key = _key(config, pages, batch)
    match = uhrc_fn.MatchPrefixParams(key=key)
    insert = insert_params(key, np.zeros((batch, pages), np.int32))
    many = functools.partial(_case, batch=batch)
    return [
        many("match_batch", config, pages, uhrc_fn.match_prefix_batch, match),
        many("insert_batch", config, pages, uhrc_fn.insert_batch, insert),
    ]
