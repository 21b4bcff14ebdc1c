"""The oracle itself: by hand and against traces."""

import itertools
import json

import pytest
from oracle import Oracle, Receipt

from uhrc_fn.replay import load_trace


def publish(oracle: Oracle, tokens, prev: int = 0, **names):
    """Allocate a page for each page of a key and insert it."""
    key = oracle.key(tokens, **names)
    result = oracle.insert(key, oracle.alloc(len(key)), prev)
    oracle.check()
    return result


def rows(oracle: Oracle) -> list[tuple]:
    """(tokens from the root, page, locks) of every page."""
    return [row[1:] for row in oracle.snapshot()["pages"]]


def edges(oracle: Oracle) -> list[list[int]]:
    """The pages of each edge."""
    return sorted(edge.full.values for edge in oracle._root.below())


# By hand. Pages are given out from 1 on, so their ids say when they came.


def test_a_tail_that_fills_no_page_does_not_count():
    oracle = Oracle(page_size=4, num_pages=8, max_prefix_pages=3)
    assert [len(oracle.key(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert oracle.key(range(50)) == oracle.key(range(12))
    result = publish(oracle, [1, 2, 3, 4, 5, 6])
    assert (result.inserted_len, result.adopted) == (4, [1])
    assert oracle.match(oracle.key([1, 2, 3, 4, 5, 6])).hit_length == 4
    assert oracle.match(oracle.key([1, 2, 3])).hit_length == 0
    assert (oracle.evictable, oracle.protected, oracle.size) == (4, 0, 4)


def test_a_key_that_leaves_an_edge_midway_splits_it():
    oracle = Oracle(page_size=2, num_pages=8)
    publish(oracle, [1, 2, 3, 4, 5, 6, 7, 8])
    assert edges(oracle) == [[1, 2, 3, 4]]
    # Pages 5 and 6 are duplicates of 1 and 2; page 7 is new.
    result = publish(oracle, [1, 2, 3, 4, 5, 9])
    assert edges(oracle) == [[1, 2], [3, 4], [7]]
    assert (result.prefix_len, result.inserted_len) == (4, 6)
    assert (result.adopted, result.duplicates) == ([7], [5, 6])
    assert result.page_table == [1, 2, 7]
    assert rows(oracle) == [
        ((1, 2), 1, 0),
        ((1, 2, 3, 4), 2, 0),
        ((1, 2, 3, 4, 5, 6), 3, 0),
        ((1, 2, 3, 4, 5, 6, 7, 8), 4, 0),
        ((1, 2, 3, 4, 5, 9), 7, 0),
    ]
    assert oracle.match(oracle.key([1, 2, 3, 4, 5, 6, 0, 0])).pages == [1, 2, 3]
    assert edges(oracle) == [[1, 2], [3, 4], [7]]  # a match splits nothing


def test_a_longer_key_extends_a_leaf_and_a_third_branch_splits_nothing():
    oracle = Oracle(page_size=1, num_pages=9)
    publish(oracle, [1, 2])
    oracle.insert(oracle.key([1, 2, 3]), [1, 2, *oracle.alloc(1)], 2)
    assert edges(oracle) == [[1, 2, 3]]
    oracle.insert(oracle.key([1, 2, 8]), [1, 2, *oracle.alloc(1)], 2)
    oracle.insert(oracle.key([1, 2, 9]), [1, 2, *oracle.alloc(1)], 2)
    oracle.check()
    assert edges(oracle) == [[1, 2], [3], [4], [5]]


def test_victims_leave_oldest_first_and_children_before_parents():
    oracle = Oracle(page_size=1, num_pages=8)
    publish(oracle, [1, 2, 3])  # pages 1 2 3
    publish(oracle, [7, 8])  # pages 4 5
    oracle.match(oracle.key([1, 2]))  # newer than 4 and 5; page 3 is not
    assert oracle.victim_order() == [3, 5, 4, 2, 1]
    oracle.peek(oracle.key([7, 8]))
    assert oracle.victim_order() == [3, 5, 4, 2, 1]
    assert oracle.evict(2) == [3, 5]
    assert oracle.snapshot()["free"] == [6, 7, 8, 3, 5]
    assert oracle.evict(100) == [4, 2, 1]
    assert oracle.evict(1) == []
    oracle.check()
    assert oracle.snapshot() == {
        "pages": [],
        "free": [6, 7, 8, 3, 5, 4, 2, 1],
        "evictable": 0,
        "protected": 0,
    }


def test_stamps_are_the_documented_ones():
    oracle = Oracle(page_size=1, num_pages=8)
    key = oracle.key([1, 2, 3])
    oracle.insert(key, oracle.alloc(3), bound=4)
    (edge,) = oracle._root.below()
    assert (edge.full.stamps, oracle.clock) == ([3, 2, 1], 5)
    oracle.match(key[:2])
    assert (edge.full.stamps, oracle.clock) == ([6, 5, 1], 8)
    oracle.match(oracle.key([9]))
    assert (edge.full.stamps, oracle.clock) == ([6, 5, 1], 10)
    with pytest.raises(ValueError, match=r"bound=1 is less than the key's 3 pages"):
        oracle.match(key, bound=1)


def test_evict_rounds_up_to_pages():
    oracle = Oracle(page_size=4, num_pages=4)
    publish(oracle, range(16))
    assert oracle.evict(0) == []
    assert oracle.evict(1) == [4]
    assert oracle.evict(5) == [3, 2]
    assert oracle.evict(-3) == [] and oracle.take_status() == {"BAD_LENGTH"}


def test_a_lock_on_a_part_of_a_run_keeps_that_part():
    oracle = Oracle(page_size=2, num_pages=8)
    publish(oracle, [1, 2, 3, 4, 5, 6, 7, 8])
    receipt = oracle.lock(oracle.match(oracle.key([1, 2, 3, 4])))
    oracle.check()
    assert edges(oracle) == [[1, 2, 3, 4]]
    assert (oracle.evictable, oracle.protected) == (4, 4)
    assert oracle.victim_order() == [4, 3]
    assert oracle.evict(100) == [4, 3]
    assert rows(oracle) == [((1, 2), 1, 1), ((1, 2, 3, 4), 2, 1)]
    assert oracle.unlock(receipt)
    oracle.check()
    assert oracle.evict(2) == [2]
    assert (oracle.evictable, oracle.protected) == (2, 0)


def test_a_split_leaves_each_page_its_locks():
    oracle = Oracle(page_size=1, num_pages=8)
    publish(oracle, [1, 2, 3, 4])
    long = oracle.lock(oracle.match(oracle.key([1, 2, 3])))
    short = oracle.lock(oracle.match(oracle.key([1])))
    oracle.insert(oracle.key([1, 2, 9]), [1, 2, *oracle.alloc(1)], 2)
    oracle.check()
    assert [row[2] for row in rows(oracle)] == [2, 1, 1, 0, 0]
    assert edges(oracle) == [[1, 2], [3, 4], [5]]
    assert oracle.evict(100) == [4, 5]
    oracle.unlock(long)
    oracle.check()
    assert oracle.evict(100) == [3, 2]
    oracle.unlock(short)
    assert oracle.evict(100) == [1]


def test_a_receipt_counts_once():
    oracle = Oracle(page_size=1, num_pages=4, max_live_receipts=2)
    publish(oracle, [1, 2])
    match = oracle.match(oracle.key([1, 2]))
    first, second = oracle.lock(match), oracle.lock(match)
    assert oracle.lock(match) is None
    assert oracle.take_status() == {"LEDGER_FULL"}
    assert [row[2] for row in rows(oracle)] == [2, 2]
    assert oracle.unlock(first)
    assert not oracle.unlock(first) and not oracle.unlock(Receipt(9))
    assert oracle.take_status() == {"STALE_RECEIPT"}
    assert [row[2] for row in rows(oracle)] == [1, 1]
    assert oracle.unlock(second) and oracle.protected == 0
    assert not oracle.unlock(None) and not oracle.take_status()
    root = oracle.lock(oracle.match(oracle.key([5])))
    assert root is not None and oracle.protected == 0 and oracle.unlock(root)
    oracle.check()


def test_a_lock_refuses_a_match_whose_page_left():
    oracle = Oracle(page_size=1, num_pages=2)
    publish(oracle, [1, 2])
    match = oracle.match(oracle.key([1, 2]))
    oracle.evict(1)
    assert oracle.lock(match) is None and oracle.take_status() == {"STALE_MATCH"}
    oracle.insert(oracle.key([1, 2]), [1, *oracle.alloc(1)], 1)
    assert oracle.peek(oracle.key([1, 2])) == match  # the same page, come again
    assert oracle.lock(match) is None and oracle.take_status() == {"STALE_MATCH"}
    oracle.check()
    assert oracle.protected == 0


def test_duplicates_begin_after_what_the_request_shares_already():
    oracle = Oracle(page_size=2, num_pages=12)
    publish(oracle, [1, 2, 3, 4, 5, 6])  # pages 1 2 3
    key = oracle.key([1, 2, 3, 4, 5, 6, 7, 8])
    mine = oracle.alloc(4)
    result = oracle.insert(key, mine, 3)  # floored to one page
    assert (result.duplicates, result.adopted) == ([5, 6], [7])
    assert result.page_table == [1, 2, 3, 7]
    again = oracle.insert(key, [1, 5, 3, 7], 0)  # the tree's own ids are none
    assert (again.duplicates, again.adopted) == ([5], [])
    assert (again.prefix_len, again.inserted_len) == (8, 8)
    padded = oracle.insert(key, [0, 0, 0, 0], 0)
    assert padded.duplicates == [] and padded.page_table == [1, 2, 3, 7]
    oracle.free([4, 5, 6])
    assert not oracle.take_status()
    oracle.check()


def test_an_insert_on_a_prefix_that_is_gone_adopts_nothing():
    oracle = Oracle(page_size=1, num_pages=8)
    publish(oracle, [1, 2, 3])
    oracle.evict(2)
    pages = [1, 2, 3, *oracle.alloc(1)]
    result = oracle.insert(oracle.key([1, 2, 3, 4]), pages, 3)
    assert oracle.take_status() == {"STALE_PREFIX"}
    assert (result.prefix_len, result.inserted_len, result.adopted) == (1, 1, [])
    assert result.page_table == pages
    # What the key itself lacks cannot be missed: here `prev` goes past its end.
    oracle.insert(oracle.key([1]), [1], 5)
    assert not oracle.take_status()
    oracle.insert(oracle.key([1]), [1], -1)
    assert oracle.take_status() == {"BAD_LENGTH"}
    oracle.check()


@pytest.mark.parametrize("bad", [0, -1, 9, 8, 2, 3])
def test_an_insert_is_cut_at_an_entry_that_no_request_owns(bad):
    # 0, -1, 9: no page; 8: free; 2: the tree's, elsewhere; 3: adopted a page before.
    oracle = Oracle(page_size=1, num_pages=8)
    publish(oracle, [1, 2])
    pages = oracle.alloc(3)
    assert pages == [3, 4, 5]
    result = oracle.insert(oracle.key([7, 8, 9]), [3, bad, 5])
    assert oracle.take_status() == {"NOT_OWNED"}
    assert (result.inserted_len, result.adopted) == (1, [3])
    assert result.page_table == [3, bad, 5]
    oracle.check()
    oracle.free([4, 5])
    assert not oracle.take_status()
    with pytest.raises(ValueError, match="1 page ids; wanted 2"):
        oracle.insert(oracle.key([1, 2]), [1])


def test_namespaces_share_nothing():
    oracle = Oracle(page_size=2, num_pages=8)
    publish(oracle, [1, 2, 3, 4])
    assert oracle.match(oracle.key([1, 2, 3, 4], "lora")).hit_length == 0
    assert publish(oracle, [1, 2, 3, 4], namespace="lora").adopted == [3, 4]
    assert oracle.match(oracle.key([1, 2, 5, 6], "lora")).pages == [3]
    assert oracle.match(oracle.key([1, 2, 5, 6])).pages == [1]
    assert [row[0] for row in oracle.snapshot()["pages"]] == ["lora"] * 2 + [None] * 2
    assert oracle.key([], "lora") == oracle.key([1], "lora") == []


def test_pages_leave_from_the_front_and_come_back_at_the_end():
    oracle = Oracle(page_size=1, num_pages=5)
    assert oracle.alloc(3) == [1, 2, 3]
    oracle.free([3, 0, 1])
    assert oracle.snapshot()["free"] == [4, 5, 3, 1]
    assert oracle.alloc(0) == [] and oracle.alloc(3) == [4, 5, 3]
    assert not oracle.take_status()
    assert oracle.alloc(-1) == [] and oracle.take_status() == {"BAD_LENGTH"}
    oracle.check()


def test_a_free_that_is_wrong_changes_nothing_and_the_others_count():
    oracle = Oracle(page_size=1, num_pages=6)
    publish(oracle, [1])
    assert oracle.alloc(3) == [2, 3, 4]
    oracle.free([2, 2])
    assert oracle.take_status() == {"DOUBLE_FREE"}
    oracle.free([5])
    assert oracle.take_status() == {"DOUBLE_FREE"}
    oracle.free([1, 3])
    assert oracle.take_status() == {"FREED_TREE_PAGE"}
    oracle.free([7, 4, -1])
    assert oracle.take_status() == {"BAD_PAGE"}
    assert oracle.snapshot()["free"] == [5, 6, 2, 3, 4]
    oracle.check()


def test_an_allocation_evicts_exactly_what_is_short_or_nothing():
    oracle = Oracle(page_size=1, num_pages=5)
    publish(oracle, [1, 2, 3, 4])
    receipt = oracle.lock(oracle.match(oracle.key([1])))
    assert oracle.alloc(5) == []
    assert oracle.take_status() == {"PAGES_EXHAUSTED"}
    assert (oracle.evictable, len(oracle.pool.free)) == (3, 1)
    assert oracle.alloc(2) == [5, 4]
    assert oracle.alloc(9, partial=True) == [3, 2]
    assert oracle.alloc(1, partial=True) == []
    assert not oracle.take_status()
    assert rows(oracle) == [((1,), 1, 1)]
    oracle.unlock(receipt)
    assert oracle.alloc(1) == [1]
    oracle.check()


# Against published and recorded numbers.


def replay(workload, num_pages: int) -> list[int]:
    """Serve a workload; the pages that each request hit."""
    oracle = Oracle(workload.page_size, num_pages)
    tokens, hits = workload.keys.tolist(), []
    for start, end in itertools.pairwise(workload.offsets.tolist()):
        key = oracle.key(tokens[start:end])
        match = oracle.match(key)
        receipt = oracle.lock(match)
        hit = len(match.pages)
        pages = match.pages + oracle.alloc(len(key) - hit, partial=True)
        oracle.insert(key[: len(pages)], pages, match.hit_length)
        oracle.unlock(receipt)
        hits.append(hit)
    oracle.check()
    assert not oracle.status and oracle.protected == 0
    return hits


@pytest.mark.traces
def test_ragpulse_hits_are_the_published_integers(traces_dir):
    curves = json.loads((traces_dir / "published_reference_curves.json").read_text())
    published = curves["kvcache_ai_precomputed"]["ragpulse_context_aware"]["rows"]
    workload = load_trace(traces_dir / "ragpulse.jsonl.gz")
    first = workload.first_measured(0.5)
    chosen = [row for row in published if row[0] < 2_100][::20]
    assert len(chosen) >= 5
    for capacity, _, leaf_lru, _ in [*chosen, published[-1]]:
        hits = replay(workload, capacity)[first:]
        assert workload.hit_tokens(hits, first).sum() == leaf_lru, capacity


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "num_pages", "ratio"),
    [
        ("synthetic", 439, 0.0388),
        ("synthetic", 2_196, 0.1596),
        ("conversation", 18_279, 0.2844),
    ],
)
def test_mooncake_hit_ratios(traces_dir, name, num_pages, ratio):
    workload = load_trace(traces_dir / f"mooncake_{name}.jsonl.gz")
    hits = workload.hit_tokens(replay(workload, num_pages)).sum()
    assert hits / workload.input_tokens.sum() == pytest.approx(ratio, abs=5e-4)
