"""Which requests run in a step, and how many tokens of each."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..pools.boundaries import cut_prefill
from .requests import Phase, oldest_first
from .state import ServeState


class Plan(NamedTuple):
    """What a step computes."""

    prefill: Int32[Array, " prefill_lanes"]
    """Rows whose prompts go on, 0 for an idle lane."""
    decode: Int32[Array, " decode_lanes"]
    """Rows that decode a token."""
    num_new: Int32[Array, " rows"]
    """Tokens of each row, 0 where it does not run."""


def plan_step(state: ServeState) -> Plan:
    """Every request with one token to compute decodes; the oldest others prefill.

    A prefill ends at the chunk, at a track boundary or at a branching length, so that
    each snapshot is the last state of a forward.
    """
    config, requests, tables = state.config, state.requests, state.tables
    runs = requests.phase == Phase.RUNNING
    left = jnp.where(runs, requests.length - tables.length, 0)
    prefill = oldest_first(left > 1, requests.arrival, config.prefill_lanes)
    decode = oldest_first(left == 1, requests.arrival, config.decode_lanes)
    cut = cut_prefill(
        tables.length[prefill],
        requests.length[prefill],
        config.chunk_tokens,
        interval=config.track_interval,
        page_size=config.cache.page_size,
        branching_length=requests.branching[prefill],
    )
    num_new = jnp.where(left == 1, 1, 0).at[prefill].set(cut.num_tokens)
    return Plan(prefill, decode, num_new.at[0].set(0).astype(jnp.int32))
