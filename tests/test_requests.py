"""A request from its match to its end: what it publishes, shares, keeps and frees.

The harness checks after every step that no entry of a pool is lost, that locks are
those of the running requests, and that each state is that of its very tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import request_programs as programs
from harness import canonical, numpy, same
from request_harness import FULL, RECURRENT, SWA, RequestHarness
from request_machine import requests_of

import uhrc_fn as u
from uhrc_fn import MatchPrefixParams, Status
from uhrc_fn.state import Ring
from uhrc_fn.tree_arrays import NULL

TOKENS = np.arange(1, 25, dtype=np.int32)
OTHERS = TOKENS + 100
THIRD = TOKENS + 200


def started(h: RequestHarness, tokens=TOKENS, written: int = 0, prompt: int = 24):
    """A request that has written so many tokens, chunk by chunk."""
    room = h.config.max_prefix_pages * h.config.page_size
    return h.start(tokens[:room], written, prompt)


def served(h: RequestHarness, tokens=TOKENS, written: int = 8) -> None:
    """A request that came, wrote and finished."""
    h.finish(started(h, tokens, written))


# Finish.


def test_a_finish_publishes_the_tokens_that_are_written_and_no_more():
    """It fails if finish publishes the last, sampled token: its KV is not there."""
    h = requests_of(RECURRENT, 1)
    request = started(h, written=3, prompt=3)
    for _ in range(2):  # three tokens of output, the last of them only sampled
        assert h.extend(request, 1)
    result = h.finish(request)
    assert int(result.inserted_len) == 3 + 3 - 1 and result.recurrent_committed
    assert h.hit(TOKENS[:6]) == 5


def test_a_finish_publishes_whole_pages_of_what_is_written():
    """It fails if a page counts as written because it has a token."""
    h = requests_of(FULL, 4)
    result = h.finish(started(h, written=11))
    assert int(result.inserted_len) == h.hit(TOKENS) == 8
    assert h.free(FULL) == h.config.num_pages - 2


def test_a_finish_with_track_slots_publishes_up_to_its_snapshot():
    """It fails if pages past the snapshot go in, or a track slot is lost."""
    h = requests_of(RECURRENT, 4)
    result = h.finish(started(h, written=14))
    assert int(result.inserted_len) == 8 and result.recurrent_committed
    assert (h.in_tree(FULL), h.in_tree(RECURRENT)) == (2, 1)
    assert h.free(RECURRENT) == h.config.num_recurrent_slots - 1


def test_a_finish_before_the_first_snapshot_publishes_nothing():
    """It fails if a prefix goes in that no later request could resume from."""
    h = requests_of(RECURRENT, 4)
    result = h.finish(started(h, written=7))
    assert int(result.inserted_len) == h.in_tree(FULL) == 0


# Duplicates.


@pytest.mark.parametrize(("component", "size"), [(FULL, 4), (SWA, 4), (RECURRENT, 1)])
def test_a_duplicate_finish_frees_its_copies(component, size):
    """It fails if the copies are kept, or the tree's own pages freed."""
    h = requests_of(component, size)
    first, second = (started(h, written=2 * size) for _ in range(2))
    h.finish(first)
    before = canonical(h.cache)["value"]
    result = h.finish(second)
    assert canonical(h.cache)["value"] == before
    assert result.duplicate()[:2, FULL].all() and not result.adopted().any()
    for kind in h.config.components:
        held = 1 if kind == RECURRENT else 2
        assert h.in_tree(kind) == held
        assert h.free(kind) == h.config.capacities[kind] - held


@pytest.mark.parametrize("component", [FULL, SWA])
def test_a_duplicate_that_runs_on_points_at_the_trees_pages(component):
    """It fails if its table keeps the copies that were freed."""
    h = requests_of(component, 4)
    first, second = (started(h, written=9) for _ in range(2))
    h.publish(first)
    old = h.table(second)
    h.publish(second)
    assert h.table(second)[:2] == h.table(first)[:2]
    assert h.table(second)[2] == old[2]
    assert h.free(component) == h.config.capacities[component] - 2 - 2
    assert h.extend(second, 3)


def test_a_duplicate_snapshot_of_a_running_request_is_freed():
    """It fails if the slot that the tree did not take has no owner any more."""
    h = requests_of(RECURRENT, 4)
    first, second = (started(h, written=8) for _ in range(2))
    assert h.publish(first).recurrent_committed
    result = h.publish(second)
    assert result.recurrent_exist and not result.recurrent_committed
    assert h.free(RECURRENT) == h.config.num_recurrent_slots - 3 - 3 - 1


# The tail.


@pytest.mark.parametrize("component", [FULL, SWA])
def test_the_unaligned_tail_stays_while_it_runs_and_is_freed_once(component):
    """It fails if publishing frees or adopts the page that is not full."""
    h = requests_of(component, 4)
    request = started(h, written=6)
    tail = h.table(request)[1]
    h.publish(request)
    h.publish(request)
    assert h.table(request)[1] == tail
    assert h.free(component) == h.config.capacities[component] - 2
    h.finish(request)  # a second free would be DOUBLE_FREE
    assert h.free(component) == h.config.capacities[component] - 1


# Abort and retract.


@pytest.mark.parametrize(("component", "size"), [(FULL, 4), (SWA, 4), (RECURRENT, 4)])
def test_an_abort_publishes_nothing_and_leaves_what_was_published(component, size):
    """It fails if an abort inserts, or takes back what another may share."""
    h = requests_of(component, size)
    request = started(h, written=8)
    h.publish(request)
    assert h.extend(request, 6)
    h.abort(request)
    assert h.in_tree(FULL) == 2 and h.hit(TOKENS) == 8
    assert h.free(FULL) == h.config.num_pages - 2
    assert not h.cache.protected.any()


def test_a_retracted_request_matches_anew_what_it_had_published():
    """It fails if a retract loses the published prefix, or resumes past it."""
    h = requests_of(RECURRENT, 4)
    request = started(h, written=8)
    h.publish(request)
    assert h.extend(request, 6)
    h.abort(request)
    again = h.admit(request.tokens, 14)
    assert again.hit == again.written == 8
    assert h.extend(again, 6)


# The lock.


@pytest.mark.parametrize("component", [FULL, SWA])
def test_the_lock_moves_from_the_old_anchor_to_the_new(component):
    """It fails if the old lock stays, or what is published is not locked."""
    h = requests_of(component, 4)
    request = started(h, written=4)
    serials = [int(request.receipt.serial)]
    for shared in (1, 3):
        assert h.extend(request, 4 * shared - request.written) if shared > 1 else True
        h.publish(request)
        lock = np.asarray(h.cache.tree.lock_ref)[FULL]
        assert lock.sum() == shared and lock.max() == 1
        serials.append(int(request.receipt.serial))
    assert len(set(serials)) == 3 and 0 not in serials
    # SWA locks the window alone: two pages.
    assert h.cache.protected[SWA] == (2 if component == SWA else 0)
    assert h.evict(pages=9)[0] == 0
    h.finish(request)
    assert not np.any(h.cache.tree.lock_ref)


def test_every_receipt_may_be_in_use_while_locks_move():
    """It fails if a lock is taken before the old one is given back."""
    h = requests_of(FULL, 4)
    requests = [started(h, TOKENS + 100 * k, written=4) for k in range(4)]
    assert h.config.max_live_receipts == len(requests)
    for request in requests:
        h.publish(request)
    assert h.cache.protected[FULL] == 4


def test_a_request_that_has_nothing_to_publish_keeps_its_lock():
    """It fails if the lock moves to the root, and the prefix can be evicted."""
    h = requests_of(RECURRENT, 4)
    served(h, written=8)
    request = started(h, written=10)
    assert request.hit == 8
    h.publish(request)
    assert h.cache.protected[FULL] == 2
    assert h.evict(pages=9)[0] == 0


# A slot for a slot.


def test_without_a_slot_in_exchange_a_running_request_tries_again_later():
    """It fails if the snapshot is given away for nothing, or forgotten."""
    h = requests_of(RECURRENT, 4)
    request = started(h, written=8)
    h.set_slots_aside(h.config.num_recurrent_slots - 3)
    before = numpy(h.tables)
    h.publish(request)
    assert same(before, numpy(h.tables)) and h.in_tree(FULL) == 0
    assert request.snapshot == 8
    h.cache = programs.free_slots(h.cache, np.array([h.set_aside.pop()], np.int32))
    assert h.extend(request, 3)
    assert h.publish(request).recurrent_committed
    assert h.in_tree(FULL) == 2 and h.free(RECURRENT) == 0


def test_the_slot_in_exchange_may_be_evicted():
    """It fails if only free slots can stand in."""
    h = requests_of(RECURRENT, 4)
    served(h, OTHERS)
    request = started(h, written=8)
    h.set_slots_aside(h.config.num_recurrent_slots - 3 - 1)
    assert h.free(RECURRENT) == 0
    assert h.publish(request).recurrent_committed
    assert h.in_tree(RECURRENT) == 1 and h.hit(OTHERS) == 0 and h.hit(TOKENS) == 8


# Clones.


def clone_fails(h: RequestHarness, match, trouble: Status) -> None:
    """A clone that is refused leaves everything as it was."""
    before, states = canonical(h.cache), numpy(h.states)
    assert h.admit(TOKENS[:6], 6, match=match, trouble=trouble) is None
    after = canonical(h.cache)
    # A serial may be used up; what is locked, owned and free is as before.
    for name in ("NEXT_SERIAL", "ledger"):
        del before[name], after[name]
    assert {k: v for k, v in after.items() if v != before[k]} == {}
    assert same(states, numpy(h.states))
    assert not np.any(h.cache.tree.lock_ref)


def test_a_clone_of_a_snapshot_that_is_gone_is_refused():
    """It fails if a slot is copied that may be another's by now."""
    h = requests_of(RECURRENT, 1)
    served(h, written=5)
    match = h.match(TOKENS[:6])
    assert h.evict(slots=9)[2] == 1
    clone_fails(h, match, Status.STALE_MATCH)


def test_a_clone_by_a_stale_match_is_refused():
    """It fails if the node's generation is not asked."""
    h = requests_of(RECURRENT, 1)
    served(h, written=5)
    match = h.match(TOKENS[:6])
    h.evict(pages=9)
    clone_fails(h, match, Status.STALE_MATCH)


def test_a_clone_without_a_slot_is_refused():
    """It fails if its own source is evicted for it, or a lock is left."""
    h = requests_of(RECURRENT, 1)
    served(h, written=5)
    match = h.match(TOKENS[:6])
    h.set_slots_aside(h.free(RECURRENT))
    assert h.cache.evictable[RECURRENT] == 1
    clone_fails(h, match, Status.SLOTS_EXHAUSTED)


def test_a_clone_evicts_another_snapshot_for_its_slot():
    """It fails if the source goes, though it was used last."""
    h = requests_of(RECURRENT, 1)
    served(h, TOKENS, written=5)
    served(h, OTHERS, written=5)
    match = h.match(TOKENS[:6])
    h.set_slots_aside(h.free(RECURRENT))
    request = h.admit(TOKENS[:6], 6, match=match)
    assert request.hit == 5
    assert h.in_tree(RECURRENT) == 1 and h.hit(OTHERS) == 0


def test_after_the_clone_its_source_can_be_evicted_and_full_stays():
    """It fails if the clone's REC lock stays, or its FULL lock goes."""
    h = requests_of(RECURRENT, 1)
    served(h, written=5)
    request = h.admit(TOKENS[:6], 6)
    assert request.hit == 5 and h.cache.protected.tolist() == [5, 0, 0]
    assert h.evict(slots=9)[2] == 1
    assert h.evict(pages=9)[0] == 0
    # It runs on from its own copy, which the check compares with its tokens.
    assert h.extend(request, 1)
    assert h.finish(request).recurrent_committed


# Everything that a request needs, or nothing.


def refused(h: RequestHarness, trouble: Status, **wanted) -> None:
    before = canonical(h.cache)
    assert not h.allocate(**wanted).ok
    after = canonical(h.cache)
    assert (before.pop("STATUS"), after.pop("STATUS")) == (0, int(trouble))
    assert after == before


def test_a_request_gets_all_or_none_where_pages_are_short():
    h = requests_of(SWA, 4)
    served(h, THIRD, written=8)
    for tokens in (TOKENS, OTHERS):
        h.slide(started(h, tokens, written=20))
    assert (h.room(FULL), h.room(SWA)) == (4, 3)
    refused(h, Status.PAGES_EXHAUSTED, pages=5, swa_pages=1)


def test_a_request_gets_all_or_none_where_swa_pages_are_short():
    h = requests_of(SWA, 4)
    served(h, THIRD, written=8)
    started(h, written=16)
    assert (h.room(FULL), h.room(SWA)) == (10, 5)
    refused(h, Status.SWA_PAGES_EXHAUSTED, pages=6, swa_pages=6)


def test_a_request_gets_all_or_none_where_slots_are_short():
    h = requests_of(RECURRENT, 4)
    served(h, THIRD, written=8)
    h.set_slots_aside(h.config.num_recurrent_slots - 1)
    served_pages = h.in_tree(FULL)
    refused(h, Status.SLOTS_EXHAUSTED, pages=6, slots=2)
    assert h.in_tree(FULL) == served_pages == 2


def test_everything_that_is_short_is_named():
    h = requests_of(SWA, 4)
    served(h, THIRD, written=8)
    for tokens in (TOKENS, OTHERS):
        h.slide(started(h, tokens, written=20))
    trouble = Status.PAGES_EXHAUSTED | Status.SWA_PAGES_EXHAUSTED
    refused(h, trouble, pages=5, swa_pages=4)


# SWA pages that slid out of the window.


def test_a_page_that_the_tree_let_go_is_not_offered_again():
    """It fails if a table's old ids are offered: here they are another request's."""
    h = requests_of(SWA, 4)
    first = started(h, written=20)
    h.publish(first)
    assert h.evict(swa_pages=3)[1] == 12
    second = started(h, OTHERS, written=24)
    shared = set(np.asarray(h.tables.swa_pages)[first.row].tolist())
    assert shared & set(np.asarray(h.tables.swa_pages)[second.row].tolist()) - {0}
    h.finish(first)
    h.finish(second)


# Padded lanes.


@pytest.mark.parametrize(("component", "size"), [(FULL, 4), (SWA, 4), (RECURRENT, 4)])
def test_a_padded_lane_changes_nothing(component, size):
    """It fails if row 0 frees, inserts or takes a row of the ledger."""
    h = requests_of(component, size)
    request = started(h, written=8)
    nothing = jax.tree.map(jnp.zeros_like, request.receipt)
    nothing = u.IncLockRefResult(path=nothing.path + NULL, scalars=nothing.scalars)
    row, key = np.int32(0), h.key(OTHERS)
    tables = numpy(h.tables)
    for _ in range(2):
        h.cache, h.tables, published = programs.cache_unfinished_req(
            h.cache, h.tables, row, key, nothing
        )
        assert int(published.receipt.serial) == 0
        h.check()
    h.cache, h.tables, _ = programs.cache_finished_req(
        h.cache, h.tables, row, key, nothing
    )
    h.check()
    h.cache, h.tables = programs.abort_req(h.cache, h.tables, row, nothing)
    h.check()
    assert same(tables, numpy(h.tables)) and h.in_tree(FULL) == 0
    assert int(h.cache.counters[11 + Ring.LEDGER]) == h.config.max_live_receipts - 1


# What a clone is told: the reference's copy-on-write metadata.


def sources(h: RequestHarness, prompts):
    keys = u.stack_keys(h.key(tokens) for tokens in prompts)
    params = MatchPrefixParams(key=keys, cow_recurrent=True)
    _, match = u.match_prefix_batch(h.cache, params)
    slots = match.cow_src_slot
    assert slots.dtype == jnp.int32 and slots.shape == (len(prompts),)
    return slots


def test_cow_sources_are_always_an_int32_array_with_0_for_none():
    """The reference's rows all_zero, mixed and all_nonzero."""
    h = requests_of(RECURRENT, 1)
    served(h, TOKENS, written=5)
    first, second = TOKENS[:6], OTHERS[:6]
    (slot,) = set(np.asarray(h.cache.tree.value)[RECURRENT].tolist()) - {NULL}
    assert sources(h, [second, THIRD[:6]]).tolist() == [0, 0]
    assert sources(h, [second, first]).tolist() == [0, slot]
    assert sources(h, [first, first]).tolist() == [slot, slot]


@pytest.mark.parametrize("lanes", [0, 2])
def test_sources_of_0_and_no_lanes_at_all_copy_nothing(lanes):
    """The reference's rows all_zero and empty, at the copy."""
    h = requests_of(RECURRENT, 1)
    served(h, written=5)
    zeros = jnp.zeros((lanes,), jnp.int32)
    copied = h.states.copy_slots(zeros, zeros + 3)
    assert same(numpy(h.states), numpy(copied))


def test_a_running_request_asks_full_alone_and_a_new_one_all_components():
    """The reference's rows full_only_no_clone and clones_and_matches_all_components."""
    h = requests_of(RECURRENT, 1)
    request = started(h, written=3)
    h.publish(request)
    lock = numpy(h.cache).tree.lock_ref
    assert lock[FULL].sum() == 3 and not lock[RECURRENT].any()
    # The prefix has no snapshot: a new request cannot resume from it.
    assert h.admit(TOKENS[:6], 6).hit == 0
    h.finish(request)
    assert h.admit(TOKENS[:6], 6).hit == 3
