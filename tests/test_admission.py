"""Backpressure: a request starts only where every pool can give what it will own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uhrc_fn.pools import admission
from uhrc_fn.pools.admission import Admission
from uhrc_fn.tree_arrays import NULL

ADMIT = jax.jit(admission.admit)
IN_ORDER = jax.jit(admission.admit_in_order)


def _slots(slots, pages=0, swa_pages=0):
    return np.array([pages, swa_pages, slots], np.int32)


def _decide(free, evictable, demand, source=0, is_idle=False):
    sides = (_slots(free), _slots(evictable), _slots(source), _slots(demand))
    return Admission(int(ADMIT(*sides, is_idle)))


def test_a_request_without_a_hit_starts_at_exact_capacity():
    assert admission.covers(0, 3, 0, 3)
    assert _decide(0, 3, 3) is Admission.ADMIT


def test_a_hit_at_exact_capacity_waits_since_it_would_lock_its_own_source():
    assert not admission.covers(0, 3, 1, 3)
    assert _decide(0, 3, 3, source=1) is Admission.WAIT


def test_a_hit_with_one_free_slot_starts():
    assert not admission.covers(1, 3, 2, 3)
    assert admission.covers(1, 3, 1, 3)
    assert _decide(1, 3, 3, source=1) is Admission.ADMIT


def test_demand_beyond_all_slots_waits():
    assert not admission.covers(0, 1, 0, 3)
    assert _decide(0, 1, 3) is Admission.WAIT


def test_an_idle_rank_moves_the_snapshot_rather_than_wait_for_ever():
    assert _decide(0, 3, 3, source=1, is_idle=True) is Admission.MOVE
    assert _decide(0, 1, 1, source=1, is_idle=True) is Admission.MOVE


def test_a_move_needs_the_other_slots_and_a_source_of_its_own():
    assert _decide(0, 2, 3, source=1, is_idle=True) is Admission.WAIT
    # A source that another has locked is not among the evictable, and not moved.
    assert _decide(0, 2, 3, source=0, is_idle=True) is Admission.WAIT


def test_a_move_does_not_stand_in_for_pages():
    free = _slots(1, pages=4)
    args = (free, _slots(1, pages=2), _slots(1), _slots(2, pages=7))
    assert int(ADMIT(*args, True)) == Admission.WAIT
    args = (free, _slots(1, pages=2), _slots(1), _slots(2, pages=6))
    assert int(ADMIT(*args, True)) == Admission.MOVE


@pytest.mark.parametrize("component", [0, 1, 2])
def test_every_pool_must_cover(component):
    enough = np.array([4, 4, 4], np.int32)
    none = np.zeros(3, np.int32)
    short = enough.copy()
    short[component] += 1
    assert int(ADMIT(enough, none, none, enough, False)) == Admission.ADMIT
    assert int(ADMIT(enough, none, none, short, False)) == Admission.WAIT


def test_pages_that_the_hit_will_lock_are_no_room_for_new_ones():
    free, evictable = _slots(0, pages=2), _slots(0, pages=5)
    hit = _slots(0, pages=3)
    assert int(ADMIT(free, evictable, hit, _slots(0, pages=4), False)) == 1
    assert int(ADMIT(free, evictable, hit, _slots(0, pages=5), False)) == 0


def test_what_is_counted_evictable_can_be_evicted():
    """A snapshot under a FULL lock alone can go; one that is locked itself cannot.

    The peer counts every snapshot of a node, and frees none where FULL is locked:
    it admits a request and then has no slot for it.
    """
    value = jnp.array([NULL, 5, 6, 7, NULL], jnp.int32)
    lock_ref = jnp.array([0, 0, 1, 0, 3], jnp.int32)
    assert int(admission.count_evictable(value, lock_ref)) == 2
    assert admission.count_evictable(value[None], lock_ref[None]).shape == (1,)


def test_a_source_that_is_locked_already_is_not_taken_off_twice():
    value = jnp.array([NULL, 5], jnp.int32)
    is_anchor = jnp.array([False, True])
    for locks, wanted in [(0, 1), (1, 0)]:
        lock_ref = jnp.array([0, locks], jnp.int32)
        assert int(admission.about_to_lock(value, lock_ref, is_anchor)) == wanted
    assert int(admission.about_to_lock(value, jnp.zeros(2, int), ~is_anchor)) == 0


@pytest.mark.parametrize(("owned", "wanted"), [(0, 3), (1, 2), (3, 0), (4, 0)])
def test_a_continuing_request_asks_only_for_what_it_lacks(owned, wanted):
    """The peer counts the slots of a request in mid-prefill as demand again."""
    assert int(admission.slot_demand(3, owned)) == wanted


def test_requests_are_admitted_in_order_and_the_first_that_waits_holds_the_rest():
    none = np.zeros((4, 3), np.int32)
    demand = np.stack([_slots(3), _slots(3), _slots(3), _slots(0)])
    assert IN_ORDER(_slots(2), _slots(5), none, demand).tolist() == [1, 1, 0, 0]
    assert IN_ORDER(_slots(4), _slots(5), none, demand).tolist() == [1, 1, 1, 1]


counts = st.integers(0, 6)
sides = st.lists(counts, min_size=3, max_size=3)


@given(sides, sides, st.lists(sides, min_size=8, max_size=8))
def test_admission_in_order_is_admission_one_by_one(free, evictable, rows):
    free, evictable = np.array(free, np.int32), np.array(evictable, np.int32)
    locking, demand = np.array(rows[:4], np.int32) // 3, np.array(rows[4:], np.int32)
    got = IN_ORDER(free, evictable, locking, demand)
    room = free + evictable
    wanted = []
    for lock, want in zip(locking, demand, strict=True):
        ok = all(wanted) and bool((room - lock >= want).all())
        wanted.append(ok)
        room = room - lock - want if ok else room
    assert got.tolist() == wanted


@given(sides, sides, sides, st.booleans())
def test_an_idle_rank_never_waits_for_slots_that_it_has(
    free, evictable, demand, has_source
):
    """With nothing running all slots are free or evictable: no wait without reason."""
    evictable[2] = max(evictable[2], int(has_source))
    locking = [0, 0, int(has_source)]
    room = np.array(free) + np.array(evictable)
    got = int(
        ADMIT(
            *(np.array(x, np.int32) for x in (free, evictable, locking, demand)), True
        )
    )
    assert (got != Admission.WAIT) == bool((room >= np.array(demand)).all())
