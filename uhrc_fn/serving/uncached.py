"""Scheduling without a prefix cache: the control that the cached step is measured by.

Each row owns its pages and its slot for ever, so that there is nothing to look up, to
lock, to allocate or to publish, and no operation of the cache in the program.
"""

import dataclasses

import jax.numpy as jnp

from .requests import Phase, oldest_first
from .state import ServeState


def admit_waiting(state: ServeState) -> ServeState:
    """Start waiting requests, oldest first, while there are lanes."""
    config, requests = state.config, state.requests
    running = jnp.sum(requests.phase == Phase.RUNNING, dtype=jnp.int32)
    waits = requests.phase == Phase.WAITING
    rows = oldest_first(waits, requests.arrival, config.decode_lanes)
    lane = jnp.arange(config.decode_lanes, dtype=jnp.int32)
    rows = jnp.where(lane < config.decode_lanes - running, rows, 0)
    starts = jnp.zeros_like(waits).at[rows].set(rows > 0).at[0].set(False)
    phase = jnp.where(starts, int(Phase.RUNNING), requests.phase)
    length = jnp.where(starts, 0, state.tables.length)
    return dataclasses.replace(
        state,
        requests=dataclasses.replace(requests, phase=phase),
        tables=dataclasses.replace(state.tables, length=length),
    )


def finish(state: ServeState) -> ServeState:
    """Empty the rows of requests that ended."""
    requests = state.requests
    ended = requests.phase == Phase.FINISHED
    phase = jnp.where(ended, int(Phase.IDLE), requests.phase)
    return dataclasses.replace(
        state, requests=dataclasses.replace(requests, phase=phase)
    )
