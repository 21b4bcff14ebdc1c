"""The functional cache behind the engine's interface."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from engine_workload import Workload, run

from uhrc_fn import CacheConfig, Status, jitted
from uhrc_fn.debug import check_invariants
from uhrc_fn.engine import packed
from uhrc_fn.engine.params import (
    DecLockRefParams,
    EvictParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    RadixKey,
)
from uhrc_fn.engine.request import Request, RequestTable
from uhrc_fn.engine.unified import UnifiedRadixCache

A = list(range(100, 120))
PAGE = 4
BASE_AND_EXTRA = [
    "base",
    pytest.param(("FULL", "RECURRENT"), marks=pytest.mark.slow, id="extra-buffer"),
]


def build(components=("FULL",), dp_size=1, slots=7, **settings) -> UnifiedRadixCache:
    """A cache of pages of four tokens; of one where recurrent state asks for it."""
    size = 1 if components == "base" else PAGE
    sets = {"components": ("FULL", "RECURRENT") if size == 1 else components}
    if "RECURRENT" in sets["components"]:
        sets |= {"num_recurrent_slots": slots}
    if "RECURRENT" in sets["components"] and size > 1:
        sets |= {"enable_recurrent_extra_buffer": True, "recurrent_track_interval": 8}
    if "SWA" in components:
        sets |= {"num_swa_pages": 24, "sliding_window_size": 6}
    config = CacheConfig(page_size=size, num_pages=32, max_prefix_pages=8 * 4, **sets)
    table = RequestTable(4, 128, size, config.has_swa)
    settings = {"min_bucket": 32, **settings}
    return UnifiedRadixCache(table, config, dp_size=dp_size, **settings)


def check(cache, running=()) -> None:
    """Account for every page and slot; then every invariant."""
    cache.raise_if_bad()
    size = cache.page_size
    for rank, state in enumerate(cache.states):
        own = {"pages": [], "swa_pages": [], "slots": []}
        for req in running:
            if req.rank == rank:
                part = slice(req.cache_protected_len, req.kv_allocated_len, size)
                own["pages"].append(cache.requests.full[req.req_pool_idx, part] // size)
                slots = [req.recurrent_pool_idx, *req.recurrent_track_slots]
                own["slots"].append(np.asarray(slots))
                if cache.requests.swa is not None:
                    row = cache.requests.swa[req.req_pool_idx, part]
                    own["swa_pages"].append(row // size)
        check_invariants(state, own)
        mine = [r for r in running if r.rank == rank]
        cache.assert_recurrent_slot_ledger(rank, mine)


def publish(cache, tokens, **tags):
    key = RadixKey(tokens, **tags)
    given = cache.alloc(len(tokens), key.dp_rank)
    result = cache.insert(InsertParams(key, given.full, swa_value=given.swa))
    cut = result.inserted_len
    swa = None if given.swa is None else given.swa[cut:]
    cache.free(given.full[cut:], key.dp_rank, swa)
    return given, result


def match(cache, tokens, **tags):
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens, **tags)))


def test_match_gives_token_locations():
    cache = build()
    given, result = publish(cache, A[:18])
    assert (result.prefix_len, result.inserted_len) == (0, 16)
    found = match(cache, A)
    assert found.device_indices.dtype == np.int32
    assert found.device_indices.tolist() == given.full[:16].tolist()
    assert found.hit_length == found.full_kv_hit_length == 16
    assert found.best_match_node == match(cache, A[:16]).last_device_node
    assert found.best_match_node != match(cache, A[:8]).last_device_node
    assert match(cache, A[:3]).last_device_node == match(cache, []).last_device_node
    # A plain list is a key; of a key longer than the longest, its first pages count.
    assert cache.peek_prefix_len([*A, *range(500)]) == 16
    check(cache)


def test_ranks_and_namespaces_share_nothing():
    cache = build(dp_size=2)
    for tag in ({}, {"extra_key": "a"}, {"cache_salt": "a"}, {"dp_rank": 1}):
        assert publish(cache, A[:8], **tag)[1].prefix_len == 0
    # No rank is rank 0.
    assert cache.peek_prefix_len(RadixKey(A, dp_rank=0)) == 8
    assert (cache.total_size(0), cache.total_size(1)) == (24, 8)
    result = cache.evict(EvictParams(num_tokens=99, dp_rank=1))
    assert result.num_tokens_evicted == 8 and cache.total_size(0) == 24
    with pytest.raises(ValueError, match="wanted 0 to 1"):
        match(cache, A, dp_rank=2)


def test_lock_and_unlock():
    cache = build()
    publish(cache, A)
    node = match(cache, A).last_device_node
    lock = cache.inc_lock_ref(node)
    assert lock.delta == -20
    assert (cache.evictable_size(), cache.protected_size()) == (0, 20)
    assert cache.evict(EvictParams(num_tokens=20)).num_tokens_evicted == 0
    with pytest.raises(ValueError, match="to_dec_params"):
        cache.dec_lock_ref(node)
    assert cache.dec_lock_ref(node, lock.to_dec_params()).delta == 20
    with pytest.raises(RuntimeError, match="STALE_RECEIPT"):
        cache.dec_lock_ref(node, lock.to_dec_params())
    assert cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 8
    with pytest.raises(RuntimeError, match="STALE_MATCH"):
        cache.inc_lock_ref(node)
    # The root holds nothing.
    root = match(cache, []).last_device_node
    assert cache.inc_lock_ref(root).delta == 0
    assert cache.dec_lock_ref(root).delta == 0
    check(cache)


def test_peek_changes_nothing():
    cache = build()
    publish(cache, A)
    before = jax.tree.map(np.array, cache.states[0])
    for tokens in (A, A[:9], [1, 2, 3, 4, 5], []):
        cache.peek_prefix_len(RadixKey(tokens))
    same = jax.tree.map(np.array_equal, before, cache.states[0])
    assert all(jax.tree.leaves(same))


def test_insert_wants_whole_pages_in_order():
    cache = build()
    given = cache.alloc(8).full
    with pytest.raises(ValueError, match="whole pages in order"):
        cache.insert(InsertParams(A[:8], given[::-1]))
    with pytest.raises(ValueError, match="wanted one each"):
        cache.insert(InsertParams(A[:8], given[:7]))
    with pytest.raises(ValueError, match="wanted one each"):
        cache.insert(InsertParams(A[:8]))
    assert cache.insert(InsertParams(A[:8], given)).inserted_len == 8
    # Locations that no request owns stay out, and a status says so.
    assert cache.insert(InsertParams([7] * 4, [100, 101, 102, 103])).inserted_len == 0
    with pytest.raises(RuntimeError, match="NOT_OWNED"):
        cache.raise_if_bad()
    assert cache.take_status() == Status.NOT_OWNED
    check(cache)


def test_alloc_evicts_the_deficit_or_nothing():
    cache = build()
    publish(cache, A)
    saved = []
    cache.hicache_write_back = saved.append  # type: ignore
    assert cache.alloc(33 * PAGE) is None
    assert cache.total_size() == 20 and not saved
    given = cache.alloc(29 * PAGE)
    assert len(given.full) == 29 * PAGE and cache.total_size() == 12
    assert [(p.num_tokens, p.dp_rank) for p in saved] == [(8, 0)]
    cache.free(given.full)
    assert cache.available_size() + cache.total_size() == 32 * PAGE
    check(cache)


def test_disabled_cache():
    cache = build(disable=True)
    assert cache.insert(InsertParams(A, A)).inserted_len == 0
    assert match(cache, A).hit_length == cache.peek_prefix_len(A) == 0
    assert cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted == 0
    req = Request(A)
    assert cache.start_req(req).hit_length == 0
    cache.extend_req(req, 20)
    req.kv_committed_len = 20
    cache.cache_unfinished_req(req)
    assert len(req.prefix_indices) == 20
    cache.cache_finished_req(req)
    assert cache.available_size() == 32 * PAGE
    check(cache)


def test_reset_and_text(capsys):
    cache = build()
    publish(cache, A)
    node = match(cache, A).last_device_node
    cache.inc_lock_ref(node)
    cache.pretty_print()
    assert "rank 0: 20 tokens, 0 evictable, 20 protected" in capsys.readouterr().out
    cache.reset()
    assert cache.total_size() == 0 and cache.available_size() == 32 * PAGE
    with pytest.raises(RuntimeError, match="STALE_MATCH"):
        cache.inc_lock_ref(node)
    check(cache)


def test_an_unfinished_request_can_be_locked_again():
    cache = build()
    req = Request(A)
    cache.start_req(req)
    cache.extend_req(req, 20)
    req.kv_committed_len = 18
    cache.cache_unfinished_req(req)
    assert req.cache_protected_len == 16 and len(req.prefix_indices) == 18
    lock = cache.inc_lock_ref(req.last_node)
    assert lock.delta == 0
    check(cache, [req])
    cache.cache_finished_req(req, is_insert=False)
    assert cache.protected_size() == 16
    node = match(cache, A).last_device_node
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert cache.protected_size() == 0
    check(cache)


def test_hooks_of_a_host_tier():
    seen = []

    class Tiered(UnifiedRadixCache):
        def hicache_prefetch(self, req, match):
            seen.append(("prefetch", match.hit_length))

        def hicache_write_through(self, req, result):
            seen.append(("write_through", result.inserted_len))

        def hicache_write_back(self, params):
            seen.append(("write_back", int(params.num_tokens)))

    plain = build()
    cache = Tiered(plain.requests, plain.config, min_bucket=32)
    run(cache, Workload(0, 1, PAGE, 8, 1))
    cache.evict(EvictParams(num_tokens=4))
    assert [name for name, _ in seen] == ["prefetch", "write_through", "write_back"]


def test_the_clock_is_compacted_in_time():
    cache = build()
    publish(cache, A)
    cache._ticks[0] = (1 << 28) - 8
    match(cache, A)
    assert cache._ticks[0] < 1000 and int(cache.states[0].clock) < 1000
    assert cache.peek_prefix_len(A) == 20
    check(cache)


def test_lengths_share_programs():
    cache = build()
    config = dataclasses.replace(cache.config, hash_seed=7)
    cache = UnifiedRadixCache(cache.requests, config)
    program = packed._peek_program(config)
    for length in range(4, 128):
        cache.peek_prefix_len(list(range(length)))
    # 1 to 31 pages: 8, 16 and 32.
    assert program._cache_size() == 3  # type: ignore


# Windows.


def test_windows_slide_and_tombstones_lack_locations():
    cache = build(("FULL", "SWA"))
    tokens = list(range(60))
    req = Request(tokens)
    cache.start_req(req)
    cache.extend_req(req, 60)
    req.kv_committed_len = 60
    row = cache.requests.swa[req.req_pool_idx]  # type: ignore
    assert row[:60].all()
    # Two pages for the window and one more stay.
    assert cache.evict_req_swa(req, 60) == 48
    assert cache.evict_req_swa(req, 60) == 0
    assert not row[:48].any() and row[48:60].all()
    assert cache.swa_available_size() == (24 - 3) * PAGE
    check(cache, [req])
    cache.cache_finished_req(req)
    assert (cache.total_size(), cache.swa_total_size()) == (60, 12)
    assert cache.evictable_size() == 12
    found = match(cache, tokens)
    assert found.hit_length == 60
    assert not found.swa_indices[:48].any() and found.swa_indices[48:].all()  # type: ignore
    short = match(cache, tokens[:40])
    assert short.hit_length == 0 and short.swa_branching_seqlen == 40
    assert short.lost_tokens == (0, 40, 0)
    check(cache)


def test_swa_needs_a_table_with_swa():
    cache = build(("FULL", "SWA"))
    with pytest.raises(ValueError, match="has_swa=True"):
        UnifiedRadixCache(RequestTable(4, 64, PAGE), cache.config)


# Recurrent state.


def serve(cache, tokens, end: int, snapshot: int | None = None) -> Request:
    """A request that has written `end` tokens, with a snapshot of some kept."""
    req = Request(tokens)
    assert cache.start_req(req) is not None
    assert cache.extend_req(req, end)
    req.kv_committed_len = end
    if snapshot is not None:
        req.recurrent_last_track_seqlen = snapshot
    return req


def test_base_path_commit_match_clone_evict():
    cache = build("base")
    assert cache.supports_recurrent() and not cache.recurrent_extra_buffer_active()
    req = serve(cache, A, 20)
    slot = req.recurrent_pool_idx
    assert slot and cache.assert_recurrent_slot_ledger(0, [req]) == 1
    cache.cache_finished_req(req)
    assert cache.recurrent_evictable_size() == cache.recurrent_total_size() == 1
    again = Request([*A, 1, 2])
    assert cache.start_req(again).hit_length == 20
    assert again.recurrent_cow_src_index == slot != again.recurrent_pool_idx
    # Its source is locked until the clone is done.
    assert cache.recurrent_protected_size() == 1
    assert cache.evict(EvictParams(recurrent_num=1)).recurrent_num_evicted == 0
    cache.release_clone(again)
    assert again.recurrent_cow_src_index == 0 and cache.protected_size() == 20
    assert cache.evict(EvictParams(recurrent_num=1)).recurrent_num_evicted == 1
    check(cache, [again])
    cache.cache_finished_req(again, is_insert=False)
    assert cache.recurrent_available_size() == 7
    check(cache)


def test_a_snapshot_serves_its_own_length_only():
    cache = build("base")
    cache.cache_finished_req(serve(cache, A, 20))
    found = match(cache, A[:19])
    assert found.hit_length == 0 and found.full_kv_hit_length == 19
    assert found.recurrent_branching_seqlen == 19
    assert found.lost_tokens == (0, 0, 19)
    params = MatchPrefixParams(A[:19], full_only=True)
    assert cache.match_prefix(params).hit_length == 19


def test_insert_with_a_snapshot():
    cache = build("base")
    req = serve(cache, A, 0)
    given = cache.alloc(20).full
    slot = req.recurrent_pool_idx
    result = cache.insert(InsertParams(A, given, recurrent_value=slot))
    assert result.recurrent_committed and not result.recurrent_exist
    req.recurrent_pool_idx = 0
    cache.cache_finished_req(req, is_insert=False)
    assert match(cache, A).cow_src_slot == slot
    check(cache)


@pytest.mark.parametrize(
    "tracks, tree", [(2, 3), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_extra_buffer_publishes_the_kept_slot(tracks, tree):
    cache = build(("FULL", "RECURRENT"), num_track_slots=tracks)
    assert cache.recurrent_extra_buffer_active()
    req = serve(cache, A, 20, snapshot=16)
    owned = [req.recurrent_pool_idx, *req.recurrent_track_slots]
    assert len(set(owned)) == tree == cache.assert_recurrent_slot_ledger(0, [req])
    kept = req.recurrent_track_slots[(req.recurrent_next_track_idx + 1) % tracks]
    cache.cache_unfinished_req(req)
    # Cut to what the snapshot covers; a replacement stands in the kept slot's place.
    assert (cache.protected_size(), cache.recurrent_total_size()) == (16, 1)
    assert req.cache_protected_len == 16 and req.recurrent_last_track_seqlen == 0
    assert kept not in req.recurrent_track_slots
    assert len(req.prefix_indices) == 20
    check(cache, [req])
    cache.cache_finished_req(req)
    assert (cache.total_size(), cache.recurrent_available_size()) == (16, 6)
    found = match(cache, A)
    assert found.hit_length == 16 and found.cow_src_slot == kept
    check(cache)


def test_without_a_boundary_nothing_is_published():
    cache = build(("FULL", "RECURRENT"))
    req = serve(cache, A, 20)
    cache.cache_unfinished_req(req)
    assert cache.total_size() == 0 and len(req.prefix_indices) == 20
    cache.cache_finished_req(req)
    assert cache.recurrent_available_size() == 7
    assert cache.available_size() == 32 * PAGE
    check(cache)


def test_duplicate_snapshots_are_freed():
    cache = build(("FULL", "RECURRENT"))
    twins = [serve(cache, A, 20, snapshot=16) for _ in range(2)]
    for req in twins:
        cache.cache_finished_req(req)
    assert cache.recurrent_available_size() == 6 and cache.total_size() == 16
    check(cache)


def test_requests_wait_for_slots_and_evict_exactly_the_shortfall():
    cache = build(("FULL", "RECURRENT"))
    for first in (0, 200):
        tokens = list(range(first, first + 20))
        cache.cache_finished_req(serve(cache, tokens, 20, snapshot=16))
    assert (cache.recurrent_available_size(), cache.recurrent_total_size()) == (5, 2)
    one, two = serve(cache, A, 4), serve(cache, A[::-1], 4)
    assert (cache.recurrent_available_size(), cache.recurrent_total_size()) == (0, 1)
    waits = Request(A)
    assert cache.start_req(waits) is None and waits.req_pool_idx is None
    check(cache, [one, two])
    with pytest.raises(AssertionError, match="leaked"):
        cache.assert_recurrent_slot_ledger(0, [one])
    for req in (one, two):
        cache.cache_finished_req(req, is_insert=False)
    assert cache.start_req(waits) is not None
    check(cache, [waits])


@pytest.mark.parametrize("components", BASE_AND_EXTRA)
def test_an_idle_rank_moves_a_snapshot_that_it_could_not_clone(components):
    slots = 1 if components == "base" else 3
    cache = build(components, slots=slots)
    cache.cache_finished_req(serve(cache, A, 20, snapshot=16))
    kept = match(cache, A).cow_src_slot
    req = Request([*A, 1, 2])
    hit = cache.start_req(req).hit_length
    assert hit == (20 if components == "base" else 16)
    assert req.recurrent_pool_idx == kept and req.recurrent_cow_src_index == 0
    assert cache.recurrent_total_size() == 0 and cache.protected_size() == hit
    assert cache.assert_recurrent_slot_ledger(0, [req]) == slots
    check(cache, [req])
    assert cache.start_req(Request(A)) is None
    cache.cache_finished_req(req, is_insert=False)
    assert cache.recurrent_available_size() == slots
    check(cache)


def test_a_request_longer_than_the_table_is_refused_before_it_allocates():
    cache = build()
    req = serve(cache, A, 4)
    with pytest.raises(ValueError, match="Raise max_tokens"):
        cache.extend_req(req, 129)
    check(cache, [req])


def test_a_live_request_without_a_replacement_tries_again():
    cache = build(("FULL", "RECURRENT"))
    req = serve(cache, A, 20, snapshot=16)
    other = serve(cache, A, 4)
    cache.states[0], last = jitted.alloc_slots(
        cache.states[0], np.int32(1), max_new=3, partial=False
    )
    tracks = list(req.recurrent_track_slots)
    cache.cache_unfinished_req(req)
    assert cache.total_size() == 0 and req.recurrent_track_slots == tracks
    assert req.recurrent_last_track_seqlen == 16
    assert cache.take_status() == Status(0)  # it tries again: no trouble
    cache.states[0] = jitted.free_slots(cache.states[0], last.ids)
    cache.cache_unfinished_req(req)
    assert cache.recurrent_total_size() == 1
    check(cache, [req, other])


@pytest.mark.parametrize("components", BASE_AND_EXTRA)
def test_random_recurrent_requests_lose_no_slot(components):
    cache = build(components, dp_size=2)
    load = Workload(5, 40, cache.page_size, 12, 2, branching=0.0)
    seen = run(cache, load, check=check)
    assert seen.short == 0 and seen.evictions > 0 and seen.hit_ratio > 0
    check(cache)
    for rank in range(2):
        assert cache.assert_recurrent_slot_ledger(rank, []) == 0


def test_unlock_without_a_lock_is_nothing():
    cache = build()
    publish(cache, A)
    node = match(cache, A).last_device_node
    assert cache.dec_lock_ref(node, DecLockRefParams()).delta == 0
    assert cache.protected_size() == 0


# Words of a key.


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda t: np.int64(t)])
def test_keys_of_any_sequence_are_the_same_words(kind):
    config = CacheConfig(page_size=PAGE, num_pages=8)
    keys = [RadixKey(tokens, "a") for tokens in (A[:8], kind(A[:8]))]
    plain, same = (packed.pack_key(key, 8, config, 4, rows=1) for key in keys)
    np.testing.assert_array_equal(plain.words, same.words)
    assert plain.words[8:16].tolist() == A[:8] and not plain.words[16:].any()
    plain.row(0)[:2] = 5, 6
    assert plain.words[-4:].tolist() == [5, 6, 0, 0]


def test_a_key_reads_its_list_once_and_again_where_it_changed():
    cache = build()
    ids = list(A[: 2 * PAGE])
    key = RadixKey(ids)
    assert cache._key(key)[1].words is not None
    read = key.known_ids
    assert read.tolist() == ids
    assert cache._key(key, rows=1)[1].words[8 : 8 + len(ids)].tolist() == ids
    assert key.known_ids is read
    ids[1] = 3000
    assert key.known_ids is None
    assert cache._key(key)[1].words[8 : 8 + len(ids)].tolist() == ids
    ids += [77] * PAGE
    assert cache._key(key)[1].words[8 : 8 + len(ids)].tolist() == ids
    assert RadixKey(np.asarray(ids)).known_ids is None


def test_an_insert_gives_a_result_that_is_still_to_come():
    cache = build()
    pages = cache.alloc(2 * PAGE).full
    result = cache.insert(InsertParams(RadixKey(A[: 2 * PAGE]), pages))
    assert isinstance(result._fields, jax.Array)
    assert (result.prefix_len, result.inserted_len) == (0, 2 * PAGE)
    assert not result.recurrent_exist and not result.recurrent_committed
    assert result == InsertResult(0, 2 * PAGE) != InsertResult(PAGE, 2 * PAGE)
    assert len({result, InsertResult(0, 2 * PAGE)}) == 1
    assert repr(result).startswith("InsertResult(prefix_len=0, inserted_len=")


def test_words_start_a_cache_line():
    for count in (1, 7, 64, 8263):
        words = packed._zeros(count)
        assert words.ctypes.data % 64 == 0 and words.shape == (count,)
        assert words.dtype == np.int32 and not words.any()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 3, -4], "holds -4"),
        ([1, 2, 3, 1 << 31], "holds 2147483648"),
        (np.asarray([1, 2, 3, -4]), "holds -4"),
        (np.asarray([1, 2, 3, 1 << 31]), "holds 2147483648"),
        (np.asarray([1, 2, 3, (1 << 32) + 1]), "holds 4294967297"),
        ([1, 2, 3, 4.0], "wanted a flat sequence of integers"),
        (["a", "b", "c", "d"], "wanted a flat sequence of integers"),
        ([[1, 2], [1, 2], [1, 2], [1, 2]], "wanted a flat sequence of integers"),
        (np.ones((4, 4), np.int32), "wanted a flat sequence of integers"),
    ],
)
def test_what_is_no_key_is_refused(tokens, message):
    cache = build()
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))
    cache.raise_if_bad()


def test_two_matches_of_one_path_lock_and_unlock():
    """What a match brings to the host is enough to lock it later."""
    cache = build(("FULL", "SWA"))
    publish(cache, A)
    first, second = match(cache, A), match(cache, A[:8])
    locks = [cache.inc_lock_ref(m.last_device_node) for m in (first, second)]
    assert cache.full_protected_size() == first.hit_length
    for found, lock in zip((first, second), locks, strict=True):
        cache.dec_lock_ref(found.last_device_node, lock.to_dec_params())
    assert cache.full_protected_size() == 0
    check(cache)
