"""`cow_move`: where no slot will ever come free, a request takes the snapshot's own."""

import numpy as np
import pytest
import request_programs as programs
from harness import numpy, same
from request_harness import RECURRENT, RequestHarness

from uhrc_fn import CacheConfig, Status
from uhrc_fn.pools.admission import Admission, admit

ONE_SLOT = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=1,
    num_pages=14,
    num_recurrent_slots=1,
    max_prefix_pages=6,
    max_live_receipts=4,
)
PROMPT = [1, 2, 3, 4]


@pytest.fixture
def cache() -> RequestHarness:
    """One slot, and the tree has it: a snapshot after three tokens."""
    harness = RequestHarness(ONE_SLOT)
    request = harness.admit(PROMPT, 3)
    assert request is not None and harness.extend(request, 3)
    harness.finish(request)
    assert harness.in_tree(RECURRENT) == 1
    return harness


def decided(harness: RequestHarness, is_idle: bool) -> Admission:
    """What admission says of a request that resumes from the snapshot."""
    pools = harness.cache.num_free, harness.cache.evictable
    return Admission(
        int(admit(*pools, np.array([3, 0, 1]), np.array([1, 0, 1]), is_idle))
    )


def test_the_only_slot_is_moved_where_a_clone_would_wait_for_ever(cache):
    assert decided(cache, is_idle=False) == Admission.WAIT
    assert decided(cache, is_idle=True) == Admission.MOVE
    assert cache.admit(PROMPT, 4) is None  # there is no slot for a clone
    before = numpy(cache.states)
    request = cache.admit(PROMPT, 4, move=True)
    assert request is not None and request.hit == 3
    assert same(before, numpy(cache.states))  # nothing was copied
    assert cache.in_tree(RECURRENT) == 0
    assert int(cache.match(PROMPT).hit_length) == 0  # the tree lost it
    assert cache.extend(request, 1)
    cache.finish(request)
    assert int(cache.match([*PROMPT, 5]).hit_length) == 4  # and has the next one


def test_a_moved_snapshot_comes_back_when_its_request_is_aborted(cache):
    request = cache.admit(PROMPT, 4, move=True)
    cache.abort(request)
    assert int(cache.cache.num_free[RECURRENT]) == 1


def test_a_snapshot_that_somebody_else_has_locked_is_not_moved(cache):
    match = cache.match(PROMPT)
    cache.cache, receipt = programs.inc_lock_ref(cache.cache, match)
    before = cache.cache.protected, cache.cache.num_free
    cache.cache, moved = programs.cow_move(cache.cache, match)
    assert not moved.ok and int(moved.slot) == 0 and int(moved.receipt.serial) == 0
    assert same(numpy(before), numpy((cache.cache.protected, cache.cache.num_free)))
    assert Status(int(cache.cache.status)) == Status.SLOTS_EXHAUSTED
    cache.cache, _ = programs.release_window(cache.cache, receipt)
    cache.cache, moved = programs.cow_move(cache.cache, match)
    assert moved.ok


@pytest.mark.parametrize("gone", ["never there", "evicted"])
def test_a_snapshot_that_is_gone_is_not_moved(cache, gone):
    match = cache.match([7, 8] if gone == "never there" else PROMPT)
    if gone == "evicted":
        cache.evict(0, 0, 1)
    cache.cache, moved = programs.cow_move(cache.cache, match)
    assert not moved.ok and int(moved.slot) == 0
    assert Status(int(cache.cache.status)) == Status.STALE_MATCH
    assert int(cache.cache.protected[0]) == 0  # nor is anything left locked
