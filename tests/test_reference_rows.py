"""Rows of sglang-jax's tests that the files of their own component do not hold.

Tests keep the names and the numbers of the reference's. A cap on the cached length is
there a component's opinion; here it is the kept snapshot, since a request with track
slots publishes exactly what that covers. Rows that differ are in
`docs/differences.md`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness_hybrid import HybridHarness
from request_harness import FULL, RECURRENT, RequestHarness
from request_machine import config_of
from test_reference_recurrent import EXTRA, ONE_TOKEN, commit, slots

import uhrc_fn as u
from uhrc_fn import CacheConfig, InsertParams, MatchPrefixParams, Status

TOKENS = np.arange(1, 25, dtype=np.int32)
SIZE = 4
NO_CAP = config_of(FULL, SIZE)
CAP_8 = config_of(RECURRENT, SIZE)
"""A boundary every 8 tokens: 12 written tokens are capped to 8."""
CAP_0 = dataclasses.replace(CAP_8, recurrent_track_interval=16)
"""A boundary every 16 tokens: of 12 written tokens none can be cached."""


def tokens_of(h: RequestHarness) -> tuple[int, int, int]:
    """Tokens of the FULL pool that are free, evictable and locked."""
    counts = h.cache.num_free, h.cache.evictable, h.cache.protected
    free, evictable, protected = (SIZE * int(count[FULL]) for count in counts)
    return free, evictable, protected


ALL = SIZE * NO_CAP.num_pages  # 56


# test_unified_radix_cache: with requests, and with a cap on the length.


def test_cache_unfinished_then_finished_equivalence():
    h = RequestHarness(NO_CAP)
    request = h.start(TOKENS, written=12)
    h.publish(request)
    assert tokens_of(h) == (ALL - 12, 0, 12)
    assert int(h.tables.protected_length[request.row]) == 12
    assert h.extend(request, 4)
    assert h.finish(request).inserted_len == 16
    assert tokens_of(h) == (ALL - 16, 16, 0)


@pytest.mark.parametrize("is_finished", [False, True], ids=["unfinished", "finished"])
def test_no_op_equivalence_inserts_full_length(is_finished):
    h = RequestHarness(NO_CAP)
    request = h.start(TOKENS, written=12)
    result = h.finish(request) if is_finished else h.publish(request)
    assert result.inserted_len == 12 and h.in_tree(FULL) * SIZE == 12


def test_truncation_caps_inserted_key_unfinished_keeps_tail():
    h = RequestHarness(CAP_8)
    request = h.start(TOKENS, written=12)
    before, free = h.table(request), h.free(FULL)
    assert h.publish(request).inserted_len == 8
    assert tokens_of(h)[1:] == (0, 8)
    # Its 12 tokens stay where they are, and nothing is freed.
    assert h.table(request) == before and len(before) * SIZE == 12
    assert h.free(FULL) == free


def test_truncation_caps_inserted_key_and_frees_tail_finished():
    h = RequestHarness(CAP_8)
    request = h.start(TOKENS, written=12)
    free = h.free(FULL)
    assert h.finish(request).inserted_len == 8
    assert tokens_of(h)[1:] == (8, 0)
    assert (h.free(FULL) - free) * SIZE == 4


def test_skip_insert_on_zero_unfinished():
    h = RequestHarness(CAP_0)
    request = h.start(TOKENS, written=12)
    before = h.table(request)
    assert h.publish(request).inserted_len == 0
    assert h.in_tree(FULL) == 0 and request.receipt.anchor == 0
    assert h.table(request) == before and len(before) * SIZE == 12
    free = h.free(FULL)
    assert h.finish(request).inserted_len == 0
    assert (h.free(FULL) - free) * SIZE == 12
    assert tokens_of(h) == (ALL, 0, 0)


def test_skip_insert_on_zero_unfinished_preserves_protected_prefix():
    h = RequestHarness(CAP_0)
    seed = h.admit(TOKENS, len(TOKENS))
    seed.branching = 4  # a snapshot there, by a cut at a branching length
    assert h.extend(seed, 4)
    h.finish(seed)
    request = h.start(TOKENS, written=12)
    assert request.hit == 4
    assert h.publish(request).inserted_len == 0
    assert tokens_of(h)[1:] == (0, 4)
    free = h.free(FULL)
    h.finish(request)
    assert (h.free(FULL) - free) * SIZE == 8
    assert tokens_of(h) == (ALL - 4, 4, 0)


def test_skip_insert_on_zero_finished():
    h = RequestHarness(CAP_0)
    request = h.start(TOKENS, written=12)
    free = h.free(FULL)
    assert h.finish(request).inserted_len == 0
    assert (h.free(FULL) - free) * SIZE == 12


def test_zero_cache_len_skip_then_continuation_extends_without_overlap():
    h = RequestHarness(CAP_0)
    request = h.start(TOKENS, written=12)
    h.publish(request)
    first = h.table(request)
    assert h.extend(request, 3)
    assert h.table(request)[:3] == first and h.table(request)[3] not in first
    h.finish(request)
    assert tokens_of(h) == (ALL, 0, 0)
    assert h.free(RECURRENT) == h.config.num_recurrent_slots


# test_recurrent_track_metadata: the two rows that ask what a scheduler asks.


def test_running_recurrent_req_full_only_no_clone():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4])
    match = cache.match([1, 2, 3, 4], full_only=True)
    assert (match.hit_length, match.cow_src_slot) == (4, 0)
    # Its lock holds FULL; the snapshot is not in use.
    receipt = cache.lock(match)
    assert slots(cache) == (7, 1, 0)
    cache.unlock(receipt)


def test_new_prefill_clones_and_matches_all_components():
    cache = HybridHarness(ONE_TOKEN)
    _, slot = commit(cache, [1, 2, 3, 4])
    commit(cache, [1, 2, 3, 4, 5, 6], has_slot=False)
    match = cache.match([1, 2, 3, 4, 5, 6])
    assert (match.hit_length, match.full_kv_hit_length) == (4, 6)
    assert match.cow_src_slot == slot
    receipt = cache.lock(match)
    assert slots(cache) == (7, 0, 1)
    cache.unlock(receipt)


# test_hybrid_req_to_token_pool: slots of several ranks, and atomic allocation.


def test_alloc_returns_none_when_below_three_free():
    cache = HybridHarness(EXTRA)
    for count in (9, 1):
        cache.take(RECURRENT, count)
    result = cache.alloc_request(1, 0, 3)
    assert not result.ok and result.slots.count == result.pages.count == 0
    assert cache.take_status() == Status.SLOTS_EXHAUSTED
    assert slots(cache) == (2, 0, 0) and cache.num_free(FULL) == 24


def test_alloc_free_recurrent_slot_scalars():
    cache = HybridHarness(ONE_TOKEN)
    assert [cache.take(RECURRENT, 1) for _ in range(8)] == [[i] for i in range(1, 9)]
    assert cache.alloc_of(RECURRENT, 1).count == 0  # None there
    assert cache.take_status() == Status.SLOTS_EXHAUSTED
    cache.free_of(RECURRENT, [5])
    assert cache.take(RECURRENT, 1) == [5]


def test_dp_ranks_use_separate_free_lists():
    """Also dp_rank_capacity_independent, _returns_to_correct_dp_rank, _clear_resets."""
    cache = u.init(EXTRA)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    alloc = jax.jit(jax.vmap(lambda c, n: u.alloc_slots(c, n, max_new=12)))
    free = jax.jit(jax.vmap(u.free_slots))
    counts = lambda *numbers: np.array(numbers, np.int32)
    caches, first = alloc(caches, counts(3, 3))
    assert first.ids[:, :3].tolist() == [[1, 2, 3]] * 2  # both start at 1
    caches, _ = alloc(caches, counts(9, 0))
    caches, more = alloc(caches, counts(1, 9))
    assert more.ok.tolist() == [0, 1]  # rank 0 is empty, rank 1 is not
    assert caches.num_free[:, RECURRENT].tolist() == [0, 0]
    caches = free(caches, np.array([[0, 0], [2, 3]], np.int32))
    assert caches.num_free[:, RECURRENT].tolist() == [0, 2]
    caches = free(caches, np.array([[7, 0], [0, 0]], np.int32))
    caches, again = alloc(caches, counts(1, 2))
    assert again.ids[:, :2].tolist() == [[7, 0], [2, 3]]
    caches = jax.jit(jax.vmap(u.reset))(caches)
    assert caches.num_free[:, RECURRENT].tolist() == [12, 12]
    u.check_invariants(caches)


# test_radix_cache, test_swa_radix_cache: rank and extra key together.


def test_combined_extra_key_and_dp_rank():
    config = CacheConfig(page_size=1, num_pages=8, max_prefix_pages=4)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), u.init(config))
    key = lambda name: u.radix_key([7, 8, 9], config, extra_key=name, num_pages=4)

    @jax.jit
    @jax.vmap
    def publish(cache, key):
        cache, pages = u.alloc_pages(cache, 3, max_new=4)
        return u.insert(cache, InsertParams(key=key, value=pages.ids))

    @jax.jit
    @jax.vmap
    def hit(cache, key):
        return u.match_prefix(cache, MatchPrefixParams(key=key))[1].hit_length

    caches, _ = publish(caches, u.stack_keys([key("x"), key("y")]))
    crossed = u.stack_keys([key("y"), key("x")])
    assert hit(caches, crossed).tolist() == [0, 0]
    caches, result = publish(caches, crossed)
    assert result.prefix_len.tolist() == [0, 0]
    assert caches.evictable[:, FULL].tolist() == [6, 6]  # four entries of three
    assert hit(caches, crossed).tolist() == [3, 3]
    assert hit(caches, u.stack_keys([key(None), key("z")])).tolist() == [0, 0]
    u.check_invariants(caches)


# test_recurrent_state_sizing.


def test_undersized_pool_below_owned_fails_fast():
    # Where slots and track slots come together: refused while tracing, as by
    # `check_pools` and `limit_running`.
    config = dataclasses.replace(CAP_8, num_recurrent_slots=2)
    shape = dict(num_requests=2, max_pages=6, page_size=SIZE)
    cache, row, key = u.init(config), np.int32(1), u.radix_key([], config, num_pages=6)
    _, receipt = jax.eval_shape(
        lambda c: u.inc_lock_ref(c, u.match_prefix(c, MatchPrefixParams(key=key))[1]),
        cache,
    )

    def trace(op, tracks: int):
        requests = u.RequestConfig(**shape, num_track_slots=tracks)
        tables = u.init_hybrid_req_to_token_pool(requests)
        jax.eval_shape(op, cache, tables, row, key, receipt)

    for op in (u.cache_finished_req, u.cache_unfinished_req):
        trace(op, 1)
        with pytest.raises(ValueError, match="2 recurrent slots a rank; wanted at lea"):
            trace(op, 2)
    with pytest.raises(ValueError, match="max_new=3; wanted a static int from 1 to n"):
        jax.eval_shape(
            lambda c: u.alloc_request(c, 1, 0, 3, max_pages=1, max_slots=3), cache
        )


def test_no_extra_buffer_skips_static_checks():
    # An interval without the extra buffer has no effect; one that is none is refused.
    base = dict(components="FULL,RECURRENT", num_pages=8, num_recurrent_slots=4)
    assert CacheConfig(**base, recurrent_track_interval=7).recurrent_grid == 1
    with pytest.raises(ValueError, match="recurrent_track_interval=0"):
        CacheConfig(**base, recurrent_track_interval=0)
