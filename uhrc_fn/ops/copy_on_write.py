"""Copy-on-write: a request that hits resumes from a copy of the snapshot's state.

Where there is no slot for a copy and never will be, it takes the snapshot itself.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ..components import REGISTRY
from ..config import ComponentType
from ..params import IncLockRefResult, MatchResult
from ..pools.recurrent_state import RecurrentStatePool
from ..state import CacheState, Owner, bump, flag, owner_entry
from ..status import Status
from ..tree_arrays import (
    DROP,
    LOCK_REF,
    NULL,
    ROOT,
    VALUE,
    num_rows,
    place_of,
    settle,
    take,
)
from .allocate import alloc_slots
from .lock import dec_lock_ref, inc_lock_ref, release_window


class CloneResult(NamedTuple):
    """What a clone gave."""

    receipt: IncLockRefResult
    """Holds FULL (the REC part ended with the clone); its serial is 0 unless `ok`."""
    slot: Int32[Array, ""]
    """The request's running slot: a copy of the snapshot, or, without a hit, whatever
    its last owner left: read zeros through the mask. 0 unless `ok`."""
    ok: Bool[Array, ""]
    """Whether there was a slot, and the match still stood."""


def cow_clone(
    cache: CacheState, states: RecurrentStatePool, match: MatchResult
) -> tuple[CacheState, RecurrentStatePool, CloneResult]:
    """Lock a match, take a slot, copy the snapshot into it, let the snapshot go.

    Args:
      cache: the state, with a RECURRENT component.
      states: the states of all recurrent layers.
      match: of all components; without a hit nothing is copied.

    Returns:
      ``(cache, states, result)``.

    Status:
      SLOTS_EXHAUSTED, LEDGER_FULL: nothing was taken, locked or copied.
      STALE_MATCH: the anchor or its snapshot is gone; likewise.

    Ownership:
      the slot is the request's until `free_slots`, or until insert adopts it.
    """
    cache, receipt = inc_lock_ref(cache, match)
    is_locked = receipt.serial != 0
    source = jnp.where(is_locked, match.cow_src_slot, 0)
    cache, _, held = _read_anchor(cache, match, VALUE)
    is_gone = (source > 0) & (held != source)
    cache = _flagged(cache, flag(is_gone, Status.STALE_MATCH))
    wanted = (is_locked & ~is_gone).astype(jnp.int32)
    cache, slots = alloc_slots(cache, wanted, max_new=1)
    slot = slots.ids[0]
    ok = slot > 0
    states = states.copy_slots(jnp.where(ok, source, 0)[None], slot[None])
    cache, kept = _keep_full(cache, receipt, ok)
    return cache, states, CloneResult(kept, slot, ok)


def cow_move(cache: CacheState, match: MatchResult) -> tuple[CacheState, CloneResult]:
    """Take the snapshot's own slot out of the tree: a clone that needs no slot.

    For a request that can get no slot while nothing runs that would free one
    (`Admission.MOVE`): it resumes in the snapshot itself, which the tree loses.

    Args:
      cache: the state, with a RECURRENT component.
      match: of all components, with a hit.

    Returns:
      ``(cache, result)``; the result's slot is the snapshot's.

    Status:
      SLOTS_EXHAUSTED: somebody else has the snapshot locked. STALE_MATCH: there is
      none, or it or the anchor is gone. LEDGER_FULL. Nothing was taken or locked.

    Ownership:
      the slot is the request's, as after `cow_clone`.
    """
    cache, receipt = inc_lock_ref(cache, match)
    is_locked = receipt.serial != 0
    source = match.cow_src_slot
    cache, node, (held, locks) = _read_anchor(
        cache, match, np.array([VALUE, LOCK_REF], np.int32)
    )
    is_gone = is_locked & ((source <= 0) | (held != source))
    is_shared = is_locked & ~is_gone & (locks > 1)
    ok = is_locked & ~is_gone & ~is_shared
    bits = flag(is_gone, Status.STALE_MATCH) | flag(is_shared, Status.SLOTS_EXHAUSTED)
    cache = _flagged(cache, bits)
    cache, kept = _keep_full(cache, receipt, ok)
    cache = _take_out(cache, jnp.where(ok, node, NULL), jnp.where(ok, source, 0))
    return cache, CloneResult(kept, jnp.where(ok, source, 0), ok)


def _read_anchor(cache: CacheState, match: MatchResult, fields):
    """Read RECURRENT fields of a match's anchor: ``(cache, node, what it holds)``."""
    node = jnp.clip(match.best_match_node, ROOT, num_rows(cache.tree.fields) - 1)
    held = take(cache.tree.fields, fields + ComponentType.RECURRENT, node)
    cache, held = settle(cache, held)
    return cache, node, held


def _keep_full(cache: CacheState, receipt: IncLockRefResult, ok):
    """Keep the FULL part of a lock where `ok`, else nothing of it.

    Returns:
      ``(cache, receipt)`` of what is kept.
    """
    # One of the two gives something back; the other sees a receipt of nothing.
    cache, kept = release_window(cache, _unless(~ok, receipt))
    cache, _ = dec_lock_ref(cache, _unless(ok, receipt))
    return cache, kept


def _take_out(cache: CacheState, node, slot) -> CacheState:
    """Give a node's unlocked snapshot to a request; nothing where `node` is `NULL`."""
    config, fields = cache.config, cache.tree.fields
    rules = REGISTRY[ComponentType.RECURRENT](config)
    names = np.array([rules.value_field, rules.stamp_field], np.int32)
    fields = fields.at[place_of(fields, names, node)].set(NULL, **DROP)
    _, entry = owner_entry(config, ComponentType.RECURRENT, slot)
    entry = jnp.where(node == NULL, cache.owner.shape[0], entry)
    owner = cache.owner.at[entry].set(int(Owner.REQUEST), **DROP)
    taken = (node != NULL).astype(jnp.int32)
    counters = bump(cache.counters, evictable__2=-taken)
    tree = dataclasses.replace(cache.tree, fields=fields)
    cache = dataclasses.replace(cache, tree=tree, owner=owner, counters=counters)
    return settle(cache, ())[0]


def _unless(condition, receipt: IncLockRefResult) -> IncLockRefResult:
    """The receipt, or one of nothing."""
    scalars = jnp.where(condition, 0, receipt.scalars)
    return IncLockRefResult(path=receipt.path, scalars=scalars)


def _flagged(cache: CacheState, bits) -> CacheState:
    return dataclasses.replace(cache, counters=bump(cache.counters, status=bits))
