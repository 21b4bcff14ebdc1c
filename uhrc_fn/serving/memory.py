"""Pages for what a step computes; who must give way where there are not enough."""

import dataclasses

import jax
import jax.numpy as jnp

from ..config import ComponentType
from ..ops.allocate import alloc_pages_batch, alloc_swa_pages_batch
from ..ops.free import free_swa_pages
from ..ops.lock import release_window_batch
from ..ops.once import once_if
from ..ops.request import abort_req
from ..params import IncLockRefResult
from ..pools.sliding import must_slide, swa_frontier, swa_release_range
from ..tree_arrays import LAST_ACCESS, LOCK_REF, NULL, VALUE, row_of
from .plan import Plan, plan_step
from .requests import Phase, youngest
from .state import ServeState

FULL, SWA, _ = ComponentType


def make_room(state: ServeState) -> tuple[ServeState, Plan]:
    """Let SWA pages slide, then retract the youngest until the step's pages fit.

    A retracted request gives back all that it holds and waits again; what it published
    stays the tree's, so that it will hit it. The oldest is never retracted: alone it
    fits, as the pools hold one request.
    """
    if state.config.cache.has_swa:
        state = _let_slide(state, plan_step(state))

    def is_short(carry):
        state, plan = carry
        return jnp.any(_demand(state, plan) > _room(state)) & _can_retract(state)

    def retract(carry):
        state, _ = carry
        requests = state.requests
        row = youngest(requests.phase == Phase.RUNNING, requests.arrival)
        state = give_back(state, row, Phase.WAITING)
        state = dataclasses.replace(state, num_retracted=state.num_retracted + 1)
        return state, plan_step(state)

    return jax.lax.while_loop(is_short, retract, (state, plan_step(state)))


def give_back(state: ServeState, row, phase: Phase) -> ServeState:
    """Take from a row all that it holds; what it published stays the tree's."""
    cache, tables = abort_req(state.cache, state.tables, row, state.requests.lock(row))
    requests = state.requests.put(row, phase=int(phase))
    return dataclasses.replace(state, cache=cache, tables=tables, requests=requests)


def extend(state: ServeState, plan: Plan) -> ServeState:
    """Give each row the pages that its new tokens lie in; `make_room` saw to it."""
    config, tables = state.config, state.tables
    rows = jnp.arange(tables.length.shape[0], dtype=jnp.int32)
    start, need = _new_pages(state, plan)
    most = config.chunk_tokens // config.cache.page_size + 1
    swa_start, swa_need = _new_swa_pages(state, plan)

    def give(carry):
        cache, tables, need, swa_need = carry
        cache, given = alloc_pages_batch(
            cache, need, max_new=min(most, config.cache.num_pages)
        )
        tables = tables.write_pages(rows, start, given.ids)
        if config.cache.has_swa:
            cache, given = alloc_swa_pages_batch(
                cache, swa_need, max_new=min(most, config.cache.num_swa_pages)
            )
            tables = tables.write_swa_pages(rows, swa_start, given.ids)
        return cache, tables, jnp.zeros_like(need), jnp.zeros_like(swa_need)

    is_due = lambda carry: jnp.any((carry[2] > 0) | (carry[3] > 0))
    carry = state.cache, tables, need, swa_need
    cache, tables, _, _ = once_if(is_due, give, carry)
    return dataclasses.replace(state, cache=cache, tables=tables)


def _new_pages(state: ServeState, plan: Plan):
    """FULL pages by row: ``(first column, count)``; a prompt has its own already."""
    size = state.config.cache.page_size
    held = jnp.sum(state.tables.pages > 0, axis=1, dtype=jnp.int32)
    wanted = -(-(state.tables.length + plan.num_new) // size)
    return held, jnp.where(plan.num_new > 0, jnp.maximum(wanted - held, 0), 0)


def _new_swa_pages(state: ServeState, plan: Plan):
    """SWA pages by row: ``(first column, count)``."""
    size = state.config.cache.page_size
    first = -(-state.tables.length // size)
    wanted = -(-(state.tables.length + plan.num_new) // size)
    count = jnp.where(plan.num_new > 0, wanted - first, 0)
    return first, count if state.config.cache.has_swa else jnp.zeros_like(count)


def _demand(state: ServeState, plan: Plan):
    """[2] FULL and SWA pages that the step takes."""
    full, swa = _new_pages(state, plan)[1], _new_swa_pages(state, plan)[1]
    return jnp.stack([jnp.sum(full), jnp.sum(swa)])


def _room(state: ServeState):
    """[2] FULL and SWA pages that are free or can be evicted."""
    return (state.cache.num_free + state.cache.evictable)[:2]


def _can_retract(state: ServeState):
    return jnp.sum(state.requests.phase == Phase.RUNNING) > 1


def _let_slide(state: ServeState, plan: Plan) -> ServeState:
    """Free SWA pages that no window of a request will want, if the step needs room."""
    fields = state.cache.tree.fields
    value, locks, stamp = (
        row_of(fields, name + SWA) for name in (VALUE, LOCK_REF, LAST_ACCESS)
    )
    outside = (value != NULL) & (locks == 0) & (stamp < 0)
    is_due = must_slide(
        state.cache.num_free[SWA],
        jnp.sum(outside, dtype=jnp.int32),
        _demand(state, plan)[1],
    )

    def slide(carry):
        cache, tables, requests, _ = carry
        return *_slide(cache, tables, requests), jnp.zeros((), bool)

    carry = state.cache, state.tables, state.requests, is_due
    cache, tables, requests, _ = once_if(lambda carry: carry[3], slide, carry)
    return dataclasses.replace(state, cache=cache, tables=tables, requests=requests)


def _slide(cache, tables, requests):
    """Slide all windows: own pages go, and the lock on the tree's window."""
    config = cache.config
    window, size = config.sliding_window_size, config.page_size
    runs = requests.phase == Phase.RUNNING
    frontier = swa_frontier(tables.length, window, size)
    start, end, evicted = swa_release_range(
        frontier, requests.swa_evicted, tables.protected_length
    )
    column = jnp.arange(tables.swa_pages.shape[1], dtype=jnp.int32)[None]
    goes = (column >= (start // size)[:, None]) & (column < (end // size)[:, None])
    goes = goes & runs[:, None]
    cache = free_swa_pages(cache, jnp.where(goes, tables.swa_pages, 0))
    # Past the window of what is the tree's, the lock on it serves nobody.
    is_past = runs & (tables.length >= tables.protected_length + window)
    scalars = jnp.where(is_past[:, None], requests.receipt.scalars, 0)
    lock = IncLockRefResult(requests.receipt.path, scalars)
    cache, kept = release_window_batch(cache, lock)
    receipt = IncLockRefResult(
        requests.receipt.path,
        jnp.where(is_past[:, None], kept.scalars, requests.receipt.scalars),
    )
    # Pages of the tree outside the window may go at any time: nobody reads them.
    shared = column < (tables.protected_length // size)[:, None]
    goes = goes | (shared & is_past[:, None])
    swa_pages = jnp.where(goes, 0, tables.swa_pages)
    tables = dataclasses.replace(tables, swa_pages=swa_pages)
    requests = dataclasses.replace(
        requests,
        receipt=receipt,
        swa_evicted=jnp.where(runs, evicted, requests.swa_evicted),
    )
    return cache, tables, requests
