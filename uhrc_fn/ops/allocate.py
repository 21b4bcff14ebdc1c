"""Allocate and free pool pages; what is short is evicted, exactly the deficit."""

import dataclasses

import jax
import jax.numpy as jnp

from .. import free_lists
from ..config import ComponentType
from ..params import AllocResult, MatchResult
from ..state import CacheState, Owner, Ring, bump, flag, owner_offset
from ..status import Status
from ..tree_arrays import DROP, IN_BOUNDS, fence, settle
from .claim import first_touch
from .evict import evict_full
from .path import first, page_index

# Up to so many ids a table of all pairs finds repeated ones at less cost than claims.
_MAX_PAIRED = 64


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
    if max_new is None:
        max_new = _static_count(num_new)
    num_new = jnp.asarray(num_new, jnp.int32)
    cache, result = alloc_pages_batch(
        cache, num_new[None], max_new=max_new, partial=partial
    )
    return cache, first(result)


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
    config = cache.config
    if not isinstance(max_new, int) or not 1 <= max_new <= config.num_pages:
        raise ValueError(
            f"max_new={max_new!r}; wanted a static int from 1 to "
            f"num_pages={config.num_pages}. It is the length of the padded result."
        )
    asked = jnp.asarray(num_new, jnp.int32)
    wanted = jnp.clip(asked, 0, max_new)
    ring = Ring.FULL
    num_free = free_lists.size(cache.counters, ring)
    room = num_free + cache.evictable[ComponentType.FULL]
    given = _admit(wanted, room, partial)
    total = jnp.sum(given, dtype=jnp.int32)
    bound = min(config.num_nodes, max_new * wanted.shape[0])
    # What is evicted is given: the deficit leaves no page free.
    deficit = jnp.maximum(total - num_free, 0)
    cache, _ = evict_full(cache, deficit, bound, are_given=True)

    lane = page_index(max_new)
    is_given = lane < given[:, None]
    rank = (jnp.cumsum(given, dtype=jnp.int32) - given)[:, None] + lane
    # Two wraps are possible where rank runs past what is given; those are masked.
    rank = jnp.where(is_given, rank, 0)
    ids = free_lists.front(cache.free_ids, cache.counters, config, ring, rank)
    ids = jnp.where(is_given, ids, 0)
    place = jnp.where(
        is_given, owner_offset(config, ComponentType.FULL) + ids, cache.owner.shape[0]
    )
    owner = cache.owner.at[place].set(int(Owner.REQUEST), **DROP)
    ok = given == wanted
    status = flag(asked != wanted, Status.BAD_LENGTH)
    if not partial:
        status = status | flag(~ok, Status.PAGES_EXHAUSTED)
    counters = bump(
        cache.counters,
        status=status,
        **free_lists.taken(cache.counters, config, ring, total),
    )
    cache = dataclasses.replace(cache, owner=owner, counters=counters)
    scalars = jnp.stack([given, ok.astype(jnp.int32)], -1)
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


def free_pages(cache: CacheState, ids) -> CacheState:
    """Return a request's FULL pages to the free list.

    Args:
      cache: the state.
      ids: int32 [n] page ids; 0 is padding.

    Returns:
      The cache.

    Status:
      DOUBLE_FREE, FREED_TREE_PAGE, BAD_PAGE: those ids were left alone, the others
      were freed.
    """
    config = cache.config
    ids = jnp.asarray(ids, jnp.int32).reshape(-1)
    is_id = (ids > 0) & (ids <= config.num_pages)
    entry = owner_offset(config, ComponentType.FULL) + jnp.where(is_id, ids, 0)
    owner_of, owner = fence(cache.owner.at[entry].get(**IN_BOUNDS), cache.owner)
    owned = owner_of == Owner.REQUEST
    owner, is_second = _is_second(owner, entry, owned)
    is_freed = owned & ~is_second
    place = jnp.where(is_freed, entry, owner.shape[0])
    owner = owner.at[place].set(int(Owner.FREE), **DROP)
    free_ids, count = free_lists.push(
        cache.free_ids, cache.counters, config, Ring.FULL, ids, is_freed
    )
    is_double = is_second | (is_id & (owner_of == Owner.FREE))
    bits = (
        jnp.where((ids != 0) & ~is_id, int(Status.BAD_PAGE), 0)
        | jnp.where(is_double, int(Status.DOUBLE_FREE), 0)
        | jnp.where(is_id & (owner_of == Owner.TREE), int(Status.FREED_TREE_PAGE), 0)
    )
    counters = bump(
        cache.counters,
        status=jax.lax.reduce_or(bits, axes=(0,)),
        **free_lists.given(Ring.FULL, count),
    )
    cache = dataclasses.replace(
        cache, owner=owner, free_ids=free_ids, counters=counters
    )
    return settle(cache, ())[0]


def _is_second(owner, entry, owned):
    """Which lanes name an entry that an earlier lane names.

    Returns:
      ``(owner, is_second)``.
    """
    turn = jnp.arange(entry.shape[0], dtype=jnp.int32)
    if entry.shape[0] <= _MAX_PAIRED:
        earlier = owned[:, None] & (turn[:, None] < turn[None])
        same = earlier & (entry[:, None] == entry[None])
        return owner, owned & (jnp.sum(same, axis=0, dtype=jnp.int32) > 0)
    place = jnp.where(owned, entry, owner.shape[0])
    owner, is_first = first_touch(owner, (place,), turn)
    return owner, owned & ~is_first


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
