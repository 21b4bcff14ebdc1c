"""The programs that `tpu_estimate.py` compiles: shapes only, nothing is run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ours import config_for, cow_clone, insert_params, stack, values_wanted

import uhrc_fn
from uhrc_fn.kernels import track_scatter


@dataclasses.dataclass(frozen=True)
class TpuCase:
    """One operation and the shapes of its arguments, the donated state first."""

    op: str
    page_size: int
    pages: int
    batch: int
    function: Callable
    args: tuple
    donate: bool = True
    components: str = "FULL"

    @property
    def shapes(self) -> tuple:
        """What tells one state's layout from another's."""
        leaves = jax.tree.leaves(self.args[0])
        return tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


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
    return cases + hybrid_cases(nodes)


def _case(
    op: str, config: Any, pages: int, function: Callable, *args: Any, **rest: Any
) -> TpuCase:
    shapes = jax.eval_shape(lambda: args)
    return TpuCase(
        op=op,
        page_size=config.page_size,
        pages=pages,
        function=function,
        args=(_cache(config), *shapes),
        components=",".join(c.name for c in config.components),
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
    value = insert_params(key, **brought(config, pages))
    return [
        _case("match", config, pages, uhrc_fn.match_prefix, params),
        _case("peek", config, pages, uhrc_fn.peek_prefix_len, key, donate=False),
        _case("lock", config, pages, uhrc_fn.inc_lock_ref, match),
        _case("unlock", config, pages, uhrc_fn.dec_lock_ref, receipt),
        _case("insert", config, pages, uhrc_fn.insert, value),
    ]


def brought(config: Any, pages: int) -> dict[str, Any]:
    """What an insert brings for each component."""
    ids, one = np.zeros(pages, np.int32), np.int32(0)
    entries: dict[str, Any] = {"value": ids}
    if config.has_swa:
        entries |= dict(swa_value=ids, swa_evicted_seqlen=one)
    if config.has_recurrent:
        entries |= dict(recurrent_value=one, recurrent_length=one)
    return entries


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


# Shapes of pools: states of KDA layers, KV of layers with grouped heads.
_STATES = uhrc_fn.RecurrentConfig(
    num_slots=64,
    layers=(0, 1, 2, 3),
    num_v_heads=32,
    v_head_dim=128,
    conv_kernel_size=4,
)
_KV = uhrc_fn.KVConfig(
    num_pages=1024, page_size=128, layers=(0, 1, 2, 3), num_kv_heads=8, head_dim=128
)


def hybrid_cases(nodes: int) -> list[TpuCase]:
    """Rows of the hybrid sets, and of the pools that they need."""
    cases = []
    for components in ("FULL,SWA", "FULL,RECURRENT"):
        config = config_for(128, nodes, components)
        cases += _one_request(config, 64)
        cases += _values(config, 64)
    return [*cases, *_states(config), _kv(512)]


def _values(config: Any, pages: int) -> list[TpuCase]:
    """Evict what stands beside FULL, and allocate all that a request needs."""
    many, swa, slots = np.int32(pages), config.has_swa, config.has_recurrent
    wanted = values_wanted(config, pages)
    evict = functools.partial(uhrc_fn.evict, max_victims=pages)
    most = dict(max_pages=pages, max_swa_pages=pages if swa else 1, max_slots=3)
    alloc = functools.partial(uhrc_fn.alloc_request, **most)
    name = "evict_swa" if swa else "evict_slots"
    return [
        _case(name, config, pages, evict, wanted),
        _case("alloc_request", config, pages, alloc, many, many * swa, np.int32(slots)),
    ]


def _states(config: Any) -> list[TpuCase]:
    """Clone a snapshot; copy slots and write track slots of all layers."""
    states = jax.eval_shape(
        functools.partial(uhrc_fn.init_recurrent_state_pool, _STATES)
    )
    key = _key(config, 64)
    match = jax.eval_shape(uhrc_fn.peek_prefix_len, _cache(config), key)

    def copy_slots(states: Any, src: Any, dst: Any) -> Any:
        return states.copy_slots(src, dst)

    def track(states: Any, rows: Any, index: Any, mask: Any) -> Any:
        held = (states.temporal, states.conv)
        return states.replace_buffer(*track_scatter(held, rows, index, mask))

    cases = [_pool_case("cow_clone", 64, 1, cow_clone, (_cache(config), states), match)]
    for lanes in (1, 8):
        index = np.zeros(lanes, np.int32)
        read = lambda leaf, index=index: leaf.at[index].get()
        rows = jax.eval_shape(
            functools.partial(jax.tree.map, read), (states.temporal, states.conv)
        )
        mask = np.zeros(lanes, bool)
        cases += [
            _pool_case("copy_slots", 0, lanes, copy_slots, states, index, index),
            _pool_case("track_scatter", 0, lanes, track, states, rows, index, mask),
        ]
    return cases


def _kv(tokens: int) -> TpuCase:
    """Write new tokens of one layer."""
    pool = jax.eval_shape(functools.partial(uhrc_fn.init_kv_pool, _KV))
    heads = jax.ShapeDtypeStruct((tokens, _KV.num_kv_heads, _KV.head_dim), _KV.dtype)
    place = np.zeros(tokens, np.int32)

    def write(pool: Any, *rest: Any) -> Any:
        return pool.set_kv_buffer(1, *rest)

    case = _pool_case("set_kv_buffer", 0, tokens, write, pool, place, heads, heads)
    return dataclasses.replace(case, components="FULL")


def _pool_case(
    op: str, pages: int, lanes: int, function: Callable, *args: Any
) -> TpuCase:
    """Build a case whose donated state is a pool, or a cache and a pool."""
    return TpuCase(
        op=op,
        page_size=128,
        pages=pages,
        batch=lanes,
        function=function,
        args=args,
        components="FULL,RECURRENT",
    )
