"""Letting waiting requests in: match, lock, clone, allocate, take a place.

First come, first served: who cannot start holds back all after it, so that no stream of
small requests overtakes a large one for ever.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..components import component_rules
from ..config import ComponentType
from ..ops.allocate import alloc_request, page_table
from ..ops.copy_on_write import cow_clone, cow_move
from ..ops.lock import inc_lock_ref
from ..ops.match import match_prefix
from ..ops.once import once_if
from ..params import IncLockRefResult, MatchPrefixParams, MatchResult
from ..pools.admission import Admission, about_to_lock, admit, slot_demand
from ..pools.req_to_token import HybridReqToTokenPool
from ..state import CacheState
from ..tree_arrays import LOCK_REF, ROOT, VALUE, take
from .config import ServeConfig
from .requests import Phase, oldest
from .state import ServeState


class _Turn(NamedTuple):
    """The request whose turn it is; row 0 where none can start."""

    row: Int32[Array, ""]
    match: MatchResult
    verdict: Int32[Array, ""]


def admit_waiting(state: ServeState) -> ServeState:
    """Admit waiting requests, oldest first, while there are lanes and room."""
    shapes = jax.eval_shape(_next_turn, state)[1]
    no_turn = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = no_turn._replace(verdict=jnp.int32(Admission.ADMIT))

    def goes_on(carry):
        state, turn = carry
        return (turn.verdict != int(Admission.WAIT)) & (_first_waiting(state) > 0)

    def admit_one(carry):
        state, _ = carry
        state, turn = _next_turn(state)
        return _seat(state, turn), turn

    return jax.lax.while_loop(goes_on, admit_one, (state, start))[0]


def _first_waiting(state: ServeState):
    """The oldest waiting request if there is a lane for it; 0 for none."""
    requests = state.requests
    running = jnp.sum(requests.phase == Phase.RUNNING, dtype=jnp.int32)
    row = oldest(requests.phase == Phase.WAITING, requests.arrival)
    return jnp.where(running < state.config.decode_lanes, row, 0)


def _next_turn(state: ServeState) -> tuple[ServeState, _Turn]:
    """Match the request whose turn it is, and decide on counts alone."""
    requests, config = state.requests, state.config
    row = _first_waiting(state)
    # One token is left to compute: its logits are the next token.
    length = jnp.maximum(requests.length[row] - 1, 0)
    params = MatchPrefixParams(
        key=requests.key(row, length), cow_recurrent=config.cache.has_recurrent
    )
    cache, match = match_prefix(state.cache, params)
    is_idle = ~jnp.any(requests.phase == Phase.RUNNING)
    verdict = admit(
        cache.num_free,
        cache.evictable,
        _locking(cache, match),
        _demand(config, requests.length[row], match),
        is_idle,
    )
    verdict = jnp.where(row > 0, verdict, int(Admission.WAIT))
    return dataclasses.replace(state, cache=cache), _Turn(row, match, verdict)


def _locking(cache: CacheState, match: MatchResult):
    """[3] evictable entries that a lock on the match takes, by component."""
    page = jnp.arange(match.path.shape[0], dtype=jnp.int32)
    num_pages = match.hit_length // cache.config.page_size
    node = jnp.maximum(match.path, ROOT)
    counts = [jnp.int32(0)] * len(ComponentType)
    for rules in component_rules(cache.config):
        value = take(cache.tree.fields, VALUE + rules.type, node)
        locks = take(cache.tree.fields, LOCK_REF + rules.type, node)
        held = rules.locks(page, num_pages) & (page < num_pages)
        counts[rules.type] = about_to_lock(value, locks, held)
    return jnp.stack(counts)


def _demand(config: ServeConfig, length, match: MatchResult):
    """[3] entries that the request will own: its prompt's pages, a window, its slots.

    A page for the first token that it decodes is among them.
    """
    size = config.cache.page_size
    pages = _pages_to_come(config, length, match)
    swa = jnp.int32(0)
    if config.cache.has_swa:
        swa = jnp.minimum(pages, config.chunk_tokens // size)
    slots = jnp.int32(0)
    if config.cache.has_recurrent:
        slots = slot_demand(1 + config.tables.num_track_slots, 0)
    return jnp.stack([pages, swa, slots])


def _pages_to_come(config: ServeConfig, length, match: MatchResult):
    size = config.cache.page_size
    wanted = jnp.minimum(length // size + 1, config.max_pages)
    return wanted - match.hit_length // size


def _seat(state: ServeState, turn: _Turn) -> ServeState:
    """Lock the match and seat its request, unless it waits; in place."""
    shapes = jax.eval_shape(_lock, state, turn)[1]
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def lock_by(lock):
        def run(carry):
            state, _, turn, _ = carry
            return *lock(state, turn), turn, jnp.int32(Admission.WAIT)

        return run

    ways = {Admission.ADMIT: _lock}
    if state.config.cache.has_recurrent:
        ways = {Admission.ADMIT: _lock_and_clone, Admission.MOVE: _lock_and_move}
    held = nothing
    for verdict, lock in ways.items():
        is_due = lambda carry, verdict=verdict: carry[3] == int(verdict)
        carry = state, held, turn, turn.verdict
        state, held, _, _ = once_if(is_due, lock_by(lock), carry)

    def take_place(carry):
        state, held, turn, _ = carry
        return _take_place(state, turn, held), held, turn, jnp.zeros((), bool)

    carry = state, held, turn, turn.verdict != int(Admission.WAIT)
    return once_if(lambda carry: carry[3], take_place, carry)[0]


class _Held(NamedTuple):
    """What a lock gave: the receipt, and the running slot with its state."""

    receipt: IncLockRefResult
    slot: Int32[Array, ""]


def _lock(state: ServeState, turn: _Turn) -> tuple[ServeState, _Held]:
    cache, receipt = inc_lock_ref(state.cache, turn.match)
    state = dataclasses.replace(state, cache=cache)
    return state, _Held(receipt, jnp.int32(0))


def _lock_and_clone(state: ServeState, turn: _Turn) -> tuple[ServeState, _Held]:
    assert state.pools.states is not None
    cache, states, clone = cow_clone(state.cache, state.pools.states, turn.match)
    pools = dataclasses.replace(state.pools, states=states)
    state = dataclasses.replace(state, cache=cache, pools=pools)
    return state, _Held(clone.receipt, clone.slot)


def _lock_and_move(state: ServeState, turn: _Turn) -> tuple[ServeState, _Held]:
    cache, moved = cow_move(state.cache, turn.match)
    return dataclasses.replace(state, cache=cache), _Held(moved.receipt, moved.slot)


def _take_place(state: ServeState, turn: _Turn, held: _Held) -> ServeState:
    """Allocate the rest and write it all into the row's tables."""
    config, tables, requests = state.config, state.tables, state.requests
    row, match = turn.row, turn.match
    tracks = config.tables.num_track_slots
    cache, given = alloc_request(
        state.cache,
        _pages_to_come(config, requests.length[row], match),
        0,
        tracks,
        max_pages=config.max_pages,
        max_slots=max(tracks, 1),
    )
    rows, hit = row[None], match.hit_length
    pages = page_table(match, given.pages)
    swa_pages = _window(cache, match)[None] if config.cache.has_swa else None
    tables = tables.write_pages(rows, jnp.zeros_like(rows), pages[None], swa_pages)
    tables = tables.set_lengths(rows, hit[None], hit[None])
    if isinstance(tables, HybridReqToTokenPool):
        slots = given.slots.ids[None, :tracks]
        tables, _ = tables.assign_slots(rows, held.slot[None], slots)
    requests = requests.put(
        row,
        phase=int(Phase.RUNNING),
        hit_length=hit,
        branching=match.recurrent_branching_seqlen if config.has_tracks else 0,
        swa_evicted=hit,
    )
    requests = requests.put_lock(row, held.receipt)
    return dataclasses.replace(state, cache=cache, tables=tables, requests=requests)


def _window(cache: CacheState, match: MatchResult):
    """The tree's SWA pages that the lock on a match holds, by page; 0 elsewhere."""
    page = jnp.arange(match.path.shape[0], dtype=jnp.int32)
    last = match.hit_length // cache.config.page_size
    inside = (page >= last - cache.config.window_pages) & (page < last)
    value = take(
        cache.tree.fields, VALUE + ComponentType.SWA, jnp.maximum(match.path, ROOT)
    )
    return jnp.where(inside, jnp.maximum(value, 0), 0)
