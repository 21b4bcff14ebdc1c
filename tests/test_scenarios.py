"""Faults that real prefix caches had, replayed; each docstring names the one-line
fault that would turn its test red."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    EVERYTHING,
    ONE_TOKEN,
    SMALL,
    Harness,
    canonical,
    node_keys,
    numpy,
    ring_ids,
    same,
)
from scenario_caches import a, b

import uhrc_fn
from uhrc_fn import CacheConfig, InsertParams, Status
from uhrc_fn.state import Ring

THREE_TOKENS = CacheConfig(page_size=3, num_pages=8, max_prefix_pages=2)


def test_B04_a_lock_holds_the_node_it_was_taken_on():
    """Fault: the lock loop steps to the parent before it counts."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 4))
    cache.publish(a(0, 8))
    receipt = cache.lock(cache.match(a(0, 8)))
    assert cache.evict() == 0
    assert cache.hit(a(0, 8)) == 8
    cache.unlock(receipt)
    assert cache.evict() == 8


def test_B05_a_lock_pins_what_matched_and_no_more():
    """Fault: a partial match locks the whole edge that it ends in."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 8))
    receipt = cache.lock(cache.match(a(0, 5)))
    assert cache.evict() == 3
    cache.publish(a(0, 5) + b(0, 3))
    assert cache.size == 8
    cache.unlock(receipt)
    assert cache.evict() == 8
    assert cache.size == 0
    assert len(cache.free) == 24


def test_B06_evictable_and_protected_survive_an_extra_unlock():
    """Fault: an unlock takes from the counters without asking the ledger."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 6))
    cache.publish(a(0, 3) + b(0, 3))
    receipts = []
    for tokens in (a(0, 6), a(0, 2), a(0, 3) + b(0, 3), a(0, 6), b(0, 1)):
        receipts.append(cache.lock(cache.match(tokens)))
        assert cache.evictable + cache.protected == 9
    assert cache.protected == 9
    for receipt in (receipts[2], receipts[0]):
        cache.unlock(receipt)
        assert cache.evictable + cache.protected == 9
    assert (cache.evictable, cache.protected) == (3, 6)
    assert cache.take_status() == Status.OK
    before = canonical(cache.cache)
    assert not cache.unlock(receipts[0]).is_released
    assert cache.take_status() == Status.STALE_RECEIPT
    assert canonical(cache.cache) == before
    for receipt in (receipts[4], receipts[3], receipts[1]):
        cache.unlock(receipt)
    assert (cache.evictable, cache.protected) == (9, 0)


def test_B09_a_receipt_does_not_outlive_its_node():
    """Fault: an unlock goes by node id without asking for the generation."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 1))
    match = cache.match(a(0, 1))
    receipt = cache.lock(match)
    cache.unlock(receipt)
    # All nodes are used once more, so that this one's id comes round.
    assert cache.evict() == 1
    cache.publish(b(0, 16))
    cache.publish(b(20, 28))
    stamps = np.asarray(cache.cache.tree.generation)
    assert stamps[match.best_match_node] == match.generation + 1
    before = canonical(cache.cache)
    assert not cache.unlock(receipt).is_released
    assert cache.take_status() == Status.STALE_RECEIPT
    assert cache.lock(match).serial == 0
    assert cache.take_status() == Status.STALE_MATCH
    assert canonical(cache.cache) == before


def test_B10_a_branch_inside_a_copy_source_keeps_both_halves():
    """Fault: a split leaves the lock with the younger half only."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 8))
    receipt = cache.lock(cache.match(a(0, 8)))
    cache.publish(a(0, 3) + b(0, 3))
    assert cache.evict() == 3
    assert cache.hit(a(0, 8)) == 8
    assert cache.protected == 8
    cache.unlock(receipt)
    assert cache.evict() == 8


def test_B15_draft_pages_past_the_committed_length_come_back():
    """Fault: pages reserved are counted by the length reserved, not committed."""
    cache = Harness(SMALL)
    prompt = a(0, 3)
    pages = cache.alloc(2).ids[:2].tolist()
    for accepted in (1, 2, 1):
        # Each step reserves for four draft tokens and keeps an unaligned length.
        wanted = max(-(-(len(prompt) + 4) // 2) - len(pages), 0)
        pages += cache.alloc(wanted).ids[:wanted].tolist()
        prompt = a(0, len(prompt) + accepted)
        result = cache.insert(prompt, pages)
        assert result.inserted_len == len(prompt) // 2 * 2
        used = -(-len(prompt) // 2)
        cache.free_pages(pages[used:])
        pages = pages[:used]
        assert len(cache.free) + used == 16
    cache.free_pages(cache.held)
    assert cache.size == 6
    assert cache.evict() == 6
    assert len(cache.free) == 16
    assert cache.take_status() == Status.OK


def test_B20_duplicates_are_replaced_before_they_are_freed():
    """Fault: the table keeps the caller's duplicate instead of the tree's page."""
    cache = Harness(ONE_TOKEN)
    first, second = cache.alloc(8).ids[:8], cache.alloc(8).ids[:8]
    cache.insert(a(0, 8), first)
    result = cache.insert(a(0, 8), second)
    assert result.page_table[:8].tolist() == first.tolist()
    cache.free_pages(second[result.duplicate()[:8, 0]])
    assert not set(result.page_table[:8].tolist()) & set(cache.free)
    assert cache.take_status() == Status.OK


def test_B26_a_key_below_a_page_leaves_no_trace():
    """Fault: a key that truncates to nothing makes a node, or is counted by key."""
    cache = Harness(THREE_TOKENS)
    before = canonical(cache.cache)
    cache.match([])  # the clock alone
    clock = canonical(cache.cache)["CLOCK"]
    assert cache.hit(a(0, 2)) == 0
    pages = cache.alloc(1).ids[:1]
    result = cache.insert(a(0, 2), pages)
    assert result.prefix_len == result.inserted_len == 0
    assert (result.path == -1).all() and not result.adopted().any()
    cache.free_pages(pages)
    after = canonical(cache.cache)
    for changes in ("CLOCK", "FULL"):
        before.pop(changes)
        after.pop(changes)
    assert after == before
    assert int(cache.cache.clock) == 2 * clock


def test_B27_a_query_one_token_short_of_the_page_makes_no_node():
    """Fault: a key aligned down to nothing makes an empty node."""
    cache = Harness(THREE_TOKENS)
    cache.publish(a(0, 3))
    match = cache.match(a(0, 2))
    assert match.hit_length == 0 and match.best_match_node == 0
    pages = cache.alloc(1).ids[:1]  # a page is there for it, and yet it makes no node
    assert cache.insert(a(0, 2), pages).inserted_len == 0
    cache.free_pages(pages)
    assert int(cache.cache.num_live_nodes) == 1
    assert cache.evict() == 3


def test_B28_keys_that_part_inside_a_page_are_sibling_pages():
    """Fault: a node is split at a token that is no page boundary."""
    cache = Harness(THREE_TOKENS)
    abc, abd = [1, 2, 3], [1, 2, 4]
    cache.publish(abc)
    assert cache.hit(abd) == 0
    assert cache.publish(abd).prefix_len == 0
    keys = sorted(key[1:] for key in node_keys(cache.cache).values())
    assert keys == [((1, 2, 3),), ((1, 2, 4),)]
    assert cache.hit(abc) == cache.hit(abd) == 3


def test_B33_a_probe_changes_no_bit():
    """Fault: a peek refreshes recency, counts a tick, or asks for less than a match."""
    cache = Harness(ONE_TOKEN)
    cache.publish(a(0, 8))
    cache.publish(a(0, 4) + b(0, 2))
    for tokens in (a(0, 8), a(0, 4) + b(0, 8), b(0, 3), []):
        before = numpy(cache.cache)
        peeked = cache.peek(tokens)
        assert same(before, cache.cache)
        assert same(peeked, cache.match(tokens))


def test_B45_victims_do_not_depend_on_when_pages_are_freed():
    """Fault: a free moves recency, or the order of victims follows the free list."""
    orders = []
    for is_deferred in (False, True):
        cache = Harness(ONE_TOKEN)
        late = []
        for i in range(3):
            cache.publish(a(0, i) + b(10 * i, 10 * i + 4))
            spare = cache.alloc(2).ids[:2]
            if is_deferred:
                late.extend(spare)
            else:
                cache.free_pages(spare)
        cache.free_pages(late[::-1])
        # Those pages come round, in the one case in another order than in the other.
        cache.publish(b(40, 50))
        cache.match(b(0, 2))
        keys = node_keys(cache.cache)
        victims = []
        while cache.size:
            cache.evict(1)
            left = node_keys(cache.cache)
            victims += [keys[n] for n in keys if n not in left]
            keys = left
        orders.append(victims)
    assert len(orders[0]) == 4 + 5 + 5 + 10
    assert orders[0] == orders[1]


def test_B59_namespaces_never_meet():
    """Fault: parts of a namespace are joined without their lengths."""
    cache = Harness(ONE_TOKEN)
    names = [
        {"extra_key": "a", "cache_salt": "bc"},
        {"extra_key": "ab", "cache_salt": "c"},
        {"extra_key": "abc"},
        {"cache_salt": "abc"},
        {"extra_key": ""},
        {},
    ]
    for i, name in enumerate(names):
        assert cache.hit(a(0, 4), **name) == 0
        assert cache.publish(a(0, 4), **name).prefix_len == 0
        assert cache.size == 4 * (i + 1)
    tables = [cache.match(a(0, 4), **name).device_indices[:4] for name in names]
    assert len({int(page) for table in tables for page in table}) == 24
    assert len(set(node_keys(cache.cache).values())) == 24
    # Pressure in one namespace takes from all, and the totals still add up.
    assert cache.evict(8) == 8
    assert [cache.hit(a(0, 4), **n) for n in names] == [0, 0, 4, 4, 4, 4]


def churn(cache, suffixes, config):
    """Serve one prefix with each of `suffixes`, in one loop on the device."""

    def serve(cache, suffix):
        tokens = jnp.concatenate([jnp.arange(4, dtype=jnp.int32), suffix[None] + 10])
        tokens = jnp.pad(tokens, (0, config.max_prefix_pages - 5))
        key = uhrc_fn.RadixKey(token_ids=tokens, length=jnp.int32(5))
        params = uhrc_fn.MatchPrefixParams(key=key)
        cache, match = uhrc_fn.match_prefix(cache, params)
        cache, receipt = uhrc_fn.inc_lock_ref(cache, match)
        cache, alloc = uhrc_fn.alloc_pages(cache, 5 - match.hit_length, max_new=5)
        params = InsertParams(
            key=key,
            value=uhrc_fn.page_table(match, alloc),
            prev_prefix_len=match.hit_length,
        )
        cache, result = uhrc_fn.insert(cache, params)
        cache, _ = uhrc_fn.dec_lock_ref(cache, receipt)
        return cache, result.prefix_len

    return jax.lax.scan(serve, cache, suffixes)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_B61_B62_unique_suffixes_leave_no_residue(rounds):
    """Fault: a victim's node, table entry or parent link is not given back; or an
    operation keeps a second buffer alive."""
    cache = Harness(ONE_TOKEN)
    run = jax.jit(churn, static_argnames="config", donate_argnums=0)
    size = [x.nbytes for x in jax.tree.leaves(cache.cache)]
    live = None
    for i in range(rounds):
        suffixes = np.arange(i * 5000, (i + 1) * 5000, dtype=np.int32)
        cache.cache, prefix = run(cache.cache, suffixes, config=ONE_TOKEN)
        # The shared prefix is never lost: it is always fresher than the suffixes.
        assert np.asarray(prefix)[1:].min() == 4
        assert cache.take_status() == Status.OK
        assert int(cache.cache.num_live_nodes) == 24
        assert [x.nbytes for x in jax.tree.leaves(cache.cache)] == size
        del prefix
        now = sum(x.nbytes for x in jax.live_arrays())
        assert live is None or now == live
        live = now
        cache.check()
    assert cache.evict(EVERYTHING) == 24
    assert len(ring_ids(cache.cache, Ring.NODES)) == 24
    assert (np.asarray(cache.cache.tree.table).reshape(-1, 2, 16)[:, 1] == -1).all()
