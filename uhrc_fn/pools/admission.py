"""Backpressure: whether a waiting request may start, decided on counts alone.

A request starts only if every pool can give what it will own: then no allocation in
mid-flight can come up short. Counts are int32, in pool entries (FULL pages, SWA pages,
recurrent slots), with the components on the last axis as in `ComponentType`. The pools
of a set that lacks a component count 0 there, and ask 0.
"""

import enum

import jax.numpy as jnp

from ..config import ComponentType
from ..tree_arrays import NULL

RECURRENT = int(ComponentType.RECURRENT)


class Admission(enum.IntEnum):
    """What a waiting request may do."""

    WAIT = 0
    ADMIT = 1
    MOVE = 2
    """Start in the snapshot's own slot: the clone becomes a move."""


def count_evictable(value, lock_ref):
    """Entries that eviction can really free: held by a node and not locked.

    A value whose component is not locked can go whatever else is locked there, since
    the recurrent and SWA phases free their own value and leave the node; an unlocked
    FULL page has no locked descendant. `CacheState.evictable` is kept equal to this.

    Args:
      value: int32 [..., nodes] entries of one component, `NULL` for a tombstone.
      lock_ref: int32 [..., nodes] its locks.

    Returns:
      int32 [...].
    """
    return jnp.sum((value != NULL) & (lock_ref == 0), axis=-1, dtype=jnp.int32)


def about_to_lock(value, lock_ref, is_locking):
    """Entries that a lock will take out of the evictable ones.

    What another request has locked already is not among those, so it is not taken
    off a second time.

    Args:
      value: int32 [..., pages] one component's entries on the path of a match.
      lock_ref: int32 [..., pages] its locks there.
      is_locking: bool [..., pages] the pages that the lock will hold.

    Returns:
      int32 [...].
    """
    return count_evictable(jnp.where(is_locking, value, NULL), lock_ref)


def covers(free, evictable, locking, demand):
    """Whether free and evictable entries, less those about to be locked, suffice.

    Args:
      free: entries in the free list.
      evictable: what eviction can really free, counted before the lock.
      locking: those of `evictable` that the request's own match will lock.
      demand: entries that the request will own beyond those it owns.

    Returns:
      bool, of the arguments' common shape.
    """
    free, evictable, locking, demand = _int32(free, evictable, locking, demand)
    return free + evictable - locking >= demand


def slot_demand(request_owned, already_owned):
    """Slots that a request still has to get: a continuing one owns its own already."""
    request_owned, already_owned = _int32(request_owned, already_owned)
    return jnp.maximum(request_owned - already_owned, 0)


def admit(free, evictable, locking, demand, is_idle):
    """Decide for the first waiting request of a rank.

    | all pools cover | short of one slot, its own source | else |
    |---|---|---|
    | ADMIT | MOVE if nothing runs, else WAIT | WAIT |

    Where nothing runs, nobody will ever free a slot: waiting for the one that the
    match itself would lock is waiting for ever. So the request takes the snapshot's
    own slot, which costs the tree that snapshot and needs one slot less. A source that
    somebody else has locked is not moved.

    Args:
      free: [..., 3] entries in the free lists.
      evictable: [..., 3] what eviction can really free, counted before the lock.
      locking: [..., 3] those of `evictable` that its match will lock; for RECURRENT 1
        if the match has a source to clone and nobody has locked it, else 0.
      demand: [..., 3] what it will own beyond what it owns.
      is_idle: bool [...] whether no request is running on the rank.

    Returns:
      int32 [...], an `Admission`.
    """
    free, evictable, locking, demand = _int32(free, evictable, locking, demand)
    can_clone = jnp.all(covers(free, evictable, locking, demand), axis=-1)
    has_source = locking[..., RECURRENT] > 0
    # The source leaves the tree and serves the request: off both sides, not one.
    is_source = jnp.zeros_like(demand).at[..., RECURRENT].set(1)
    can_move = jnp.all(covers(free, evictable, locking, demand - is_source), axis=-1)
    can_move = can_move & has_source & jnp.asarray(is_idle)
    otherwise = jnp.where(can_move, int(Admission.MOVE), int(Admission.WAIT))
    return jnp.where(can_clone, int(Admission.ADMIT), otherwise).astype(jnp.int32)


def admit_in_order(free, evictable, locking, demand):
    """Admit waiting requests of a rank first come, first served, in one go.

    The first that cannot start holds back all after it, so that no stream of small
    requests overtakes a large one for ever.

    Args:
      free: [3] entries in the free lists.
      evictable: [3] what eviction can really free, counted before any of the locks.
      locking: [requests, 3] as in `admit`. An entry that two requests would lock
        counts for both: some may wait a round more than they must, never the first.
      demand: [requests, 3] as in `admit`.

    Returns:
      bool [requests], a run of True from the first on.
    """
    free, evictable, locking, demand = _int32(free, evictable, locking, demand)
    promised = jnp.cumsum(locking + demand, axis=0, dtype=jnp.int32)
    # What is promised only grows, so after the first that does not fit none does.
    return jnp.all(promised <= (free + evictable)[None], axis=-1)


def _int32(*arrays):
    return tuple(jnp.asarray(a, jnp.int32) for a in arrays)
