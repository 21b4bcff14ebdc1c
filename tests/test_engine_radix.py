"""The legacy tree, with the numbers of sglang-jax's own tests of it."""

import numpy as np
import pytest

from uhrc_fn.engine.allocator import PageAllocator
from uhrc_fn.engine.chunk_cache import ChunkCache
from uhrc_fn.engine.params import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from uhrc_fn.engine.radix_cache import RadixCache
from uhrc_fn.engine.request import Request, RequestTable
from uhrc_fn.engine.tree_node import TreeNode, match_length


def radix(page_size=1, dp_size=1, num_pages=64, disable=False) -> RadixCache:
    table = RequestTable(8, 64, page_size)
    allocator = PageAllocator(num_pages, page_size, dp_size)
    return RadixCache(table, allocator, disable=disable)


def publish(cache, tokens, **tags):
    """Insert tokens at locations of their own; frees duplicates, returns locations."""
    key = RadixKey(tokens, **tags)
    given = cache.alloc(len(tokens), key.dp_rank).full
    result = cache.insert(InsertParams(key, given[: len(tokens)]))
    cache.free(given[: result.prefix_len], key.dp_rank)
    cache.free(given[result.inserted_len :], key.dp_rank)
    return given, result


def match(cache, tokens, **tags):
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens, **tags)))


def hit(cache, tokens, **tags) -> int:
    length = cache.peek_prefix_len(RadixKey(tokens, **tags))
    assert match(cache, tokens, **tags).hit_length == length
    return length


def check(cache) -> None:
    """Counters against the tree; every page is free, or the tree's, once."""
    for rank in range(cache.dp_size):
        nodes = [n for n in cache._nodes() if n.key.rank == rank]
        held = np.concatenate([[0], *(n.value // cache.page_size for n in nodes)])
        pages = [*cache.allocator.free_pages[rank], *np.unique(held)[1:]]
        assert sorted(pages) == list(range(1, cache.allocator.num_pages + 1))
        free = sum(len(n) for n in nodes if not n.lock_ref)
        assert cache.full_evictable_size(rank) == free
        locked = sum(len(n) for n in nodes if n.lock_ref)
        assert cache.full_protected_size(rank) == locked
        assert cache.total_size(rank) == free + locked


def test_tree_node_basic():
    first, second = TreeNode(), TreeNode()
    assert first.lock_ref == 0 and first.evicted and first.id != second.id
    second.last_access = 1
    assert first < second


def test_key_match_functions():
    left, right = RadixKey([1, 2, 3, 4, 5, 6]), RadixKey([1, 2, 4, 4])
    assert match_length(left, right) == 2
    paged = RadixKey([1, 2, 3, 4, 9, 9])
    assert match_length(left, paged, page_size=2) == 4
    # Never more than a key has, aligned or not.
    assert match_length(RadixKey([1, 2, 3]), RadixKey([1, 2, 3]), page_size=2) == 2
    with pytest.raises(ValueError, match="one namespace"):
        match_length(left, RadixKey([1, 2], extra_key="lora"))


def test_disabled_cache():
    cache = radix(disable=True)
    assert cache.insert(InsertParams([1, 2, 3], [1, 2, 3])).prefix_len == 0
    found = match(cache, [1, 2, 3])
    assert found.hit_length == 0 and found.last_device_node is cache.root_node
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 0
    assert cache.inc_lock_ref(found.last_device_node).delta == 0


def test_basic_insert_and_match():
    cache = radix()
    given, result = publish(cache, [1, 2, 3, 4, 5])
    assert (result.prefix_len, result.inserted_len) == (0, 5)
    assert match(cache, [1, 2, 3, 4, 5]).device_indices.tolist() == given.tolist()
    # A partial match splits the edge; the same locations come back.
    found = match(cache, [1, 2, 9])
    assert found.device_indices.tolist() == given[:2].tolist()
    assert len(found.last_device_node) == 2
    assert hit(cache, [7, 8]) == 0
    assert match(cache, [7, 8]).last_device_node is cache.root_node
    check(cache)


def test_basic_insert_with_value():
    cache = radix()
    cache.insert(InsertParams([1, 2, 3], [11, 12, 13]))
    assert match(cache, [1, 2]).device_indices.tolist() == [11, 12]
    with pytest.raises(ValueError, match="wanted one each"):
        cache.insert(InsertParams([4, 5, 6], [1]))


def test_prefix_extension():
    cache = radix()
    publish(cache, [1, 2, 3])
    _, result = publish(cache, [1, 2, 3, 4, 5])
    assert result.prefix_len == 3
    assert hit(cache, [1, 2, 3]) == 3 and hit(cache, [1, 2, 3, 4, 5]) == 5
    check(cache)


def test_lock_reference_counting():
    cache = radix()
    publish(cache, [1, 2, 3])
    node = match(cache, [1, 2, 3]).last_device_node
    assert (cache.evictable_size(), cache.protected_size()) == (3, 0)
    lock = cache.inc_lock_ref(node)
    assert lock.delta == -3
    assert (cache.evictable_size(), cache.protected_size()) == (0, 3)
    assert cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 0
    assert cache.dec_lock_ref(node, lock.to_dec_params()).delta == 3
    assert (cache.evictable_size(), cache.protected_size()) == (3, 0)
    with pytest.raises(RuntimeError, match="not locked"):
        cache.dec_lock_ref(node)
    cache.evict(EvictParams(num_tokens=3))
    with pytest.raises(RuntimeError, match="left the tree"):
        cache.inc_lock_ref(node)
    check(cache)


def test_paged_cache():
    cache = radix(page_size=4)
    _, result = publish(cache, list(range(10)))
    assert result.inserted_len == 8
    assert hit(cache, list(range(7))) == 4
    assert hit(cache, list(range(3))) == 0
    check(cache)


def test_eviction_takes_the_oldest_leaf_whole():
    cache = radix()
    publish(cache, [1, 2, 3, 4])
    publish(cache, [5, 6, 7, 8])
    match(cache, [1, 2, 3, 4])
    assert cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 4
    assert hit(cache, [5, 6, 7, 8]) == 0 and hit(cache, [1, 2, 3, 4]) == 4
    assert cache.total_size() == 4
    check(cache)


def test_eviction_goes_on_to_parents():
    cache = radix()
    publish(cache, [1, 2, 3, 4])
    publish(cache, [1, 2, 5, 6])
    assert cache.evict(EvictParams(num_tokens=6)).num_tokens_evicted == 6
    assert cache.total_size() == 0
    check(cache)


def test_a_diverging_match_does_not_protect_what_it_leaves():
    cache = radix()
    publish(cache, [1, 2, 3, 4])
    publish(cache, [5, 6, 7, 8])
    match(cache, [1, 2, 9, 9])
    cache.evict(EvictParams(num_tokens=1))
    assert hit(cache, [1, 2, 3, 4]) == 2 and hit(cache, [5, 6, 7, 8]) == 4


def test_allocation_evicts_the_deficit_only():
    cache = radix(num_pages=8)
    publish(cache, [1, 2, 3, 4])
    publish(cache, [5, 6])
    assert cache.alloc(9) is None and cache.total_size() == 6
    given = cache.alloc(4)
    assert len(given.full) == 4 and cache.total_size() == 2
    cache.free(given.full)
    with pytest.raises(ValueError, match="free already"):
        cache.free(given.full)
    check(cache)


def test_empty_key_handling():
    cache = radix()
    assert cache.insert(InsertParams([], [])).inserted_len == 0
    found = match(cache, [])
    assert found.device_indices.dtype == np.int32 and found.hit_length == 0
    assert found.best_match_node is found.last_host_node is cache.root_node


def test_pretty_print(capsys):
    cache = radix()
    publish(cache, [1, 2, 3])
    cache.pretty_print()
    assert "3 tokens" in capsys.readouterr().out


def test_reset_functionality():
    cache = radix()
    publish(cache, [1, 2, 3])
    cache.inc_lock_ref(match(cache, [1, 2, 3]).last_device_node)
    cache.reset()
    assert cache.root_node.lock_ref == 1
    assert cache.total_size() == cache.protected_size() == 0
    assert cache.available_size() == 64
    check(cache)


def test_extra_key_namespaces():
    cache = radix()
    publish(cache, [1, 2, 3], extra_key="a")
    _, again = publish(cache, [1, 2, 3], extra_key="a")
    assert again.prefix_len == 3
    assert hit(cache, [1, 2, 3]) == hit(cache, [1, 2, 3], extra_key="b") == 0
    publish(cache, [1, 2, 3])
    # A plain list is a key without tags.
    assert cache.peek_prefix_len([1, 2, 3]) == 3
    assert cache.total_size() == 6


def test_radix_key_slicing_keeps_tags():
    key = RadixKey([1, 2, 3, 4], "lora", 2, "salt")
    part = key[1:3]
    assert list(part) == [2, 3] and part.namespace == key.namespace
    assert list(key[-1]) == [4] and len(key[0]) == 1
    assert "lora" in repr(key)


def test_combined_extra_key_and_dp_rank():
    cache = radix(dp_size=2)
    tags = [
        {},
        {"extra_key": "a"},
        {"dp_rank": 0},
        {"extra_key": "a", "dp_rank": 0},
        {"dp_rank": 1},
    ]
    for tag in tags:
        _, result = publish(cache, [1, 2, 3], **tag)
        assert result.prefix_len == 0
    assert [hit(cache, [1, 2, 3], **tag) for tag in tags] == [3] * 5
    # No rank is accounted to rank 0.
    assert (cache.total_size(0), cache.total_size(1)) == (12, 3)
    assert cache.evict(EvictParams(num_tokens=99, dp_rank=1)).num_tokens_evicted == 3
    assert (cache.total_size(0), cache.total_size(1)) == (12, 0)
    with pytest.raises(ValueError, match="wanted 0 to 1"):
        hit(cache, [1], dp_rank=2)
    check(cache)


def serve(cache, req, prompt: int, chunk: int, outputs=()) -> int:
    """Serve a request whole; returns its hit."""
    found = cache.start_req(req)
    while req.kv_committed_len < prompt:
        end = min(req.kv_committed_len + chunk, prompt)
        assert cache.extend_req(req, end)
        req.kv_committed_len = end
        if end < prompt:
            cache.cache_unfinished_req(req)
    for token in outputs:
        req.output_ids.append(token)
        assert cache.extend_req(req, req.num_tokens - 1)
        req.kv_committed_len = req.num_tokens - 1
    cache.cache_finished_req(req)
    return found.hit_length


@pytest.mark.parametrize("page_size", [1, 4])
def test_chunked_request_then_finish(page_size):
    cache = radix(page_size)
    req = Request(list(range(12)))
    cache.start_req(req)
    cache.extend_req(req, 8)
    req.kv_committed_len = 8
    cache.cache_unfinished_req(req)
    assert req.cache_protected_len == cache.protected_size() == 8
    assert len(req.prefix_indices) == 8
    cache.extend_req(req, 12)
    req.kv_committed_len = 12
    cache.cache_unfinished_req(req)
    assert (cache.protected_size(), cache.evictable_size()) == (12, 0)
    req.output_ids = [50, 51, 52, 53, 54]
    cache.extend_req(req, 16)
    req.kv_committed_len = 16
    cache.cache_finished_req(req)
    assert (cache.protected_size(), cache.evictable_size()) == (0, 16)
    assert req.req_pool_idx is None and req.last_node is None
    check(cache)


@pytest.mark.parametrize("is_insert", [True, False])
def test_duplicates_and_aborts_leak_nothing(is_insert):
    cache = radix(page_size=4)
    twins = [Request(list(range(18))) for _ in range(3)]
    for req in twins:
        assert cache.start_req(req).hit_length == 0
        cache.extend_req(req, 18)
        req.kv_committed_len = 18
    for req in twins:
        cache.cache_finished_req(req, is_insert=is_insert)
    check(cache)
    assert cache.total_size() == (16 if is_insert else 0)


@pytest.mark.parametrize("kind", ["disabled", "chunk"])
def test_without_a_tree_everything_is_given_back(kind):
    table, allocator = RequestTable(2, 64, 4), PageAllocator(16, 4)
    cache = RadixCache(table, allocator, disable=True)
    if kind == "chunk":
        cache = ChunkCache(table, allocator, num_recurrent_slots=2)
    req = Request(list(range(10)))
    assert cache.start_req(req).hit_length == 0
    assert cache.extend_req(req, 10)
    req.kv_committed_len = 10
    cache.cache_unfinished_req(req)
    assert req.prefix_indices.tolist() == table.full[req.req_pool_idx, :10].tolist()
    assert cache.assert_recurrent_slot_ledger(0, [req]) == (kind == "chunk")
    cache.cache_finished_req(req)
    assert cache.available_size() == 64 and len(table.free_rows) == 2
    assert serve(cache, Request([1, 2, 3]), 3, 2, outputs=[5, 6]) == 0
    assert cache.available_size() == 64


def test_requests_wait_for_rows_and_slots():
    table = RequestTable(1, 16)
    cache = ChunkCache(table, PageAllocator(8), num_recurrent_slots=2)
    first, second = Request([1, 2]), Request([3, 4])
    assert cache.start_req(first) is not None
    assert cache.start_req(second) is None and second.req_pool_idx is None
    cache.cache_finished_req(first)
    assert cache.start_req(second) is not None
    assert cache.recurrent_available_size() == 1
    assert not cache.extend_req(second, 9) and second.kv_allocated_len == 0
    with pytest.raises(AssertionError, match="leaked"):
        cache.assert_recurrent_slot_ledger(0, [])
