"""Request tables: rows, mappings and roles, and that they account for every slot.

The free lists here are Python lists: in the package they live in `CacheState`.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from uhrc_fn.pools.req_to_token import (
    RequestConfig,
    init_hybrid_req_to_token_pool,
    init_req_to_token_pool,
)
from uhrc_fn.pools.tracking import (
    advance_tracks,
    kept_slot,
    kept_track,
    no_donation,
    plan_donation,
    settle_finished,
    settle_live,
)

NUM_REQUESTS, PAGE = 4, 4
INTERVAL = 8


def ints(*values):
    return jnp.asarray(values, jnp.int32)


def config(tracks: int = 0, **more) -> RequestConfig:
    return RequestConfig(
        num_requests=NUM_REQUESTS,
        max_pages=6,
        page_size=PAGE,
        num_track_slots=tracks,
        **more,
    )


def hybrid(tracks: int = 0):
    return init_hybrid_req_to_token_pool(config(tracks))


def table(rows):
    return np.asarray(rows).tolist()


# Pages.


def test_runs_of_pages_are_written_where_they_start():
    pool = init_req_to_token_pool(config(has_swa=True))
    pool = pool.write_pages(
        ints(2, 0, 4), ints(0, 0, 2), ints([7, 8, 0], [9, 9, 9], [3, 1, 5])
    )
    assert table(pool.pages[2]) == [7, 8, 0, 0, 0, 0]
    assert table(pool.pages[4]) == [0, 0, 3, 1, 5, 0]
    assert not np.any(pool.pages[ints(0, 1, 3)]) and not np.any(pool.swa_pages)
    pool = pool.write_pages(ints(2), ints(0), ints([7, 8]), ints([0, 6]))
    assert table(pool.swa_pages[2]) == [0, 6, 0, 0, 0, 0]


def test_what_lies_beyond_the_table_is_dropped():
    pool = init_req_to_token_pool(config())
    pool = pool.write_pages(ints(1, 9), ints(5, 0), ints([2, 3], [4, 5]))
    assert table(pool.pages[1]) == [0, 0, 0, 0, 0, 2]
    assert np.sum(np.asarray(pool.pages)) == 2


def test_a_location_is_that_of_the_page_or_none():
    pool = init_req_to_token_pool(config(has_swa=True))
    pool = pool.write_pages(ints(3), ints(0), ints([5, 2]), ints([0, 4]))
    rows, positions = ints(3, 3, 3, 3, 0), ints(0, 3, 6, 8, 0)
    assert table(pool.locations(rows, positions)) == [20, 23, 10, 0, 0]
    assert table(pool.locations(rows, positions, swa=True)) == [0, 0, 18, 0, 0]
    assert table(pool.locations(ints(3), ints(24))) == [0]


def test_requests_own_what_is_not_the_trees():
    pool = init_req_to_token_pool(config(has_swa=True))
    pool = pool.write_pages(ints(1), ints(0), ints([5, 2, 6]), ints([0, 4, 3]))
    pool = pool.set_lengths(ints(1, 0), ints(11, 9), ints(8, 9))
    owned = pool.owned()
    assert table(owned.pages[1]) == [0, 0, 6, 0, 0, 0]
    assert table(owned.swa_pages[1]) == [0, 0, 3, 0, 0, 0]
    assert owned.slots.size == 0 and table(pool.length) == [0, 11, 0, 0, 0]
    cleared = pool.clear_rows(ints(1, 0))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(cleared))


# Slots: rows and mappings.


def test_assigning_updates_the_mapping():
    pool, taken = hybrid().assign_slots(
        ints(1, 3), ints(5, 6), jnp.zeros((2, 0), jnp.int32)
    )
    assert table(taken) == [True, True]
    assert table(pool.running_slots(ints(1, 2, 3))) == [5, 0, 6]


def test_a_row_without_a_slot_reads_zero():
    pool, _ = hybrid(2).assign_slots(ints(1), ints(5), ints([6, 7]))
    assert table(pool.running_slots(ints(2, 0, 9))) == [0, 0, 0]
    assert not np.any(pool.tracks(ints(2)).slots)


def test_a_request_with_slots_keeps_them():
    pool, _ = hybrid(2).assign_slots(ints(2), ints(5), ints([6, 7]))
    again, taken = pool.assign_slots(ints(2, 3), ints(8, 9), ints([1, 2], [3, 4]))
    assert table(taken) == [False, True]
    assert table(again.running_slots(ints(2, 3))) == [5, 9]
    assert table(again.tracks(ints(2, 3)).slots) == [[6, 7], [3, 4]]


def test_no_slot_is_not_assigned():
    pool, taken = hybrid(2).assign_slots(ints(1, 0), ints(0, 5), ints([6, 7], [8, 9]))
    assert table(taken) == [False, False]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(pool))


def test_release_returns_both_and_clears_the_mapping():
    pool, _ = hybrid(2).assign_slots(ints(1, 2), ints(5, 8), ints([6, 7], [9, 3]))
    pool, freed = pool.release_slots(ints(1))
    assert table(freed) == [[5, 6, 7]]
    assert table(pool.running_slots(ints(1, 2))) == [0, 8]
    assert table(pool.tracks(ints(1)).slots) == [[0, 0]]
    _, freed = pool.release_slots(ints(1))
    assert table(freed) == [[0, 0, 0]]


def test_without_the_extra_buffer_there_is_only_a_running_slot():
    pool, _ = hybrid().assign_slots(ints(1), ints(5), jnp.zeros((1, 0), jnp.int32))
    assert pool.tracks(ints(1)).slots.shape == (1, 0)
    assert table(pool.release_slots(ints(1))[1]) == [[5]]
    assert table(pool.owned().slots) == [[0], [5], [0], [0], [0]]


def test_fresh_track_slots_are_distinct_and_unwritten():
    pool, _ = hybrid(2).assign_slots(ints(1), ints(1), ints([2, 3]))
    tracks = pool.tracks(ints(1))
    assert table(tracks.slots) == [[2, 3]]
    assert table(tracks.next_track) == [0] and table(tracks.last_track_len) == [0]


def test_a_commit_forgets_the_running_slot_without_freeing_it():
    pool, _ = hybrid().assign_slots(
        ints(1, 2), ints(5, 6), jnp.zeros((2, 0), jnp.int32)
    )
    pool = pool.commit_to_tree(ints(1, 2), jnp.asarray([True, False]))
    assert table(pool.running_slots(ints(1, 2))) == [0, 6]
    _, freed = pool.release_slots(ints(1, 2))
    assert table(freed) == [[0], [6]]  # what was donated is skipped


def test_track_slots_change_in_the_table_and_in_what_is_read():
    pool, _ = hybrid(2).assign_slots(ints(1), ints(5), ints([6, 7]))
    tracks = pool.tracks(ints(1))
    pool = pool.put_tracks(ints(1), tracks._replace(slots=ints([6, 0])))
    assert table(pool.track_slots[1]) == [6, 0]
    assert table(pool.tracks(ints(1)).slots) == [[6, 0]]
    assert table(pool.release_slots(ints(1))[1]) == [[5, 6, 0]]


def test_clearing_a_row_empties_everything():
    pool, _ = hybrid(2).assign_slots(ints(1), ints(5), ints([6, 7]))
    pool = pool.write_pages(ints(1), ints(0), ints([3])).set_lengths(
        ints(1), ints(4), ints(0)
    )
    pool = pool.clear_rows(ints(1))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(pool))


def test_ranks_have_tables_of_their_own():
    ranks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), hybrid(2))
    assign = jax.vmap(lambda pool, *args: pool.assign_slots(*args))
    ranks, _ = assign(ranks, ints([1], [1]), ints([1], [4]), ints([[2, 3]], [[5, 6]]))
    read = jax.vmap(lambda pool, rows: pool.running_slots(rows))
    assert table(read(ranks, ints([1, 2], [1, 2]))) == [[1, 0], [4, 0]]
    release = jax.vmap(lambda pool, rows: pool.release_slots(rows))
    ranks, freed = release(ranks, ints([0], [1]))
    assert table(freed) == [[[0, 0, 0]], [[4, 5, 6]]]
    assert table(read(ranks, ints([1], [1]))) == [[1], [0]]


@pytest.mark.parametrize("tracks", [1, 2])
def test_the_kept_slot_is_the_one_that_was_written_last(tracks):
    pool, _ = hybrid(tracks).assign_slots(ints(1), ints(9), ints(range(1, tracks + 1)))
    for length in (8, 16, 24):
        before = pool.tracks(ints(1))
        moved, metadata = advance_tracks(before, ints(length), 8, interval=INTERVAL)
        pool = pool.put_tracks(ints(1), moved)
        assert table(kept_slot(pool.tracks(ints(1)))) == table(metadata.track_index)
        assert table(pool.last_track_len[1]) == length
    assert (table(kept_track(moved)) == table(moved.next_track)) == (tracks == 1)


# Every slot is accounted for.


class Ledger:
    """Slots of one rank: free, the tree's, and those counted from the tables."""

    def __init__(self, num_slots: int, tracks: int):
        self.num_slots = num_slots
        self.free = collections.deque(range(1, num_slots + 1))
        self.tree: set[int] = set()
        self.pool = hybrid(tracks)
        self.tracks = tracks

    def check(self):
        active = [slot for slot in np.ravel(self.pool.owned().slots) if slot]
        held = sorted([*active, *self.tree, *self.free])
        assert held == list(range(1, self.num_slots + 1))

    def alloc(self, row: int) -> bool:
        if len(self.free) < 1 + self.tracks:
            return False
        slots = [self.free.popleft() for _ in range(1 + self.tracks)]
        self.pool, taken = self.pool.assign_slots(
            ints(row), ints(slots[0]), ints(slots[1:])
        )
        assert table(taken) == [True]
        return True

    def reach(self, row: int, length: int):
        moved, _ = advance_tracks(
            self.pool.tracks(ints(row)), ints(length), 8, interval=INTERVAL
        )
        self.pool = self.pool.put_tracks(ints(row), moved)

    def publish(self, row: int, length: int, committed: bool):
        replacement = ints(self.free.popleft() if self.free else 0)
        tracks = self.pool.tracks(ints(row))
        donation = plan_donation(
            tracks, ints(length), PAGE, is_live=True, replacement=replacement
        )
        tracks, freed = settle_live(
            tracks, donation, jnp.asarray([committed]), replacement
        )
        self.pool = self.pool.put_tracks(ints(row), tracks)
        self._settle(donation, committed, freed)

    def finish(self, row: int, length: int, committed: bool, publishes: bool = True):
        rows = ints(row)
        tracks, running = self.pool.tracks(rows), self.pool.running_slots(rows)
        donation = no_donation((1,))
        if publishes:
            donation = plan_donation(tracks, ints(length), PAGE, is_live=False)
        _, freed = settle_finished(tracks, donation, jnp.asarray([committed]), running)
        self.pool = self.pool.clear_rows(rows)
        self._settle(donation, committed, freed)

    def _settle(self, donation, committed, freed):
        if committed and donation.slot[0]:
            self.tree.add(int(donation.slot[0]))
        self.free.extend(int(slot) for slot in np.ravel(freed) if slot)

    def evict(self):
        self.free.append(self.tree.pop())


@pytest.mark.parametrize("tracks", [1, 2])
def test_active_tree_and_free_slots_are_all_slots(tracks):
    ledger = Ledger(9, tracks)
    assert ledger.alloc(1) and ledger.alloc(2)
    ledger.check()
    for length in (8, 16):
        ledger.reach(1, length)
        ledger.publish(1, length, committed=length == 8)
        ledger.check()
    assert len(ledger.tree) == 1
    ledger.evict()
    ledger.check()
    ledger.reach(2, 8)
    ledger.finish(2, 11, committed=True)
    ledger.check()
    ledger.finish(1, 19, committed=True, publishes=False)
    ledger.check()
    assert len(ledger.tree) == 1 and len(ledger.free) == 8


@pytest.mark.parametrize(("tracks", "freed"), [(1, 1), (2, 2)])
def test_a_committed_finish_leaves_one_slot_in_the_tree(tracks, freed):
    ledger = Ledger(1 + tracks, tracks)
    assert ledger.alloc(1) and not ledger.alloc(2)
    ledger.reach(1, 8)
    ledger.finish(1, 8, committed=True)
    assert len(ledger.tree) == 1 and len(ledger.free) == freed
    ledger.check()


def test_a_leaked_track_slot_is_noticed():
    ledger = Ledger(4, 2)
    ledger.alloc(1)
    tracks = ledger.pool.tracks(ints(1))
    ledger.pool = ledger.pool.put_tracks(ints(1), tracks._replace(slots=ints([2, 0])))
    with pytest.raises(AssertionError):
        ledger.check()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(num_requests=0), "num_requests=0; wanted"),
        (dict(page_size=1.0), r"page_size=1\.0"),
        (dict(num_track_slots=True), "num_track_slots=True; wanted"),
        (dict(num_track_slots=3), "num_track_slots=3; wanted 0, 1 or 2"),
    ],
)
def test_bad_settings_are_named(bad, message):
    good = dict(num_requests=2, max_pages=3, page_size=4)
    RequestConfig(**good)
    with pytest.raises(ValueError, match=message):
        RequestConfig(**good | bad)


def test_a_plain_model_has_no_track_slots():
    with pytest.raises(ValueError, match="init_hybrid_req_to_token_pool"):
        init_req_to_token_pool(config(2))
