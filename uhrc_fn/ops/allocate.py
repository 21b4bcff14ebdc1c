"""Allocate pool entries; what is short is evicted, exactly the deficit."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import free_lists
from ..components import REGISTRY
from ..components.base import Component
from ..config import CacheConfig, ComponentType
from ..params import AllocResult, MatchResult
from ..state import CacheState, Owner, Ring, bump, flag, owner_offset
from ..status import Status
from ..tree_arrays import DROP, fence, settle
from .evict import evict_full, evict_values
from .once import once_if
from .path import first, page_index

EXHAUSTED = (
    Status.PAGES_EXHAUSTED,
    Status.SWA_PAGES_EXHAUSTED,
    Status.SLOTS_EXHAUSTED,
)

_SIZES = ("num_pages", "num_swa_pages", "num_recurrent_slots")


def alloc_pages(
    cache: CacheState,
    num_new,
    *,
    max_new: int | None = None,
    partial: bool = False,
) -> tuple[CacheState, AllocResult]:
    """Give FULL pages to a request, evicting the deficit.

    Args:
      cache: the state.
      num_new: pages wanted; an int or a traced scalar.
      max_new: static length of the result; needed where `num_new` is traced.
      partial: give what there is instead of all or none (static).

    Returns:
      ``(cache, result)`` with ids 0-padded to `max_new`.

    Status:
      PAGES_EXHAUSTED: less than wanted is free or evictable; nothing was evicted or
      given (without `partial`). BAD_LENGTH: `num_new` was clipped to [0, max_new].

    Ownership:
      the ids are the request's until insert adopts them or `free_pages` returns them.
    """
    return _alloc_one(cache, ComponentType.FULL, num_new, max_new, partial)


def alloc_pages_batch(
    cache: CacheState, num_new, *, max_new: int, partial: bool = False
) -> tuple[CacheState, AllocResult]:
    """Give pages to a batch of requests, as if one after another.

    Where ``max_new * requests`` exceeds `victim_plan_size`, evicted pages come in the
    order of their nodes: the same pages, perhaps handed to other requests.

    Args:
      cache: the state.
      num_new: int32 [requests].
      max_new: static bound on each.
      partial: give what there is instead of all or none (static).
    """
    return _alloc(cache, ComponentType.FULL, num_new, max_new, partial)


def alloc_swa_pages(
    cache: CacheState, num_new, *, max_new: int | None = None, partial: bool = False
) -> tuple[CacheState, AllocResult]:
    """Give SWA pages to a request, evicting the deficit; see `alloc_pages`.

    Raises:
      ValueError: the cache has no SWA component.

    Status:
      SWA_PAGES_EXHAUSTED, BAD_LENGTH.
    """
    return _alloc_one(cache, ComponentType.SWA, num_new, max_new, partial)


def alloc_swa_pages_batch(
    cache: CacheState, num_new, *, max_new: int, partial: bool = False
) -> tuple[CacheState, AllocResult]:
    """Give SWA pages to a batch of requests; see `alloc_pages_batch`."""
    return _alloc(cache, ComponentType.SWA, num_new, max_new, partial)


def alloc_slots(
    cache: CacheState, num_new, *, max_new: int | None = None, partial: bool = False
) -> tuple[CacheState, AllocResult]:
    """Give recurrent slots to a request, evicting the deficit; see `alloc_pages`.

    A slot holds what its last owner left: a fresh request reads zeros by its mask.

    Raises:
      ValueError: the cache has no RECURRENT component.

    Status:
      SLOTS_EXHAUSTED, BAD_LENGTH.
    """
    return _alloc_one(cache, ComponentType.RECURRENT, num_new, max_new, partial)


class RequestAlloc(NamedTuple):
    """What `alloc_request` gave; a component that the cache lacks gives nothing."""

    pages: AllocResult
    swa_pages: AllocResult
    slots: AllocResult

    @property
    def ok(self):
        """Whether all of it was given."""
        return self.pages.ok & self.swa_pages.ok & self.slots.ok


def alloc_request(
    cache: CacheState,
    num_pages,
    num_swa_pages=0,
    num_slots=0,
    *,
    max_pages: int,
    max_swa_pages: int = 1,
    max_slots: int = 1,
) -> tuple[CacheState, RequestAlloc]:
    """Give a request what it needs of every pool, all or none.

    Args:
      cache: the state.
      num_pages: FULL pages wanted.
      num_swa_pages: SWA pages wanted; 0 where the cache has none.
      num_slots: recurrent slots wanted; 0 where the cache has none.
      max_pages: static bound, as are the other two.
      max_swa_pages: static bound.
      max_slots: static bound.

    Returns:
      ``(cache, allocs)``. Every deficit is checked before anything is evicted.

    Status:
      PAGES_EXHAUSTED, SWA_PAGES_EXHAUSTED, SLOTS_EXHAUSTED: nothing was evicted or
      given. BAD_LENGTH: a count was clipped to its bound.
    """
    asked = [num_pages, num_swa_pages, num_slots]
    most = (max_pages, max_swa_pages, max_slots)
    config = cache.config
    wanted, bits, short = [], jnp.int32(0), jnp.zeros((), bool)
    for kind in ComponentType:
        number = jnp.asarray(asked[kind], jnp.int32)
        limit = most[kind] if kind in config.components else 0
        kept = jnp.clip(number, 0, limit)
        lacks = kept > _room(cache, kind)
        bits = bits | flag(number != kept, Status.BAD_LENGTH)
        bits = bits | flag(lacks, EXHAUSTED[kind])
        short = short | lacks
        wanted.append(kept)
    counters = bump(cache.counters, status=bits)
    cache = dataclasses.replace(cache, counters=counters)
    results = {}
    # Pages last: what goes with an evicted page is then already counted.
    for kind in (ComponentType.RECURRENT, ComponentType.SWA, ComponentType.FULL):
        if kind not in config.components:
            none = jnp.zeros((most[kind],), jnp.int32)
            results[kind] = AllocResult(none, jnp.array([0, 1], jnp.int32))
            continue
        number = jnp.where(short, 0, wanted[kind])[None]
        cache, result = _alloc(cache, kind, number, most[kind], False)
        ok = jnp.where(short, 0, 1)
        scalars = jnp.stack([result.count[0], ok])
        results[kind] = AllocResult(result.ids[0], scalars)
    return cache, RequestAlloc(*(results[kind] for kind in ComponentType))


def _alloc_one(cache, kind: ComponentType, num_new, max_new, partial):
    if max_new is None:
        max_new = _static_count(num_new)
    num_new = jnp.asarray(num_new, jnp.int32)[None]
    cache, result = _alloc(cache, kind, num_new, max_new, partial)
    return cache, first(result)


def _room(cache: CacheState, kind: ComponentType):
    """Entries of a pool that a request could get."""
    return free_lists.size(cache.counters, Ring(int(kind))) + cache.evictable[kind]


def _rules(config: CacheConfig, kind: ComponentType) -> Component:
    if kind in config.components:
        return REGISTRY[kind](config)
    raise ValueError(
        f"the cache has components {[c.name for c in config.components]}; wanted "
        f"{kind.name} among them. Build the cache with it."
    )


def _alloc(
    cache: CacheState, kind: ComponentType, num_new, max_new: int, partial: bool
):
    """Give entries of a pool to a batch of requests."""
    config = cache.config
    rules, ring = _rules(config, kind), Ring(int(kind))
    most = config.capacities[kind]
    if not isinstance(max_new, int) or not 1 <= max_new <= most:
        raise ValueError(
            f"max_new={max_new!r}; wanted a static int from 1 to "
            f"{_SIZES[kind]}={most}. It is the length of the padded result."
        )
    asked = jnp.asarray(num_new, jnp.int32)
    wanted = jnp.clip(asked, 0, max_new)
    given = _admit(wanted, _room(cache, kind), partial)
    scalars = jnp.stack([given, (given == wanted).astype(jnp.int32)], -1)
    total = jnp.sum(given, dtype=jnp.int32)
    deficit = jnp.maximum(total - free_lists.size(cache.counters, ring), 0)
    bound = min(config.num_nodes, max_new * wanted.shape[0])
    # Read before the eviction writes, or XLA keeps a copy of the counters.
    (scalars, deficit), counters = fence((scalars, deficit), cache.counters)
    cache = dataclasses.replace(cache, counters=counters)

    def evict_deficit(operands):
        cache, deficit = operands
        if rules.removes_node:
            # What is evicted is given: the deficit leaves no page free.
            cache, _ = evict_full(cache, deficit, bound, are_given=True)
        else:
            cache, _ = evict_values(cache, rules, deficit, bound)
        return cache, jnp.zeros_like(deficit)

    is_short = lambda operands: operands[1] > 0
    cache, _ = once_if(is_short, evict_deficit, (cache, deficit))
    # Few steps count: XLA for CPU runs more than eight in a call as a graph, not one
    # after another. So this is read anew, and not kept as an array of its own.
    given = scalars[:, 0]
    total = jnp.sum(given, dtype=jnp.int32)
    lane = page_index(max_new)
    is_given = lane < given[:, None]
    rank = (jnp.cumsum(given, dtype=jnp.int32) - given)[:, None] + lane
    # Two wraps are possible where rank runs past what is given; those are masked.
    rank = jnp.where(is_given, rank, 0)
    ids = free_lists.front(cache.free_ids, cache.counters, config, ring, rank)
    ids = jnp.where(is_given, ids, 0)
    # What is not given is the dummy, whose entry stays as it is.
    holder = jnp.where(is_given, int(Owner.REQUEST), int(Owner.DUMMY))
    owner = cache.owner.at[owner_offset(config, kind) + ids].set(holder, **DROP)
    status = flag(asked != wanted, Status.BAD_LENGTH)
    if not partial:
        status = status | flag(given != wanted, EXHAUSTED[kind])
    counters = bump(
        cache.counters,
        status=status,
        **free_lists.taken(cache.counters, config, ring, total),
    )
    cache = dataclasses.replace(cache, owner=owner, counters=counters)
    return settle(cache, AllocResult(ids, scalars))


def _static_count(num_new) -> int:
    if isinstance(num_new, int) and num_new >= 1:
        return num_new
    raise ValueError(
        f"num_new={num_new!r} without max_new; wanted a positive Python int, or a "
        "static bound: alloc_pages(cache, num_new, max_new=64)."
    )


def _admit(wanted, room, partial: bool):
    """What each request gets of `room`, one after another."""
    if partial:
        before = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
        return jnp.clip(room - before, 0, wanted)
    if wanted.shape[0] == 1:
        return jnp.where(wanted <= room, wanted, 0)

    def admit(left, want):
        given = jnp.where(want <= left, want, 0)
        return left - given, given

    return jax.lax.scan(admit, room, wanted)[1]


def page_table(match: MatchResult, alloc: AllocResult):
    """One FULL page for each page of a key: the matched ones, then the new ones.

    Args:
      match: gives `device_indices` [..., pages] and the hit.
      alloc: pages for what was not hit.

    Returns:
      int32 [..., pages], 0 past what was given.
    """
    indices = match.device_indices
    hit = jnp.sum(indices != 0, axis=-1, keepdims=True)
    lane = jax.lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) - hit
    most = alloc.ids.shape[-1]
    new = jnp.take_along_axis(alloc.ids, jnp.clip(lane, 0, most - 1), axis=-1)
    return jnp.where(lane < 0, indices, jnp.where(lane < most, new, 0))
