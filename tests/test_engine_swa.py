"""The legacy tree with sliding windows, with the numbers of sglang-jax's own tests."""

import numpy as np
import pytest

from uhrc_fn.engine.allocator import SWAPageAllocator
from uhrc_fn.engine.chunk_cache import SWAChunkCache
from uhrc_fn.engine.params import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from uhrc_fn.engine.request import Request, RequestTable
from uhrc_fn.engine.swa_radix_cache import SWARadixCache

A = list(range(100, 120))


def tree(window=4, page_size=1, dp_size=1, pages=64, swa_pages=64, disable=False):
    table = RequestTable(8, 64, page_size, has_swa=True)
    pool = SWAPageAllocator(pages, swa_pages, page_size, dp_size)
    return SWARadixCache(table, pool, sliding_window_size=window, disable=disable)


def publish(cache, tokens, prev=0, evicted=0, shared=None, **tags):
    """Insert tokens as a request would; returns ``(locations, result)``.

    Args:
      cache: to insert into.
      tokens: of the request.
      prev: tokens that it shares with the tree.
      evicted: tokens whose SWA locations it has let go.
      shared: their locations.
      tags: of the key.
    """
    key = RadixKey(tokens, **tags)
    own = cache.alloc(len(tokens) - prev, key.dp_rank).full
    value = own if shared is None else np.concatenate([shared[:prev], own])
    if evicted > prev:
        cache.allocator.free_swa(value[prev:evicted], key.rank)
    params = InsertParams(
        key, value[: len(tokens)], prev_prefix_len=prev, swa_evicted_seqlen=evicted
    )
    result = cache.insert(params)
    cache.free(value[prev : max(result.prefix_len, prev)], key.dp_rank)
    cache.free(value[result.inserted_len :], key.dp_rank)
    check(cache)
    return value, result


def match(cache, tokens, **tags):
    key = RadixKey(tokens, **tags)
    length = cache.peek_prefix_len(key)
    found = cache.match_prefix(MatchPrefixParams(key))
    assert found.hit_length == length
    check(cache)
    return found


def check(cache, is_idle=True) -> None:
    """Counters against a walk, tombstones against the map, and who owns each page."""
    pool, size = cache.allocator, cache.page_size
    for rank in range(cache.dp_size):
        nodes = [n for n in cache._nodes() if n.key.rank == rank]
        full = swa = 0
        for node in nodes:
            twins = pool.to_swa(node.value, rank)
            assert not twins.any() if node.swa_tombstone else twins.all()
            assert node.children or not node.swa_tombstone
            assert node.lock_ref >= node.swa_lock_ref >= 0
            full += len(node)
            swa += 0 if node.swa_tombstone else len(node)
        assert cache.total_size(rank) == full and cache.swa_total_size(rank) == swa
        free = [len(n) for n in nodes if not n.lock_ref]
        assert cache.full_evictable_size(rank) == sum(free)
        free = [len(n) for n in nodes if not (n.swa_tombstone or n.swa_lock_ref)]
        assert cache.swa_evictable_size(rank) == sum(free)
        if is_idle:
            assert full + pool.available_size(rank) == pool.num_pages * size
            assert swa + pool.swa_available_size(rank) == pool.swa.num_pages * size


def evict(cache, full=0, swa=0, rank=None):
    params = EvictParams(num_tokens=full, swa_num_tokens=swa, dp_rank=rank)
    result = cache.evict(params)
    check(cache)
    return result.num_tokens_evicted, result.swa_num_tokens_evicted


def tombstone_of(cache, tokens=A, cut=10, other=(7, 8, 9, 10)):
    """A tree whose first `cut` tokens are a tombstone, with two live branches."""
    value, _ = publish(cache, tokens)
    branch = [*tokens[:cut], *other]
    publish(cache, branch)
    nodes = [match(cache, key).last_device_node for key in (tokens, branch)]
    locks = [cache.inc_lock_ref(node) for node in nodes]
    # Locks hold a window of each branch, so that what they share goes.
    assert evict(cache, swa=cut) == (0, cut)
    for node, lock in zip(nodes, locks, strict=True):
        cache.dec_lock_ref(node, lock.to_dec_params())
    check(cache)
    return value


def test_insert_and_match_exact_and_shorter():
    cache = tree()
    value, result = publish(cache, A)
    assert (result.prefix_len, result.inserted_len) == (0, 20)
    found = match(cache, A)
    assert found.device_indices.tolist() == value.tolist()
    assert found.swa_indices.all() and found.best_match_node is found.last_device_node
    assert match(cache, A[:7]).device_indices.tolist() == value[:7].tolist()


def test_evict_and_reset_basic():
    cache = tree()
    publish(cache, A)
    assert evict(cache, full=20) == (20, 20)
    publish(cache, A)
    cache.reset()
    check(cache)
    assert cache.total_size() == cache.swa_total_size() == 0


def test_two_sequences_with_shared_prefix():
    cache = tree()
    value, _ = publish(cache, A)
    _, result = publish(cache, [*A[:10], 1, 2, 3])
    assert result.prefix_len == 10
    found = match(cache, [*A[:10], 1, 2, 3])
    assert found.device_indices[:10].tolist() == value[:10].tolist()


def test_lock_prevents_eviction_until_unlocked():
    cache = tree(window=30)
    publish(cache, A)
    node = match(cache, A).last_device_node
    lock = cache.inc_lock_ref(node)
    assert lock.delta == -20 and lock.swa_uuid_for_lock is None
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (20, 20)
    assert evict(cache, 20, 20) == (0, 0)
    cache.dec_lock_ref(node, lock.to_dec_params())
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (0, 0)
    assert evict(cache, 20) == (20, 20)


def test_a_lock_needs_its_own_params_to_end_where_it_began():
    cache = tree(window=4)
    publish(cache, A[:10])
    publish(cache, A)
    node = match(cache, A).last_device_node
    lock = cache.inc_lock_ref(node)
    assert lock.swa_uuid_for_lock
    assert (cache.full_protected_size(), cache.swa_protected_size()) == (20, 10)
    # The end of the lock moves up with a split, and covers both halves.
    match(cache, A[:15])
    assert cache.swa_protected_size() == 10
    with pytest.raises(ValueError, match="to_dec_params"):
        cache.dec_lock_ref(node)
    cache.dec_lock_ref(node, lock.to_dec_params())
    check(cache)
    assert cache.swa_protected_size() == cache.full_protected_size() == 0


def test_paged_match_aligns_to_page_size():
    cache = tree(page_size=4)
    publish(cache, A)
    assert match(cache, A[:6]).hit_length == 4


def test_disabled_cache_basic():
    cache = tree(disable=True)
    assert cache.insert(InsertParams(A, A)).inserted_len == 0
    found = match(cache, A)
    assert found.last_device_node is cache.root_node
    cache.dec_lock_ref(cache.root_node, cache.inc_lock_ref(cache.root_node))


def test_namespaces():
    cache = tree(dp_size=2, pages=128, swa_pages=128)
    tags = [{}, {"extra_key": "a"}, {"dp_rank": 0}, {"extra_key": "a", "dp_rank": 1}]
    for tag in tags:
        assert publish(cache, A, **tag)[1].prefix_len == 0
    assert publish(cache, A, extra_key="a")[1].prefix_len == 20
    assert (cache.total_size(0), cache.total_size(1)) == (60, 20)
    assert cache.peek_prefix_len(A) == 20
    assert evict(cache, full=99, rank=1) == (20, 20)
    assert cache.total_size(0) == 60


def test_evictable_size_returns_min():
    cache = tree()
    tombstone_of(cache)
    assert (cache.full_evictable_size(), cache.swa_evictable_size()) == (24, 14)
    assert cache.evictable_size() == 14


def test_tombstone_creation_and_match_behind_it():
    cache = tree()
    value = tombstone_of(cache)
    found = match(cache, A)
    # The live suffix covers the window; the tombstone's FULL locations come along.
    assert found.device_indices.tolist() == value.tolist()
    assert not found.swa_indices[:10].any() and found.swa_indices[10:].all()  # type: ignore


@pytest.mark.parametrize("length, hit", [(12, 0), (14, 14), (10, 0)])
def test_a_hit_needs_a_live_window(length, hit):
    cache = tree(window=4)
    tombstone_of(cache)
    found = match(cache, A[:length])
    assert found.hit_length == hit and found.full_kv_hit_length == length
    assert found.swa_branching_seqlen == (0 if hit else length)
    assert found.lost_tokens == (0, length - hit, 0)


def test_each_tombstone_begins_the_count_anew():
    cache = tree(window=4)
    # live 0-3, gone 3-6, live 6-9, gone 9-12, live 12-20
    for cut in (12, 9, 6, 3):
        publish(cache, A)
        publish(cache, [*A[:cut], cut, cut])
    path, _ = cache._walk(cache._aligned(A))
    for place in (1, 3):
        node = path[place][0]
        cache.allocator.free_swa(node.value)
        node.swa_tombstone = True
        cache._swa_evictable[0] -= len(node)
    assert match(cache, A).hit_length == 20
    # Three live tokens between two tombstones, or before the first: none of four.
    assert match(cache, A[:9]).hit_length == 3
    assert match(cache, A[:15]).hit_length == 3
    assert match(cache, A[:16]).hit_length == 16


def test_tombstone_healing_revives_all():
    cache = tree()
    before = tombstone_of(cache)
    _, result = publish(cache, A[:10])
    assert result.prefix_len == 10
    # FULL locations stay: others may be reading them.
    found = match(cache, A)
    assert found.device_indices.tolist() == before.tolist()
    assert found.swa_indices.all() and cache.swa_total_size() == 24


def test_tombstone_healing_from_inside():
    cache = tree()
    tombstone_of(cache)
    publish(cache, A[:10], evicted=6)
    path, _ = cache._walk(cache._aligned(A[:10]))
    assert [(len(n), n.swa_tombstone) for n, _ in path] == [(6, True), (4, False)]
    assert match(cache, A[:10]).hit_length == 10


def test_tombstone_healing_not_past_what_was_let_go():
    cache = tree()
    tombstone_of(cache)
    publish(cache, [*A[:10], 1, 2, 3, 4], evicted=10)
    assert cache.swa_total_size() == 18
    assert match(cache, A[:10]).hit_length == 0


def test_healing_under_a_lock_of_a_reader():
    cache = tree(window=4)
    value = tombstone_of(cache)
    node = match(cache, A).last_device_node
    lock = cache.inc_lock_ref(node)
    publish(cache, A[:10])
    assert match(cache, A).device_indices.tolist() == value.tolist()
    cache.dec_lock_ref(node, lock.to_dec_params())
    check(cache)
    assert cache.swa_protected_size() == 0


def test_shared_prefix_is_not_revived_with_what_it_has_lost():
    cache = tree()
    value = tombstone_of(cache)
    publish(cache, A, prev=5, shared=value)
    path, _ = cache._walk(cache._aligned(A[:10]))
    assert [(len(n), n.swa_tombstone) for n, _ in path] == [(5, True), (5, False)]


def test_cascade_deletes_tombstones_without_children():
    cache = tree()
    tombstone_of(cache)
    assert evict(cache, full=24) == (24, 14)
    assert cache.total_size() == cache.swa_total_size() == 0
    tombstone_of(cache)
    # By SWA pressure too, and the tombstone's FULL tokens are counted.
    assert evict(cache, swa=14) == (24, 14)


def test_protected_prefix_basic():
    cache = tree()
    value, _ = publish(cache, A[:10])
    publish(cache, A, prev=10, evicted=5, shared=value)
    assert match(cache, A).hit_length == 20


def test_new_node_tombstone_split():
    cache = tree()
    publish(cache, A, evicted=10)
    shape = [(len(n), n.swa_tombstone) for n in cache._nodes()]
    assert sorted(shape) == [(10, False), (10, True)]
    assert match(cache, A).hit_length == 20
    assert (cache.total_size(), cache.swa_total_size()) == (20, 10)


@pytest.mark.parametrize("evicted", [20, 24])
def test_new_leaf_is_never_a_tombstone(evicted):
    cache = tree()
    _, result = publish(cache, A, evicted=min(evicted, 20))
    assert result.inserted_len == 0 and cache.total_size() == 0


def test_a_page_that_straddles_what_was_let_go_is_a_tombstone():
    cache = tree(page_size=4)
    given = cache.alloc(8).full
    cache.insert(InsertParams(A[:8], given, swa_evicted_seqlen=2))
    check(cache)
    assert sorted((len(n), n.swa_tombstone) for n in cache._nodes()) == [
        (4, False),
        (4, True),
    ]


def test_windows_without_their_locations_are_refused():
    cache = tree()
    given = cache.alloc(8).full
    cache.allocator.free_swa(given[4:])
    with pytest.raises(ValueError, match="SWA twins"):
        cache.insert(InsertParams(A[:8], given))


def test_evict_both_pools():
    cache = tree()
    tombstone_of(cache)
    publish(cache, list(range(10)))
    assert evict(cache, full=4, swa=20) == (34, 24)


def test_oldest_window_goes_first_and_parents_before_children():
    cache = tree()
    publish(cache, A[:4])
    publish(cache, A[:8])
    publish(cache, list(range(8)))
    match(cache, A[:8])
    evict(cache, swa=1)
    assert match(cache, list(range(8))).hit_length == 0
    evict(cache, swa=1)
    path, _ = cache._walk(cache._aligned(A[:8]))
    assert [n.swa_tombstone for n, _ in path] == [True, False]


def test_allocation_evicts_what_is_short_of_each_pool():
    cache = tree(pages=40, swa_pages=24)
    publish(cache, A)
    assert cache.alloc(25) is None and cache.total_size() == 20
    given = cache.alloc(8)
    assert len(given.full) == len(given.swa) == 8
    cache.free(given.full)
    check(cache)


def started(cache, tokens, published: int):
    """A request whose first tokens are the tree's; the rest is its own."""
    req = Request(tokens)
    assert cache.start_req(req) is not None
    assert cache.extend_req(req, published)
    req.kv_committed_len = published
    cache.cache_unfinished_req(req)
    assert cache.extend_req(req, len(tokens))
    req.kv_committed_len = len(tokens)
    return req


def test_evict_req_swa_uses_locked_tree_boundary():
    cache = tree(window=4)
    tokens = list(range(40))
    req = started(cache, tokens, 20)
    before = cache.swa_available_size()
    # The frontier of 30 tokens is 25; what is the tree's stays.
    assert cache.evict_req_swa(req, 30) == 5
    assert cache.swa_available_size() == before + 5 and cache.swa_total_size() == 20
    assert req.swa_evicted_seqlen == 25 and cache.evict_req_swa(req, 30) == 0
    row = cache.requests.swa[req.req_pool_idx]  # type: ignore
    assert row[:20].all() and not row[20:25].any() and row[25:40].all()
    cache.cache_finished_req(req)
    check(cache)
    assert (cache.total_size(), cache.swa_total_size()) == (40, 35)


def test_evict_req_swa_keeps_whole_pages():
    cache = tree(window=6, page_size=4)
    req = started(cache, list(range(40)), 4)
    # A window of two pages and one more: 3 of the 6 whole pages before token 27.
    assert cache.evict_req_swa(req, 27) == 8
    assert req.swa_evicted_seqlen == 12
    cache.cache_finished_req(req, is_insert=False)
    check(cache)


def test_cache_unfinished_req_writeback_range():
    cache = tree()
    value, _ = publish(cache, A[:10])
    req = started(cache, A, 15)
    row = cache.requests.full[req.req_pool_idx]
    assert row[:10].tolist() == value[:10].tolist()
    assert req.cache_protected_len == 15
    assert req.prefix_indices.tolist() == row[:15].tolist()
    cache.cache_finished_req(req)
    check(cache)


def test_size_tracking_fuzz():
    rng = np.random.default_rng(42)
    cache = tree(window=3, page_size=2, pages=60, swa_pages=40)
    held = []
    for _ in range(300):
        move = rng.integers(5)
        tokens = rng.integers(1, 4, rng.integers(1, 16)).tolist()
        if move == 0 and len(held) < 4:
            node = cache.match_prefix(MatchPrefixParams(tokens)).last_device_node
            held.append((node, cache.inc_lock_ref(node)))
        elif move == 1 and held:
            node, lock = held.pop(rng.integers(len(held)))
            cache.dec_lock_ref(node, lock.to_dec_params())
        elif move == 2:
            evict(cache, int(rng.integers(6)), int(rng.integers(8)))
        elif min(cache.available_size(), cache.swa_available_size()) > 16:
            publish(cache, tokens, evicted=int(rng.integers(len(tokens))) // 2 * 2)
        check(cache)
    for node, lock in held:
        cache.dec_lock_ref(node, lock.to_dec_params())
    evict(cache, 999, 999)
    assert cache.total_size() == 0


def test_swa_chunk_cache():
    table = RequestTable(2, 64, 4, has_swa=True)
    cache = SWAChunkCache(table, SWAPageAllocator(16, 12, 4), sliding_window_size=6)
    assert cache.supports_swa() and not cache.supports_recurrent()
    req = Request(list(range(40)))
    assert cache.start_req(req).hit_length == 0
    assert cache.extend_req(req, 40)
    assert cache.evict_req_swa(req, 40) == 28
    assert cache.swa_available_size() == 8 + 28
    req.kv_committed_len = 40
    cache.cache_finished_req(req)
    assert (cache.available_size(), cache.swa_available_size()) == (64, 48)
    assert cache.evictable_size() == cache.protected_size() == 0
