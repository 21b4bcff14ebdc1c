"""Track slots: what a forward is told, and who owns which slot after a donation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uhrc_fn.pools import tracking
from uhrc_fn.pools.tracking import Outcome, TrackMetadata, TrackSlots

INTERVAL = PAGE = 128
RUNNING = 9

ADVANCE = jax.jit(tracking.advance_tracks, static_argnames="interval")
PLAN = jax.jit(tracking.plan_donation, static_argnames="page_size")
WANTS = jax.jit(tracking.wants_replacement, static_argnames="page_size")
SETTLE_LIVE = jax.jit(tracking.settle_live)
SETTLE_FINISHED = jax.jit(tracking.settle_finished)


def _tracks(next_track=0, length=0, slots=(5, 6)):
    return TrackSlots(*(jnp.array(x, jnp.int32) for x in (slots, next_track, length)))


def _plain(tracks):
    return tracks.slots.tolist(), int(tracks.next_track), int(tracks.last_track_len)


def _advance(tracks, length, num_new=1, **more):
    tracks, meta = ADVANCE(tracks, length, num_new, interval=INTERVAL, **more)
    return _plain(tracks), (int(meta.track_index), bool(meta.track_mask))


# Metadata of a forward.


def test_a_prefill_that_ends_on_a_boundary_reads_its_slot_then_turns():
    assert _advance(_tracks(), 256, 128) == (([5, 6], 1, 256), (5, True))
    assert _advance(_tracks(1, 256), 384, 128) == (([5, 6], 0, 384), (6, True))


def test_a_prefill_that_ends_off_a_boundary_changes_nothing():
    assert _advance(_tracks(1, 128), 200, 72) == (([5, 6], 1, 128), (0, False))


def test_a_forward_without_input_never_tracks():
    assert _advance(_tracks(), 128, 0) == (([5, 6], 0, 0), (0, False))
    assert _advance(_tracks(), 0, 0) == (([5, 6], 0, 0), (0, False))


def test_a_decode_step_that_reaches_a_boundary_tracks():
    assert _advance(_tracks(), 127) == (([5, 6], 0, 0), (0, False))
    assert _advance(_tracks(), 128) == (([5, 6], 1, 128), (5, True))


def test_a_cut_at_a_branching_length_tracks():
    got = _advance(_tracks(), 96, 96, branching_length=96)
    assert got == (([5, 6], 1, 96), (5, True))


def test_a_request_without_track_slots_never_tracks():
    assert _advance(_tracks(slots=(0, 0)), 128) == (([0, 0], 0, 0), (0, False))


def test_metadata_are_zero_arrays_where_no_row_is_on_a_boundary():
    tracks = tracking.fresh_tracks(np.array([[5, 6], [7, 8]]))
    _, meta = ADVANCE(tracks, np.array([1, 130]), np.array([1, 1]), interval=INTERVAL)
    assert meta.track_index.dtype == jnp.int32
    assert meta.track_index.tolist() == [0, 0]
    assert meta.track_mask.tolist() == [False, False]


def test_rows_of_a_batch_track_apart_and_padding_stays_zero():
    tracks = tracking.fresh_tracks(np.array([[5, 6], [7, 8], [0, 0]]))
    tracks, meta = ADVANCE(
        tracks, np.array([128, 100, 0]), np.array([128, 100, 0]), interval=INTERVAL
    )
    assert meta.track_index.tolist() == [5, 0, 0]
    assert meta.track_mask.tolist() == [True, False, False]
    assert tracks.next_track.tolist() == [1, 0, 0]
    # The next step speaks of itself alone.
    _, meta = ADVANCE(
        tracks, np.array([129, 128, 0]), np.array([1, 28, 0]), interval=INTERVAL
    )
    assert meta.track_index.tolist() == [0, 7, 0]


def test_with_a_single_track_slot_the_roles_stay():
    assert _advance(_tracks(slots=(5,)), 128) == (([5], 0, 128), (5, True))
    tracks = _tracks(slots=(5,))
    assert int(tracking.kept_track(tracks)) == int(tracks.next_track) == 0


@pytest.mark.parametrize("record", [TrackMetadata(7, 1), TrackSlots(5, 1, 128)])
def test_records_keep_the_order_of_their_fields_through_jit(record):
    leaves, tree = jax.tree.flatten(record)
    assert leaves == list(record)
    back = jax.jit(lambda x: x)(jax.tree.unflatten(tree, leaves))
    assert jax.tree.map(int, back) == record


@pytest.mark.parametrize("empty", [TrackMetadata(None, None), TrackSlots(*[None] * 3)])
def test_empty_records_come_back_empty_from_jit(empty):
    assert jax.jit(lambda x: x)(empty) == empty


def test_metadata_have_one_program_on_and_off_boundaries():
    traces = []

    @jax.jit
    def step(tracks, length):
        traces.append(1)
        return tracking.advance_tracks(tracks, length, 1, interval=INTERVAL)

    tracks = _tracks()
    for length in (127, 128, 129, 256):
        tracks, _ = step(tracks, length)
    assert len(traces) == 1
    assert _plain(tracks) == ([5, 6], 0, 256)


# Donation.


def _donate(tracks, written, is_live, replacement=0):
    got = PLAN(
        tracks, written, page_size=PAGE, is_live=is_live, replacement=replacement
    )
    return got, (int(got.slot), int(got.length), Outcome(int(got.outcome)))


def _finish(tracks, donation, is_committed):
    tracks, freed = SETTLE_FINISHED(tracks, donation, is_committed, RUNNING)
    return _plain(tracks), sorted(freed[freed > 0].tolist())


def _go_on(tracks, donation, is_committed, replacement):
    tracks, freed = SETTLE_LIVE(tracks, donation, is_committed, replacement)
    return _plain(tracks), int(freed)


def test_the_key_is_cut_to_what_the_kept_snapshot_covers():
    tracks = _tracks(1, 256)
    assert int(tracking.kept_slot(tracks)) == 5
    assert _donate(tracks, 300, False)[1] == (5, 256, Outcome.OFFER)


def test_before_the_first_boundary_nothing_is_offered():
    assert _donate(_tracks(), 100, False)[1] == (0, 0, Outcome.NOTHING)
    assert not WANTS(_tracks(), 100, page_size=PAGE)


def test_a_committed_finish_leaves_one_slot_to_the_tree_and_frees_the_rest():
    tracks = _tracks(1, 256)
    donation, _ = _donate(tracks, 300, False)
    assert _finish(tracks, donation, True) == (([0, 0], 0, 0), [6, RUNNING])


def test_a_finish_that_is_not_committed_frees_all_slots():
    tracks = _tracks(1, 256)
    donation, _ = _donate(tracks, 300, False)
    assert _finish(tracks, donation, False) == (([0, 0], 0, 0), [5, 6, RUNNING])


def test_an_aborted_or_retracted_request_frees_all_slots_once():
    tracks = _tracks(1, 256)
    none = tracking.no_donation()
    assert _finish(tracks, none, False) == (([0, 0], 0, 0), [5, 6, RUNNING])
    again, freed = SETTLE_FINISHED(_tracks(slots=(0, 0)), none, False, 0)
    assert not freed.any()
    assert _plain(again) == ([0, 0], 0, 0)


def test_a_live_donation_puts_the_replacement_in_the_kept_slots_place():
    tracks = _tracks(1, 256)
    assert WANTS(tracks, 256, page_size=PAGE)
    donation, plain = _donate(tracks, 256, True, replacement=7)
    assert plain == (5, 256, Outcome.OFFER)
    assert _go_on(tracks, donation, True, 7) == (([7, 6], 1, 0), 0)
    # Its next boundary goes to the other slot, and nothing is published till then.
    after = _tracks(1, 0, (7, 6))
    assert _donate(after, 300, False)[1] == (0, 0, Outcome.NOTHING)
    assert _advance(after, 384, 128) == (([7, 6], 0, 384), (6, True))


def test_a_live_donation_that_is_a_duplicate_frees_the_orphan():
    tracks = _tracks(1, 256)
    donation, _ = _donate(tracks, 256, True, replacement=7)
    assert _go_on(tracks, donation, False, 7) == (([7, 6], 1, 0), 5)


def test_without_a_replacement_a_live_request_skips_and_tries_again():
    tracks = _tracks(1, 256)
    donation, plain = _donate(tracks, 256, True)
    assert plain == (0, 0, Outcome.NO_REPLACEMENT)
    assert _go_on(tracks, donation, False, 0) == (([5, 6], 1, 256), 0)
    assert _donate(tracks, 260, True, replacement=7)[1] == (5, 256, Outcome.OFFER)


def test_a_replacement_that_is_not_used_goes_back():
    donation, _ = _donate(_tracks(), 100, True, replacement=7)
    assert _go_on(_tracks(), donation, False, 7) == (([5, 6], 0, 0), 7)


def test_a_single_track_slot_can_be_given_away_and_replaced():
    tracks = _tracks(0, 256, (5,))
    donation, plain = _donate(tracks, 256, True, replacement=7)
    assert plain == (5, 256, Outcome.OFFER)
    assert _go_on(tracks, donation, True, 7) == (([7], 0, 0), 0)
    assert _go_on(tracks, donation, False, 7) == (([7], 0, 0), 5)
    donation, plain = _donate(tracks, 256, True)
    assert plain == (0, 0, Outcome.NO_REPLACEMENT)
    assert _go_on(tracks, donation, False, 0) == (([5], 0, 256), 0)


def test_a_single_track_slot_is_the_trees_after_a_committed_finish():
    tracks = _tracks(0, 256, (5,))
    donation, _ = _donate(tracks, 256, False)
    assert _finish(tracks, donation, True) == (([0], 0, 0), [RUNNING])
    assert _finish(tracks, donation, False) == (([0], 0, 0), [5, RUNNING])


def test_a_snapshot_ahead_of_the_written_key_is_refused():
    """Defect 1: 383 tokens prefilled, and the decode step to 384 already launched.

    Cutting the key to whole pages of 383 would publish 256 tokens with the state of
    384: later hits would resume 128 tokens ahead.
    """
    tracks = _tracks(1, 384)
    assert not WANTS(tracks, 383, page_size=PAGE)
    for is_live in (True, False):
        donation, plain = _donate(tracks, 383, is_live, replacement=7)
        assert plain == (0, 0, Outcome.LENGTH_MISMATCH)
    assert _go_on(tracks, donation, False, 7) == (([5, 6], 1, 384), 7)
    # As soon as the key is there, the same snapshot is good.
    assert _donate(tracks, 384, True, replacement=7)[1] == (5, 384, Outcome.OFFER)


def test_a_snapshot_that_is_no_whole_page_is_refused():
    assert _donate(_tracks(1, 96), 300, False)[1] == (0, 0, Outcome.LENGTH_MISMATCH)


@given(
    tracks=st.sampled_from([1, 2]),
    steps=st.lists(
        st.tuples(
            st.integers(1, 6),  # tokens of the forward
            st.sampled_from(["none", "publish", "duplicate", "short", "behind"]),
        ),
        max_size=20,
    ),
    is_committed=st.booleans(),
)
def test_slots_are_conserved_and_each_snapshot_has_its_own_length(
    tracks, steps, is_committed
):
    """A model of what each slot holds, through forwards, donations and the end."""
    interval = page = 4
    state = tracking.fresh_tracks(np.arange(1, tracks + 1))
    free = list(range(tracks + 2, 40))
    covers, tree, length = {}, [], 0
    for tokens, event in steps:
        length += min(tokens, interval - length % interval)
        state, meta = ADVANCE(state, length, tokens, interval=interval)
        assert bool(meta.track_mask) == (length % interval == 0)
        if meta.track_mask:
            covers[int(meta.track_index)] = length
        if event == "none":
            continue
        written = length - 1 if event == "behind" else length
        wants = bool(WANTS(state, written, page_size=page))
        new = free.pop(0) if wants and event != "short" else 0
        donation = PLAN(state, written, page_size=page, is_live=True, replacement=new)
        slot = int(donation.slot)
        assert (slot > 0) == (new > 0)
        if slot:
            assert covers[slot] == int(donation.length) <= written
        goes_in = slot > 0 and event == "publish"
        tree += [slot] * goes_in
        state, freed = SETTLE_LIVE(state, donation, goes_in, new)
        free += [int(freed)] * bool(freed)
        owned = [*state.slots.tolist(), tracks + 1]
        assert sorted(owned + tree + free) == list(range(1, 40))
    donation = PLAN(state, length, page_size=page, is_live=False)
    tree += [int(donation.slot)] * (is_committed and int(donation.slot) > 0)
    _, freed = SETTLE_FINISHED(state, donation, is_committed, tracks + 1)
    assert sorted(tree + free + freed[freed > 0].tolist()) == list(range(1, 40))
