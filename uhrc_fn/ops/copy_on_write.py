"""Copy-on-write: a request that hits resumes from a copy of the snapshot's state."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ..config import ComponentType
from ..params import IncLockRefResult, MatchResult
from ..pools.recurrent_state import RecurrentStatePool
from ..state import CacheState, bump, flag
from ..status import Status
from ..tree_arrays import ROOT, VALUE, num_rows, settle, take
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
    node = jnp.clip(match.best_match_node, ROOT, num_rows(cache.tree.fields) - 1)
    held = take(cache.tree.fields, VALUE + ComponentType.RECURRENT, node)
    cache, held = settle(cache, held)
    is_gone = (source > 0) & (held != source)
    cache = _flagged(cache, flag(is_gone, Status.STALE_MATCH))
    wanted = (is_locked & ~is_gone).astype(jnp.int32)
    cache, slots = alloc_slots(cache, wanted, max_new=1)
    slot = slots.ids[0]
    ok = slot > 0
    states = states.copy_slots(jnp.where(ok, source, 0)[None], slot[None])
    # One of the two gives something back; the other sees a receipt of nothing.
    cache, kept = release_window(cache, _unless(~ok, receipt))
    cache, _ = dec_lock_ref(cache, _unless(ok, receipt))
    return cache, states, CloneResult(kept, slot, ok)


def _unless(condition, receipt: IncLockRefResult) -> IncLockRefResult:
    """The receipt, or one of nothing."""
    scalars = jnp.where(condition, 0, receipt.scalars)
    return IncLockRefResult(path=receipt.path, scalars=scalars)


def _flagged(cache: CacheState, bits) -> CacheState:
    return dataclasses.replace(cache, counters=bump(cache.counters, status=bits))
