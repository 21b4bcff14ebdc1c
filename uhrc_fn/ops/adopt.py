"""What an insert does for the components beside FULL.

FULL decides which nodes there are; SWA and RECURRENT then take or refuse what the
caller brings for them, and never keep a page from going in.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..components import component_rules
from ..components.base import LOW_STAMP, Component
from ..config import CacheConfig, ComponentType
from ..params import InsertParams
from ..state import CacheState, Counter, Owner, flag, owner_entry
from ..status import Status
from ..tree_arrays import DROP, IN_BOUNDS, NULL, NUM_CHILDREN, fence
from .claim import first_touch
from .path import page_index


class Adoption(NamedTuple):
    """What one component takes; arrays are [1, pages] unless noted."""

    rules: Component
    taken: jax.Array  # entries that the tree adopts
    duplicate: jax.Array  # the tree has its own
    exists: jax.Array  # [1, 1] a snapshot stood where one was brought
    entry: jax.Array  # owner entries of what is taken, or past the end
    counts: dict  # changes of counters
    rows: list  # (field, written, value) to write to the nodes
    status: jax.Array  # []


def extra_fields(config: CacheConfig) -> list[int]:
    """Fields of the key's nodes that adoptions read."""
    others = component_rules(config)[1:]
    names = [name for r in others for name in (r.value_field, r.lock_field)]
    return [*names, NUM_CHILDREN] if config.has_recurrent else names


def adopt(cache: CacheState, held: dict, params: InsertParams, bounds, key_length):
    """Let each component beside FULL take its entries.

    Args:
      cache: the state.
      held: field -> [1, pages], see `extra_fields`; what nodes past `old` hold is
        ignored.
      params: one request.
      bounds: ``(old, cut, prev, is_stale)``, [1, 1] each, in pages.
      key_length: int32 [1], tokens.

    Returns:
      ``(cache, adoptions)``; claims in `owner` are restored.
    """
    adoptions = []
    for r in component_rules(cache.config)[1:]:
        cache, adoption = _adopt_one(cache, r, held, params, bounds, key_length)
        adoptions.append(adoption)
    return cache, adoptions


def _adopt_one(cache: CacheState, r: Component, held, params, bounds, key_length):
    config = cache.config
    old, cut, prev, is_stale = bounds
    length = held[r.value_field].shape[1]
    page = page_index(length)
    before = page < old
    value = jnp.where(before, held[r.value_field], NULL)
    lock = jnp.where(before, held[r.lock_field], 0)
    in_tree = (page < cut) & ~is_stale
    is_new = in_tree & ~before
    offered, evicted, refused = _offered(config, r, params, page, cut, key_length)
    offered = jnp.where(in_tree, offered, 0)
    wants = in_tree & r.adopts(page, value, offered, is_new, evicted)
    cache, theirs, entry = _theirs(cache, r, offered, wants)
    taken = wants & theirs
    stands = in_tree & (offered > 0) & (value != NULL)
    duplicate = stands & (value != offered) & (page >= prev)
    is_slot = r.type == ComponentType.RECURRENT
    stamped = taken | stands if is_slot else taken
    clock = cache.counters[Counter.CLOCK].reshape(1, 1)
    stamp = r.stamps(clock, length)
    written, stamps = r.stamps_insert(page, cut, stamped, value, stamp)
    rows = [(r.value_field, taken, offered), (r.stamp_field, written, stamps)]
    if is_slot:
        rows.append(_line(r, held, value, taken, bounds, stamp))
    free = jnp.sum(taken & (lock == 0), dtype=jnp.int32)
    status = flag(wants & ~theirs, Status.NOT_OWNED) | flag(refused, Status.BAD_LENGTH)
    return cache, Adoption(
        rules=r,
        taken=taken,
        duplicate=duplicate,
        exists=jnp.any(stands, axis=-1, keepdims=True),
        entry=jnp.where(taken, entry, cache.owner.shape[0]),
        counts={
            f"evictable__{int(r.type)}": free,
            f"protected__{int(r.type)}": jnp.sum(taken, dtype=jnp.int32) - free,
        },
        rows=rows,
        status=status,
    )


def _offered(config: CacheConfig, r: Component, params, page, cut, key_length):
    """What the caller brings, by page.

    Returns:
      ``(entries, evicted_seqlen, refused)``: entries are 0 where there is none.
    """
    nothing = jnp.zeros_like(page)
    zero = jnp.zeros((1, 1), jnp.int32)
    if r.type == ComponentType.SWA:
        entries = params.swa_value
        entries = nothing if entries is None else jnp.asarray(entries, jnp.int32)
        evicted = params.swa_evicted_seqlen
        evicted = zero if evicted is None else jnp.asarray(evicted).reshape(1, 1)
        return entries, evicted.astype(jnp.int32), evicted < 0
    if params.recurrent_value is None:
        return nothing, zero, zero != 0
    size = config.page_size
    slot = jnp.asarray(params.recurrent_value, jnp.int32).reshape(1, 1)
    at = jnp.asarray(params.recurrent_length, jnp.int32).reshape(1, 1)
    # Only the state at the very end of a key that went in whole stands for it.
    whole = (cut * size == at) & (key_length.reshape(1, 1) == at) & (at > 0)
    whole = whole & ~jnp.asarray(params.key.is_truncated).reshape(1, 1)
    return jnp.where(whole & (page == cut - 1), slot, 0), zero, at < 0


def _theirs(cache: CacheState, r: Component, offered, wants):
    """Which entries the caller's request owns, each counted once.

    Returns:
      ``(cache, theirs, entry)``.
    """
    is_id, entry = owner_entry(cache.config, r.type, offered)
    held, owner = fence(cache.owner.at[entry].get(**IN_BOUNDS), cache.owner)
    cache = dataclasses.replace(cache, owner=owner)
    theirs = is_id & (held == Owner.REQUEST)
    if r.type == ComponentType.RECURRENT:
        return cache, theirs, entry
    place = jnp.where(theirs & wants, entry, cache.owner.shape[0])
    turn = page_index(offered.shape[1])
    owner, is_first = first_touch(cache.owner, (place,), turn)
    return dataclasses.replace(cache, owner=owner), theirs & is_first, entry


def _line(r: Component, held, value, taken, bounds, stamp):
    """Stamp the nearest snapshot above a commit low, unless the line forks between.

    A long prefill's own boundary snapshots so replace each other, not the neighbours'.
    """
    old, cut, _, _ = bounds
    page = page_index(value.shape[1])
    at = jnp.max(jnp.where(taken, page, NULL), axis=-1, keepdims=True)
    above = (page < at) & (value != NULL)
    nearest = jnp.max(jnp.where(above, page, NULL), axis=-1, keepdims=True)
    # What this insert hangs on an old node counts as its child.
    grown = jnp.where((page == old - 1) & (cut > old), 1, 0)
    children = jnp.where(page < old, held[NUM_CHILDREN] + grown, 0)
    forks = (page >= nearest) & (page < at) & (children > 1)
    alone = ~jnp.any(forks, axis=-1, keepdims=True)
    written = (page == nearest) & (nearest >= 0) & alone
    return r.stamp_field, written, stamp - LOW_STAMP


def settle_owner(owner, adoptions):
    """Make what was taken the tree's."""
    for adoption in adoptions:
        owner = owner.at[adoption.entry].set(int(Owner.TREE), **DROP)
    return owner
