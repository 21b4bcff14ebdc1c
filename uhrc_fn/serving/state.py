"""What a serving loop carries from step to step."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..pools.req_to_token import (
    HybridReqToTokenPool,
    ReqToTokenPool,
    init_hybrid_req_to_token_pool,
    init_req_to_token_pool,
)
from ..state import CacheState, init
from .config import ServeConfig
from .lanes import Pools
from .requests import Requests, init_requests


class ServeState(eqx.Module):
    """Cache, pools and request tables; donate it to every step."""

    cache: CacheState
    """The prefix cache; `None` where the config wants none."""
    pools: Pools
    tables: ReqToTokenPool
    requests: Requests
    num_retracted: Int32[Array, ""]
    """Times that a request gave back all it held, since the start."""
    config: ServeConfig = eqx.field(static=True)

    def running_slots(self, rows):
        """Running slots by row; 0 without recurrent layers."""
        if isinstance(self.tables, HybridReqToTokenPool):
            return self.tables.running_slots(rows)
        return jnp.zeros_like(rows)


def init_serving(config: ServeConfig, pools: Pools) -> ServeState:
    """An idle server over fresh pools; donate the pools.

    Args:
      config: its settings.
      pools: of `config.pool_pages` pages, SWA pages and slots: see `init_pools`.
    """
    has_slots = config.cache.has_recurrent
    make = init_hybrid_req_to_token_pool if has_slots else init_req_to_token_pool
    state = ServeState(
        cache=init(config.cache) if config.use_cache else None,  # type: ignore[arg-type]
        pools=pools,
        tables=make(config.tables),
        requests=init_requests(config),
        num_retracted=jnp.int32(0),
        config=config,
    )
    return state if config.use_cache else _with_own_pages(state)


def _with_own_pages(state: ServeState) -> ServeState:
    """Without a cache each row owns pages, and a slot, for ever."""
    tables, wide = state.tables, state.config.max_pages
    row = jnp.arange(1, tables.pages.shape[0], dtype=jnp.int32)
    column = jnp.arange(wide, dtype=jnp.int32)[None]
    pages = 1 + (row[:, None] - 1) * wide + column
    swa_pages = pages if tables.config.has_swa else None
    tables = tables.write_pages(row, jnp.zeros_like(row), pages, swa_pages)
    if isinstance(tables, HybridReqToTokenPool):
        none = jnp.zeros((row.shape[0], tables.config.num_track_slots), jnp.int32)
        tables, _ = tables.assign_slots(row, row, none)
    return eqx.tree_at(lambda s: s.tables, state, tables)
