"""What sglang-jax's tests of its SWA radix tree ask, with their numbers.

There an edge is tombstoned as a whole; here a node is a page, so the same numbers come
out page by page. Tests keep the names of the reference's. What has no counterpart:

- `disabled_cache_basic`: a switched-off cache is a shell that does not call this one.
- `swa_free_group_batching_multi_rank`: frees take effect at once, nothing is grouped.
- `dp_rank_preserves_on_slicing`, `combined_extra_key_and_dp_rank`: the rank is the row
  of a stack of trees, never part of a key (`test_dp_rank_namespace_isolation`).
- `dp_rank_none_shared_namespace`, `_none_vs_explicit_rank`: no rank is rank 0.
- `backward_compatibility_plain_list`: keys are built by `radix_key` alone.
- `TestSchedulerCacheInit`: which cache an engine builds is the engine's.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness_hybrid import FULL, SWA, HybridHarness

import uhrc_fn
from uhrc_fn import CacheConfig, InsertParams, MatchPrefixParams
from uhrc_fn.pools.sliding import swa_frontier
from uhrc_fn.tree_arrays import NULL


def swa_config(window: int, page_size: int = 1, num_pages: int = 128) -> CacheConfig:
    return CacheConfig(
        components=("FULL", "SWA"),
        page_size=page_size,
        num_pages=num_pages,
        num_swa_pages=num_pages,
        sliding_window_size=window,
        max_prefix_pages=32 // page_size,
    )


NARROW, WIDE = swa_config(4), swa_config(64)
PAGED, PAGED_WIDE = swa_config(4, 4, 24), swa_config(64, 4, 24)

SHARED = list(range(10))
A = [*SHARED, *range(10, 15)]
B = [*SHARED, *range(20, 25)]


def insert(cache: HybridHarness, tokens, *, evicted: int = 0, prev: int = 0, **names):
    """Insert a prompt all of whose pages were computed anew; what is left is freed.

    Returns:
      The result, and the FULL pages that were offered.
    """
    size = cache.config.page_size
    count = len(tokens) // size
    pages, swa = cache.take(FULL, count), cache.take(SWA, count)
    let_go = -(-evicted // size)
    offered = [0] * min(let_go, count) + swa[let_go:]
    result = cache.insert(tokens, pages, prev, swa=offered, evicted=evicted, **names)
    for c, mine in ((FULL, pages), (SWA, swa)):
        cache.free_of(c, [i for i in mine if i in cache.owned[c]])
    return result, pages


def sizes(cache: HybridHarness) -> tuple[int, ...]:
    """FULL and SWA tokens of the tree; `check` has held them against a walk."""
    size = cache.config.page_size
    return tuple(
        (cache.num_evictable(c) + cache.num_protected(c)) * size for c in (FULL, SWA)
    )


def live(cache: HybridHarness, tokens) -> list[bool]:
    """Which pages of a cached prompt have an SWA page."""
    path = cache.match(tokens, full_only=True).path
    value = np.asarray(cache.cache.tree.value)[SWA]
    return (value[path[path != NULL]] != NULL).tolist()


def tombstoned() -> HybridHarness:
    """Two prompts of which the shared part has lost its SWA pages."""
    cache = HybridHarness(NARROW)
    insert(cache, A)
    insert(cache, B)
    assert sizes(cache) == (20, 20)
    assert cache.evict_all_of(swa=10) == (0, 10, 0)
    return cache


def test_insert_and_match_exact():
    cache = HybridHarness(WIDE)
    key = list(range(100, 110))
    result, pages = insert(cache, key)
    assert result.prefix_len == 0
    match = cache.match(key)
    assert match.hit_length == 10
    assert match.device_indices[:10].tolist() == pages
    assert match.best_match_node == match.last_device_node == match.last_host_node


def test_insert_and_match_shorter_prefix():
    cache = HybridHarness(WIDE)
    key = list(range(200, 208))
    _, pages = insert(cache, key)
    match = cache.match(key[:5])
    assert match.hit_length == 5
    assert match.device_indices[:6].tolist() == [*pages[:5], 0]
    assert match.best_match_node == match.last_device_node


def test_evict_and_reset_basic():
    cache = HybridHarness(WIDE)
    insert(cache, list(range(300, 316)))
    insert(cache, list(range(400, 416)))
    assert sizes(cache) == (32, 32)
    # A FULL page takes its SWA page with it, and the result counts both.
    assert cache.evict_all_of(full=8) == (8, 8, 0)
    assert sizes(cache) == (24, 24)
    cache.reset()
    assert sizes(cache) == (0, 0)
    assert cache.num_free(FULL) == cache.num_free(SWA) == 128


def test_two_sequences_with_shared_prefix():
    cache = HybridHarness(WIDE)
    a = list(range(1000, 1006))
    b = [*a[:4], *range(2000, 2004)]
    _, pages_a = insert(cache, a)
    _, pages_b = insert(cache, b)
    assert cache.match(a).device_indices[:6].tolist() == pages_a
    assert cache.match(b).device_indices[:8].tolist() == [*pages_a[:4], *pages_b[4:]]


def test_lock_prevents_eviction_until_unlocked():
    cache = HybridHarness(WIDE)
    key = list(range(500, 508))
    insert(cache, key)
    assert cache.num_evictable(FULL) == cache.num_evictable(SWA) == 8
    receipt = cache.lock(cache.match(key))
    for c in (FULL, SWA):  # the window is longer than the prompt: all of it is locked
        assert (cache.num_evictable(c), cache.num_protected(c)) == (0, 8)
    assert cache.evict_all_of(full=8, swa=8) == (0, 0, 0)
    assert sizes(cache) == (8, 8)
    cache.unlock(receipt)
    assert (cache.num_evictable(FULL), cache.num_protected(FULL)) == (8, 0)
    assert cache.evict_all_of(full=8) == (8, 8, 0)
    assert sizes(cache) == (0, 0)


def test_a_lock_holds_the_window_before_its_anchor_and_no_more():
    # Where the reference marks the window's first node with a uuid, a lock counts
    # pages back from its anchor.
    cache = HybridHarness(NARROW)
    key = list(range(20))
    insert(cache, key)
    receipt = cache.lock(cache.match(key))
    assert (cache.num_protected(FULL), cache.num_protected(SWA)) == (20, 4)
    assert cache.evict_all_of(full=20, swa=20) == (0, 16, 0)
    assert live(cache, key) == [False] * 16 + [True] * 4
    assert cache.hit(key) == 20
    cache.unlock(receipt)
    assert cache.evict_all_of(swa=20) == (0, 4, 0)
    assert cache.hit(key) == 0


def test_paged_match_aligns_to_page_size():
    cache = HybridHarness(PAGED_WIDE)
    key = list(range(600, 608))
    _, pages = insert(cache, key)
    assert cache.match(key).device_indices[:2].tolist() == pages
    match = cache.match(key[:6])
    assert match.hit_length == 4
    assert match.device_indices[:2].tolist() == [pages[0], 0]


def test_extra_key_namespace_isolation():
    cache = HybridHarness(WIDE)
    key = [1, 2, 3, 4, 5]
    names = ("adapter_a", "adapter_b", None)  # none and a string are two as well
    pages = [insert(cache, key, extra_key=name)[1] for name in names]
    for name, mine in zip(names, pages, strict=True):
        assert cache.match(key, extra_key=name).device_indices[:5].tolist() == mine
    assert len(set(map(tuple, pages))) == 3
    assert sizes(cache) == (15, 15)


def test_extra_key_same_namespace_sharing():
    cache = HybridHarness(WIDE)
    insert(cache, [10, 20, 30], extra_key="shared_key")
    result, _ = insert(cache, [10, 20, 30, 40, 50], extra_key="shared_key")
    assert result.prefix_len == 3
    assert cache.hit([10, 20, 30], extra_key="shared_key") == 3
    assert sizes(cache) == (5, 5)


def test_dp_rank_namespace_isolation():
    # One tree a rank: a leading axis, and the same functions under vmap.
    config = swa_config(4, num_pages=8)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), uhrc_fn.init(config))
    key = uhrc_fn.radix_key([1, 2, 3, 4, 5], config, num_pages=8)
    keys = uhrc_fn.stack_keys([key, key])

    @jax.jit
    def publish(caches, keys, counts):
        def one(cache, key, count):
            cache, pages = uhrc_fn.alloc_pages(cache, count, max_new=8)
            cache, swa = uhrc_fn.alloc_swa_pages(cache, count, max_new=8)
            params = InsertParams(key=key, value=pages.ids, swa_value=swa.ids)
            return uhrc_fn.insert(cache, params)[0]

        return jax.vmap(one)(caches, keys, counts)

    match = jax.jit(jax.vmap(uhrc_fn.match_prefix))
    counts = np.array([5, 0], np.int32)
    with_none = uhrc_fn.radix_key([], config, num_pages=8)
    one_only = uhrc_fn.stack_keys([key, with_none])
    caches = publish(caches, one_only, counts)
    caches, hit = match(caches, MatchPrefixParams(key=keys))
    assert hit.hit_length.tolist() == [5, 0]
    caches = publish(caches, uhrc_fn.stack_keys([with_none, key]), counts[::-1])
    caches, hit = match(caches, MatchPrefixParams(key=keys))
    assert hit.hit_length.tolist() == [5, 5]
    assert caches.evictable[:, int(SWA)].tolist() == [5, 5]
    uhrc_fn.raise_if_bad(caches)
    uhrc_fn.check_invariants(caches)


def test_evictable_size_returns_min():
    # Here each component has its own count; the least of them is the caller's to take.
    cache = HybridHarness(WIDE)
    insert(cache, list(range(10)))
    assert cache.num_evictable(FULL) == cache.num_evictable(SWA) == 10
    cache.evict_all_of(swa=3)
    assert (cache.num_evictable(FULL), cache.num_evictable(SWA)) == (10, 7)


def test_tombstone_creation():
    cache = tombstoned()
    assert sizes(cache) == (20, 10)
    assert (cache.num_evictable(FULL), cache.num_evictable(SWA)) == (20, 10)
    assert live(cache, A) == live(cache, B) == [False] * 10 + [True] * 5


def test_tombstone_prefix_match():
    cache = tombstoned()
    # A suffix of 5 covers the window of 4.
    assert cache.hit(A) == cache.hit(B) == 15
    match = cache.match(A[:13])
    assert (match.hit_length, match.full_kv_hit_length) == (0, 13)
    assert match.swa_branching_seqlen == 13
    assert match.lost_tokens.tolist() == [0, 13, 0]


@pytest.mark.parametrize(
    ("evicted", "revived"), [(0, 10), (5, 5), (15, 0)], ids=["1", "2", "3"]
)
def test_tombstone_healing_branch(evicted, revived):
    cache = tombstoned()
    before = cache.in_tree(FULL)
    result, _ = insert(cache, A, evicted=evicted)
    assert live(cache, A) == [False] * (10 - revived) + [True] * (revived + 5)
    assert result.adopted()[:, SWA].sum() == revived
    assert sizes(cache) == (20, 10 + revived)
    # The reference swaps the FULL pages of what it revives; here they stay.
    assert cache.in_tree(FULL) == before
    assert result.duplicate()[:15, FULL].all()


def test_cascade_delete_tombstone():
    cache = tombstoned()
    assert cache.evict_all_of(full=20) == (20, 10, 0)
    assert sizes(cache) == (0, 0)
    assert int(cache.cache.num_live_nodes) == 0


def test_size_tracking_consistency():
    cache = HybridHarness(NARROW)
    keys = [list(range(100 * i, 100 * i + 20)) for i in range(5)]
    for count, key in enumerate(keys, 1):
        insert(cache, key)
        assert sizes(cache) == (20 * count, 20 * count)
    assert cache.evict_all_of(swa=20) == (0, 20, 0)
    assert sizes(cache) == (100, 80)
    # The oldest FULL pages are the first prompt's; of its SWA pages 15 went before.
    assert cache.evict_all_of(full=20) == (20, 5, 0)
    assert sizes(cache) == (80, 75)
    insert(cache, [*keys[0], 999, 998, 997])
    assert sizes(cache) == (103, 98)
    assert cache.evict_all_of(full=103) == (103, 98, 0)
    assert sizes(cache) == (0, 0)


def test_protected_prefix_basic():
    cache = HybridHarness(NARROW)
    key = list(range(20))
    insert(cache, key)
    assert cache.hit(key) == 20
    assert cache.evict_all_of(swa=20) == (0, 20, 0)
    assert cache.hit(key) == 0
    result, _ = insert(cache, key, evicted=5, prev=10)
    assert live(cache, key) == [False] * 5 + [True] * 15
    assert cache.hit(key) == 20
    # What the request shares already is no duplicate.
    assert result.duplicate()[:, FULL].sum() == 10


def test_new_node_tombstone_split():
    cache = HybridHarness(NARROW)
    key = list(range(20))
    insert(cache, key, evicted=10)
    assert sizes(cache) == (20, 10)
    assert live(cache, key) == [False] * 10 + [True] * 10
    assert cache.hit(key) == 20


def test_evict_both_pools():
    cache = HybridHarness(NARROW)
    shared = list(range(8))
    a, b = [*shared, *range(10, 18)], [*shared, *range(20, 28)]
    insert(cache, a)
    insert(cache, b)
    assert sizes(cache) == (24, 24)
    assert cache.evict_all_of(swa=8) == (0, 8, 0)
    assert sizes(cache) == (24, 16)
    assert live(cache, a) == live(cache, b) == [False] * 8 + [True] * 8
    cache.match(a)
    assert cache.evict_all_of(full=8) == (8, 8, 0)
    assert sizes(cache) == (16, 8)
    assert cache.hit(a) == 16


def test_insert_after_tombstone_evict_cycle():
    cache = HybridHarness(NARROW)
    for cycle in range(5):
        key = list(range(100 * cycle, 100 * cycle + 16))
        insert(cache, key)
        before = sizes(cache)[1]
        assert cache.evict_all_of(swa=8) == (0, 8, 0)
        assert sizes(cache) == (16 * (cycle + 1), before - 8)
        insert(cache, key)
        assert live(cache, key) == [True] * 16
    full, swa = sizes(cache)
    assert full == 80
    assert cache.evict_all_of(full=full + 100) == (80, swa, 0)
    assert sizes(cache) == (0, 0)


def test_size_tracking_fuzz():
    # The reference's 50 steps; `check` walks the tree after each call.
    rng = random.Random(42)
    cache = HybridHarness(NARROW)
    for _ in range(50):
        op = rng.choice(["insert", "evict_swa", "evict_full"])
        if op == "insert":
            length, start = rng.randint(4, 32), rng.randint(0, 500)
            evicted = rng.choice([0, 0, 0, rng.randint(0, length)])
            insert(cache, list(range(start, start + length)), evicted=evicted)
            continue
        amount, (full, swa) = rng.randint(1, 16), sizes(cache)
        if op == "evict_swa":
            assert cache.evict_all_of(swa=amount) == (0, min(amount, swa), 0)
            assert sizes(cache) == (full, swa - min(amount, swa))
        else:
            freed = cache.evict_all_of(full=amount)
            assert freed[0] == min(amount, full)
            assert sizes(cache) == (full - freed[0], swa - freed[1])


def test_tombstone_reset_unconditional():
    # Two gaps: the run of live pages starts anew behind each of them.
    cache = tombstoned()
    insert(cache, A[:5], evicted=3)
    assert live(cache, A) == [False] * 3 + [True] * 2 + [False] * 5 + [True] * 5
    hits = [cache.hit(A[:length]) for length in (5, 10, 13, 14, 15)]
    assert hits == [0, 0, 0, 14, 15]


@pytest.mark.parametrize("evicted", [20, 10], ids=["beyond", "exact_boundary"])
def test_new_leaf_never_tombstone(evicted):
    # The reference frees all and makes no node. Here SWA never refuses a node: the
    # FULL pages go in, for a later request that computes the window alone.
    cache = HybridHarness(NARROW)
    key = list(range(10))
    result, _ = insert(cache, key, evicted=evicted)
    assert result.inserted_len == 10
    assert sizes(cache) == (10, 0)
    match = cache.match(key)
    assert (match.hit_length, match.full_kv_hit_length) == (0, 10)
    assert match.swa_branching_seqlen == 10


def test_delete_leaf_uses_child_key_fn():
    cache = HybridHarness(NARROW)
    shared = list(range(5))
    a, b = [*shared, *range(10, 15)], [*shared, *range(20, 25)]
    insert(cache, a)
    insert(cache, b)
    assert sizes(cache) == (15, 15)
    assert cache.evict_all_of(full=5) == (5, 5, 0)
    assert sizes(cache) == (10, 10)
    assert (cache.hit(a), cache.hit(b)) == (5, 10)


def test_delete_tombstone_leaf_uses_child_key_fn():
    cache = tombstoned()
    assert cache.evict_all_of(full=20) == (20, 10, 0)
    # The tombstones were found by their keys: the same prompts go in anew.
    assert cache.hit(A) == 0
    assert insert(cache, A)[0].prefix_len == 0
    assert cache.hit(A) == 15


def test_evict_req_swa_uses_locked_tree_boundary():
    cache = HybridHarness(NARROW)
    key = list(range(20))
    insert(cache, key)
    receipt = cache.lock(cache.match(key))
    protected, tail = 20, cache.take(SWA, 10)
    frontier = int(swa_frontier(30, 4, 1))
    assert frontier == 25
    mine = tail[: frontier - protected]
    before = cache.num_free(SWA)
    cache.free_of(SWA, mine)
    assert cache.num_free(SWA) == before + 5
    assert live(cache, key) == [True] * 20
    cache.unlock(receipt)


def test_evict_req_swa_page_alignment_uses_tree_boundary():
    cache = HybridHarness(PAGED)
    key = list(range(8))
    insert(cache, key)
    tail = cache.take(SWA, 3)  # tokens 8 to 20
    frontier = int(swa_frontier(20, 4, 4))
    assert frontier == 12
    cache.free_of(SWA, tail[: (frontier - 8) // 4])
    assert cache.owned[SWA] == set(tail[1:])
    assert live(cache, key) == [True] * 2


def test_swa_evicted_seqlen_page_alignment_assertion():
    # The reference asserts. Here a page that straddles the boundary is not adopted.
    cache = HybridHarness(PAGED)
    shared = list(range(8))
    a, b = [*shared, *range(10, 18)], [*shared, *range(20, 28)]
    insert(cache, a)
    insert(cache, b)
    assert cache.evict_all_of(swa=8) == (0, 8, 0)
    pages, swa = cache.take(FULL, 4), cache.take(SWA, 4)
    result = cache.insert(a, pages, swa=swa, evicted=3)
    assert result.adopted()[:4, SWA].tolist() == [False, True, False, False]
    assert live(cache, a) == [False, True, True, True]
    assert cache.take_status() == 0


def test_cache_unfinished_req_writeback_range():
    cache = HybridHarness(WIDE)
    insert(cache, list(range(10)))
    first = cache.match(list(range(10))).device_indices[:10].tolist()
    result, pages = insert(cache, list(range(20)), prev=10)
    assert result.page_table[:20].tolist() == [*first, *pages[10:]]
    match = cache.match(list(range(20)))
    assert match.hit_length == 20
    assert match.device_indices[:10].tolist() == first
    assert sizes(cache) == (20, 20)
