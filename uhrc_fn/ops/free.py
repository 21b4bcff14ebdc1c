"""Free pool entries that a request owns."""

import dataclasses

import jax
import jax.numpy as jnp

from .. import free_lists
from ..config import ComponentType
from ..state import CacheState, Owner, Ring, bump, owner_entry
from ..status import Status
from ..tree_arrays import DROP, IN_BOUNDS, fence, settle
from .claim import first_touch

# Up to so many ids a table of all pairs finds repeated ones at less cost than claims.
_MAX_PAIRED = 64


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
    return _free(cache, ComponentType.FULL, ids)


def free_swa_pages(cache: CacheState, ids) -> CacheState:
    """Return a request's SWA pages to the free list; see `free_pages`."""
    return _free(cache, ComponentType.SWA, ids)


def free_slots(cache: CacheState, ids) -> CacheState:
    """Return a request's recurrent slots to the free list; see `free_pages`."""
    return _free(cache, ComponentType.RECURRENT, ids)


def _free(cache: CacheState, kind: ComponentType, ids) -> CacheState:
    config, ring = cache.config, Ring(int(kind))
    ids = jnp.asarray(ids, jnp.int32).reshape(-1)
    is_id, entry = owner_entry(config, kind, ids)
    owner_of, owner = fence(cache.owner.at[entry].get(**IN_BOUNDS), cache.owner)
    owned = owner_of == Owner.REQUEST
    owner, is_second = _is_second(owner, entry, owned)
    is_freed = owned & ~is_second
    place = jnp.where(is_freed, entry, owner.shape[0])
    owner = owner.at[place].set(int(Owner.FREE), **DROP)
    free_ids, count = free_lists.push(
        cache.free_ids, cache.counters, config, ring, ids, is_freed
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
        **free_lists.given(ring, count),
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
