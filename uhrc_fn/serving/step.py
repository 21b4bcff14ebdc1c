"""The fused serving step: cache, scheduling and model in one program.

    admit     match, lock, clone, allocate     (before anything else is allocated)
    plan      who runs, how many tokens; who must give way
    forward   prompts in chunks, then the requests that decode; KV, states, tracks
    sample    the next token, or the end
    publish   what was computed becomes the tree's; duplicates are freed, locks move

Nothing leaves the device between steps: `serve_steps` runs many in one call.
"""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ..ops.once import once_if
from ..ops.request import cache_finished_req, cache_unfinished_req
from ..pools.req_to_token import HybridReqToTokenPool
from ..pools.tracking import TrackMetadata, advance_tracks
from ..tree_arrays import DROP
from . import uncached
from .admission import admit_waiting
from .lanes import Lanes
from .memory import extend, make_room
from .models.model import forward
from .plan import Plan, plan_step
from .requests import Phase, oldest
from .sampling import sample
from .state import ServeState


class StepRecord(eqx.Module):
    """What the host reads of a step: small, whatever the model."""

    token: Int32[Array, " rows"]
    """Token that each row got, -1 for none."""
    is_finished: Bool[Array, " rows"]
    """Rows whose request ended with this step; they are idle now."""
    hit_length: Int32[Array, " rows"]
    """Tokens that each request did not compute, since its last admission."""
    num_prefilled: Int32[Array, ""]
    """Prompt tokens computed."""
    num_running: Int32[Array, ""]
    """Requests that ran."""
    num_retracted: Int32[Array, ""]
    """Retractions since the start."""
    clock: Int32[Array, ""]
    """The cache's recency tick: compact it in time."""


def serve_steps(model, state: ServeState, num_steps: int):
    """Run steps without the host.

    Args:
      model: of `init_model`.
      state: donate it.
      num_steps: static.

    Returns:
      ``(state, record)`` with a leading axis of steps on each array of the record.
    """
    step = lambda state, _: serve_step(model, state)
    return jax.lax.scan(step, state, length=num_steps)


def serve_step(model, state: ServeState) -> tuple[ServeState, StepRecord]:
    """Serve all requests a step further; see the module."""
    if state.config.use_cache:
        state = admit_waiting(state)
        state, plan = make_room(state)
        state = extend(state, plan)
    else:
        state = uncached.admit_waiting(state)
        plan = plan_step(state)
    state, track = _advance(state, plan)
    state, token = _forward(model, state, plan, track)
    state, token = _append(state, token)
    num_prefilled = jnp.sum(plan.num_new[plan.prefill])
    num_running = jnp.sum(plan.num_new > 0, dtype=jnp.int32)
    is_finished = state.requests.phase == Phase.FINISHED
    hit_length = state.requests.hit_length
    if state.config.use_cache:
        state = _publish(state, plan)
        state = _finish(state)
    else:
        state = uncached.finish(state)
    record = StepRecord(
        token=token,
        is_finished=is_finished,
        hit_length=hit_length,
        num_prefilled=num_prefilled,
        num_running=num_running,
        num_retracted=state.num_retracted,
        clock=jnp.int32(0) if state.cache is None else state.cache.clock,
    )
    return state, record


def _advance(state: ServeState, plan: Plan) -> tuple[ServeState, TrackMetadata]:
    """Count the new tokens as written, and turn the track slots at boundaries."""
    config, tables = state.config, state.tables
    rows = jnp.arange(tables.length.shape[0], dtype=jnp.int32)
    length = tables.length + plan.num_new
    tables = tables.set_lengths(rows, length, tables.protected_length)
    track = TrackMetadata(jnp.zeros_like(rows), jnp.zeros(rows.shape, bool))
    if config.has_tracks:
        assert isinstance(tables, HybridReqToTokenPool)
        tracks, track = advance_tracks(
            tables.tracks(rows),
            length,
            plan.num_new,
            interval=config.track_interval,
            branching_length=state.requests.branching,
        )
        tables = tables.put_tracks(rows, tracks)
    return dataclasses.replace(state, tables=tables), track


def _forward(model, state: ServeState, plan: Plan, track: TrackMetadata):
    """Compute the planned tokens.

    Returns:
      ``(state, token)``: the next token of each row whose last known token was
      computed, -1 for the others.
    """
    token = jnp.full_like(state.requests.phase, -1)
    wide = state.config.chunk_tokens
    for rows, tokens in ((plan.prefill, wide), (plan.decode, 1)):
        lanes = _lanes(state, plan, track, rows, tokens)
        is_due = lambda carry: carry[2]

        next_tokens = functools.partial(_next_tokens, state, rows)

        def run(carry, lanes=lanes, next_tokens=next_tokens):
            pools, token, _ = carry
            pools, logits = forward(model, pools, lanes)
            return pools, next_tokens(logits, token), jnp.zeros((), bool)

        carry = state.pools, token, jnp.any(lanes.num_new > 0)
        pools, token, _ = once_if(is_due, run, carry)
        state = dataclasses.replace(state, pools=pools)
    return state, token


def _lanes(state: ServeState, plan: Plan, track: TrackMetadata, rows, tokens: int):
    requests, tables = state.requests, state.tables
    num_new = plan.num_new[rows]
    start = tables.length[rows] - num_new
    column = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    token_ids = requests.token_ids.at[rows[:, None], column].get(
        mode="fill", fill_value=0
    )
    is_new = jnp.arange(tokens)[None] < num_new[:, None]
    return Lanes(
        token_ids=jnp.where(is_new, token_ids, 0),
        start=start,
        num_new=num_new,
        pages=tables.pages[rows],
        swa_pages=tables.swa_pages[rows],
        slots=state.running_slots(rows),
        track=TrackMetadata(*(x[rows] for x in track)),
    )


def _next_tokens(state: ServeState, rows, logits, token):
    requests, length = state.requests, state.tables.length[rows]
    drawn = sample(logits, requests.temperature[rows], requests.seed[rows], length)
    is_last = (rows > 0) & (length == requests.length[rows])
    place = jnp.where(is_last, rows, token.shape[0])
    return token.at[place].set(drawn, **DROP)


def _append(state: ServeState, token) -> tuple[ServeState, Array]:
    """Append new tokens; a request ends with a stop token or at its limit."""
    requests = state.requests
    is_new = token >= 0
    rows = jnp.arange(token.shape[0])
    wide = requests.token_ids.shape[1]
    # The last token of the longest request has no place of its own, nor needs one.
    place = jnp.where(is_new & (requests.length < wide), requests.length, wide)
    token_ids = requests.token_ids.at[rows, place].set(token, **DROP)
    length = requests.length + is_new.astype(jnp.int32)
    is_stop = jnp.any(requests.stop_tokens == token[:, None], axis=1)
    ends = is_new & (is_stop | (length >= requests.limit))
    phase = jnp.where(ends, int(Phase.FINISHED), requests.phase)
    requests = dataclasses.replace(
        requests, token_ids=token_ids, length=length, phase=phase
    )
    return dataclasses.replace(state, requests=requests), token


def _publish(state: ServeState, plan: Plan) -> ServeState:
    """Publish the chunks that were computed, of requests that go on."""
    wants = jnp.zeros_like(state.requests.phase, bool)
    wants = wants.at[plan.prefill].set(plan.num_new[plan.prefill] > 0)
    wants = wants & (state.requests.phase == Phase.RUNNING)

    def publish(state: ServeState, row) -> ServeState:
        requests = state.requests
        key = requests.key(row, requests.length[row])
        cache, tables, published = cache_unfinished_req(
            state.cache, state.tables, row, key, requests.lock(row)
        )
        requests = requests.put_lock(row, published.receipt)
        return dataclasses.replace(state, cache=cache, tables=tables, requests=requests)

    return _one_by_one(state, wants, publish)


def _finish(state: ServeState) -> ServeState:
    """Publish the requests that ended, and empty their rows."""
    wants = state.requests.phase == Phase.FINISHED

    def finish(state: ServeState, row) -> ServeState:
        requests = state.requests
        key = requests.key(row, requests.length[row])
        cache, tables, _ = cache_finished_req(
            state.cache, state.tables, row, key, requests.lock(row)
        )
        requests = requests.put(row, phase=int(Phase.IDLE))
        return dataclasses.replace(state, cache=cache, tables=tables, requests=requests)

    return _one_by_one(state, wants, finish)


def _one_by_one(state: ServeState, wants, act) -> ServeState:
    """``act(state, row)`` for each row that wants it, oldest first, in place."""

    def act_on_one(carry):
        state, wants = carry
        row = oldest(wants, state.requests.arrival)
        return act(state, row), wants.at[row].set(False)

    goes_on = lambda carry: jnp.any(carry[1][1:])
    return jax.lax.while_loop(goes_on, act_on_one, (state, wants))[0]
