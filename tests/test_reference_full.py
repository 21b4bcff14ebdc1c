"""What sglang-jax's tests of its unified radix tree ask of FULL, with their numbers.

A tree of token edges splits where keys part; here each test says what that means for
a user: hits, duplicates, counters, victims.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import ONE_TOKEN, Harness, numpy, ring_ids, row, tree_pages

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams
from uhrc_fn.state import Ring

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [1, 2, 3, 4, 90, 91, 92, 93]
C = [51, 52, 53, 54, 55, 56, 57, 58]
PAGE_128 = CacheConfig(page_size=128, num_pages=8, max_prefix_pages=4)


def live_nodes(cache: Harness) -> int:
    return int(cache.cache.num_live_nodes)


def test_basic_insert_and_match():
    cache = Harness(ONE_TOKEN)
    pages = cache.alloc(8).ids[:8]
    result = cache.insert(A, pages)
    assert result.prefix_len == 0
    assert result.inserted_len == 8
    match = cache.match(A)
    assert match.device_indices[:8].tolist() == pages.tolist()
    assert match.hit_length == 8
    assert match.best_match_node == match.last_device_node == result.path[7]
    again = cache.alloc(8).ids[:8]
    result = cache.insert(A, again)
    assert result.prefix_len == 8
    assert result.duplicate()[:8, 0].all() and not result.adopted().any()
    assert result.page_table[:8].tolist() == pages.tolist()
    assert cache.size == 8


def test_partial_match_splits_node():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    match = cache.match(B)
    assert match.hit_length == match.full_kv_hit_length == 4
    assert match.best_match_node == cache.match(A[:4]).best_match_node
    pages = cache.alloc(8).ids[:8]
    result = cache.insert(B, pages)
    assert result.prefix_len == 4
    assert result.inserted_len == 8
    assert result.adopted()[:, 0].tolist() == [False] * 4 + [True] * 4 + [False] * 8
    assert cache.size == 12
    assert cache.hit(A) == cache.hit(B) == 8


def test_empty_and_no_match():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    for tokens in ([], C):
        match = cache.match(tokens)
        assert match.device_indices.dtype == np.int32
        assert not match.device_indices.any()
        assert match.best_match_node == match.last_device_node == 0
        assert match.hit_length == match.full_kv_hit_length == 0
        assert match.host_hit_length == 0


def test_lock_protects_from_eviction():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    receipt = cache.lock(cache.match(A))
    assert receipt.delta == -8
    assert (cache.evictable, cache.protected) == (0, 8)
    assert cache.evict(8) == 0
    assert cache.hit(A) == 8
    result = cache.unlock(receipt)
    assert result.is_released and result.delta == 8
    assert (cache.evictable, cache.protected) == (8, 0)
    assert cache.evict(8) == 8
    assert cache.size == 0
    assert cache.hit(A) == 0


def test_lru_eviction_order():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    cache.publish(C)
    cache.match(A)
    assert cache.evict(8) == 8
    assert cache.hit(C) == 0
    assert cache.hit(A) == 8


def test_equivalence_with_radix_cache_page1():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    result = cache.publish(B)
    assert result.prefix_len == 4
    assert cache.size == 12
    cache.publish(C[:4])
    assert cache.size == 16
    receipt = cache.lock(cache.match(A))
    assert (cache.evictable, cache.protected) == (8, 8)
    tail = cache.match(B).device_indices[4:8].tolist()
    cache.match(C[:4])
    # The one tail that is oldest goes, its deepest page first.
    assert cache.evict(2) == 2
    assert cache.free[-2:] == [tail[3], tail[2]]
    assert cache.hit(B) == 6
    assert cache.evict(2) == 2
    assert cache.free[-2:] == [tail[1], tail[0]]
    assert cache.hit(B) == 4
    assert cache.evict() == 4
    assert (cache.evictable, cache.protected) == (0, 8)
    cache.unlock(receipt)
    assert cache.evict() == 8
    assert cache.size == 0 and len(cache.free) == 24


def test_eviction_of_all_takes_everything():
    cache = Harness(ONE_TOKEN)
    for tokens in (A, B, C[:4]):
        cache.publish(tokens)
    assert cache.evict(16) == 16
    assert live_nodes(cache) == 0
    assert [cache.hit(t) for t in (A, B, C)] == [0, 0, 0]


def test_equivalence_with_radix_cache_page128():
    cache = Harness(PAGE_128)
    first = list(range(1000, 1300))
    other = first[:128] + list(range(5000, 5142))
    assert len(first) == 300 and len(other) == 270
    assert cache.publish(first).inserted_len == 256
    result = cache.publish(other)
    assert result.prefix_len == 128
    assert result.inserted_len == 256
    assert cache.size == 3 * 128
    assert cache.hit(first) == cache.hit(other) == 256
    cache.match(first)
    # The tail of the one that was used longer ago.
    assert cache.evict(128) == 128
    assert cache.hit(first) == 256
    assert cache.hit(other) == 128
    assert cache.evict(1) == 128
    assert cache.hit(first) == 128
    assert cache.evict() == 128
    assert cache.size == 0


def test_extra_key_isolation():
    cache = Harness(ONE_TOKEN)
    x = cache.publish(A, extra_key="x").page_table[:8]
    y = cache.publish(A, extra_key="y").page_table[:8]
    assert not set(x.tolist()) & set(y.tolist())
    assert cache.size == 16
    assert cache.match(A, extra_key="x").device_indices[:8].tolist() == x.tolist()
    assert cache.match(A, extra_key="y").device_indices[:8].tolist() == y.tolist()
    assert cache.hit(A, extra_key="z") == cache.hit(A) == 0


def test_evict_device_leaf_tombstones_and_unlinks():
    cache = Harness(ONE_TOKEN)
    result = cache.publish(A)
    path = result.path[:8]
    assert cache.evict(8) == 8
    tree = numpy(cache.cache.tree)
    assert (tree.value[0][path] == -1).all()
    assert (tree.parent[path] == -1).all()
    assert (tree.num_children == 0).all()
    assert not tree_pages(cache.cache)
    assert sorted(ring_ids(cache.cache, Ring.NODES)[-8:]) == sorted(path.tolist())


def test_reset_empties_the_tree_even_under_a_lock():
    cache = Harness(ONE_TOKEN)
    cache.publish(A)
    receipt = cache.lock(cache.match(A))
    cache.alloc(3)
    cache.reset()
    assert (cache.evictable, cache.protected) == (0, 0)
    assert len(cache.free) == 24
    assert live_nodes(cache) == 0
    assert cache.hit(A) == 0
    assert not cache.unlock(receipt).is_released


def test_dp_rank_isolation():
    # One tree a rank: a leading axis, and the same functions under vmap.
    config = CacheConfig(page_size=1, num_pages=8, max_prefix_pages=4)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), uhrc_fn.init(config))
    key = uhrc_fn.radix_key([7, 8, 9], config)
    keys = uhrc_fn.stack_keys([key, key])

    @jax.jit
    def publish(caches, keys, num_pages):
        def one(cache, key, num_pages):
            cache, alloc = uhrc_fn.alloc_pages(cache, num_pages, max_new=4)
            return uhrc_fn.insert(cache, InsertParams(key=key, value=alloc.ids))

        return jax.vmap(one)(caches, keys, num_pages)

    @jax.jit
    def match(caches, keys):
        return jax.vmap(uhrc_fn.match_prefix)(caches, MatchPrefixParams(key=keys))

    @jax.jit
    def evict(caches, num_tokens):
        one = lambda c, n: uhrc_fn.evict(c, EvictParams(num_tokens=n))
        return jax.vmap(one)(caches, num_tokens)

    caches, _ = publish(caches, keys, np.array([3, 3], np.int32))
    assert caches.evictable[:, 0].tolist() == [3, 3]
    shorter = uhrc_fn.stack_keys([uhrc_fn.radix_key([], config, num_pages=4), key])
    caches, hit = match(caches, shorter)
    assert hit.hit_length.tolist() == [0, 3]
    caches, result = evict(caches, np.array([3, 0], np.int32))
    assert result.num_tokens_evicted.tolist() == [3, 0]
    caches, hit = match(caches, keys)
    assert hit.hit_length.tolist() == [0, 3]
    assert caches.evictable[:, 0].tolist() == [0, 3]
    # Rank 0 has its pages back, rank 1 has not.
    assert len(ring_ids(row(caches, 0), Ring.FULL)) == 8
    assert len(ring_ids(row(caches, 1), Ring.FULL)) == 5
    uhrc_fn.raise_if_bad(caches)
