"""Faults of locks and reference counts that real caches had, replayed over SWA and
RECURRENT; each docstring names the one-line fault that would turn its test red.

B04, B05, B06, B09 and B10, which need FULL alone, stand in `test_scenarios.py`.
"""

import itertools

import numpy as np
import pytest
from harness import EVERYTHING
from harness_hybrid import FULL, RECURRENT, SWA, HybridHarness
from request_machine import requests_of
from scenario_caches import (
    SNAPSHOTS,
    WINDOW,
    a,
    b,
)

from uhrc_fn.tree_arrays import NULL


def window(tokens) -> set[tuple]:
    """The boundaries that a lock at the end of `tokens` holds for its window."""
    size = WINDOW.sliding_window_size
    return {tuple(tokens[: len(tokens) - i]) for i in range(size)}


def test_B02_branches_inside_a_locked_window_leave_no_count():
    """Fault: a page that is locked already is not counted again, so that the release
    of one window takes the lock of another, and in the end falls below zero.

    A split has no counterpart: a branch is one more child of a page, and the window
    of a lock is a range of positions, which no branch moves.
    """
    cache = HybridHarness(WINDOW)
    prompts = [a(0, 12), a(0, 9) + b(0, 3), a(0, 10) + b(3, 6)]
    for order in itertools.permutations(range(3)):
        cache.publish(prompts[0])
        live = {0: cache.lock(cache.match(prompts[0]))}
        for i in (1, 2):  # they part from the chain inside the locked window
            cache.publish(prompts[i])
            live[i] = cache.lock(cache.match(prompts[i]))
        for i in order:
            held = set[tuple]().union(*(window(prompts[k]) for k in live))
            assert cache.num_protected(SWA) == len(held)
            cache.unlock(live.pop(i))
        assert not np.any(cache.cache.tree.lock_ref)
        assert (cache.num_protected(FULL), cache.num_protected(SWA)) == (0, 0)
    assert cache.evict_all_of(full=18) == (18, 18, 0)


def test_B03_a_window_recovered_under_a_lock_belongs_to_both_holders():
    """Fault: a lock skips the tombstones of its window, and its release then takes
    the lock of who came after the values were back.

    The anchor comes from a `full_only` match: with a tombstone in the window no other
    reaches it. Of a[0:12) the window a[8:12) stays protected, the 8 before it go.
    """
    cache = HybridHarness(WINDOW)
    cache.publish(a(0, 12))
    assert cache.evict_all_of(swa=12) == (0, 12, 0)
    match = cache.match(a(0, 12), full_only=True)
    assert match.hit_length == 12 and cache.hit(a(0, 12)) == 0
    first = cache.lock(match)
    assert (cache.num_protected(FULL), cache.num_protected(SWA)) == (12, 0)

    pages, swa_pages = cache.take(FULL, 12), cache.take(SWA, 12)
    result = cache.insert(a(0, 12), pages, swa=swa_pages)
    assert result.adopted()[:12, SWA].all()
    cache.free_of(FULL, pages)
    assert (cache.num_evictable(SWA), cache.num_protected(SWA)) == (8, 4)
    second = cache.lock(cache.match(a(0, 12)))
    cache.unlock(first)
    assert cache.evict_all_of(swa=EVERYTHING) == (0, 8, 0)
    assert cache.hit(a(0, 12)) == 12
    assert (cache.num_evictable(SWA), cache.num_protected(SWA)) == (0, 4)
    cache.unlock(second)
    assert (cache.num_evictable(SWA), cache.num_protected(SWA)) == (4, 0)
    assert cache.evict_all_of(swa=EVERYTHING) == (0, 4, 0)


ORDERS = {"full first": ("full", "own"), "full last": ("own", "full")}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("component", [SWA, RECURRENT])
def test_B07_eviction_takes_what_an_early_release_gave_and_no_more(component, order):
    """Fault: an early release keeps the lock of RECURRENT, or gives FULL's back too.

    Two components at a time, see the case of three below: after the release eviction
    frees SWA 8 or RECURRENT 1, and FULL 0 whoever goes first.
    """
    cache = HybridHarness(WINDOW if component == SWA else SNAPSHOTS)
    cache.publish(a(0, 8))
    receipt = cache.lock(cache.match(a(0, 8)))
    before, after = (4, 8) if component == SWA else (1, 1)
    assert cache.num_protected(component) == before
    receipt = cache.release_window(receipt)
    assert (cache.num_protected(FULL), cache.num_protected(component)) == (8, 0)
    own = "swa" if component == SWA else "recurrent"
    nothing, wanted = (0, 0, 0), [0, 0, 0]
    wanted[component] = after
    for name in order:
        phase = own if name == "own" else name
        freed = cache.evict_all_of(**{phase: EVERYTHING})
        assert freed == (tuple(wanted) if name == "own" else nothing)
    assert cache.match(a(0, 8), full_only=True).hit_length == 8
    cache.unlock(receipt)
    assert cache.evict_all_of(full=EVERYTHING) == (8, 0, 0)
    assert cache.take_status() == 0


@pytest.mark.skip(reason="(FULL, SWA, RECURRENT) in one tree: refused by CacheConfig")
def test_B07_eviction_of_a_window_spares_a_locked_snapshot():
    """Fault: an SWA victim takes the RECURRENT value of its node, locked or not.

    Missing: three components in one tree. No set that is allowed has a component
    below SWA, so no SWA eviction takes anything along.
    """


def test_B08_the_slot_of_a_clone_comes_back_when_admission_fails():
    """Fault: an abort frees the pages of a request and forgets its running slot.

    Other users hold all slots but two: a snapshot's and the one for its clone.
    """
    h = requests_of(RECURRENT, 1)
    h.finish(h.start(a(0, 6), written=5))
    h.start(b(0, 6), written=6)
    h.start(b(6, 12), written=3)
    h.set_slots_aside(2)
    assert (h.free(RECURRENT), h.in_tree(RECURRENT), h.free(FULL)) == (1, 1, 0)
    for _ in range(2):  # a leak of one would leave nothing for the second
        request = h.admit(a(0, 6), 6)
        assert request is not None and request.hit == 5
        assert h.free(RECURRENT) == 0
        assert not h.extend(request, 1)
        h.abort(request)
        assert (h.free(RECURRENT), h.in_tree(RECURRENT)) == (1, 1)
    assert h.hit(a(0, 6)) == 5
    held = np.asarray(h.cache.tree.value)[RECURRENT]
    assert np.count_nonzero(held != NULL) == 1
