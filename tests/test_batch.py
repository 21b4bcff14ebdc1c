"""A batch is the same requests one after another, whatever its size."""

import numpy as np
import pytest
from harness import (
    SMALL,
    Harness,
    canonical,
    pad,
    row,
    same,
    stack,
)

from uhrc_fn import CacheConfig, InsertParams, Status, jitted

WIDE = CacheConfig(
    page_size=2, num_pages=288, num_nodes=289, max_prefix_pages=6, max_live_receipts=64
)


def pair(config=SMALL, prompts=()):
    """Two equal caches: one for the batch, one for the sequence."""
    left, right = Harness(config), Harness(config)
    for cache in (left, right):
        for tokens in prompts:
            cache.publish(tokens)
    return left, right


def same_results(batch, singles) -> None:
    for i, single in enumerate(singles):
        assert same(row(batch, i), single), f"request {i}"
    assert len(singles) == len(batch.scalars)


def insert_both(left, right, prompts, tables, prevs=None):
    """Insert on the left at once, on the right one by one; return the results."""
    prevs = prevs or [0] * len(prompts)
    batch = left.insert_batch(prompts, tables, prevs)
    singles = [
        right.insert(tokens, table, prev)
        for tokens, table, prev in zip(prompts, tables, prevs, strict=True)
    ]
    same_results(batch, singles)
    assert canonical(left.cache) == canonical(right.cache)
    assert left.held == right.held
    return batch


def alloc_both(left, right, count: int) -> list[int]:
    """Pages for a test to hand out, in calls that SMALL and WIDE both allow."""
    ids = []
    while count:
        some = min(count, 6)
        ids += left.alloc(some).ids[:some].tolist()
        assert right.alloc(some).ids[:some].tolist() == ids[-some:]
        count -= some
    return ids


def prompt(family: int, pages: int, common: int = 0) -> list[int]:
    """`pages` pages of a family, the first `common` of them every family's."""
    return [7 if i < 2 * common else 1000 * family + i for i in range(2 * pages)]


slow = pytest.mark.slow
SIZES = [
    (1, SMALL),
    (3, SMALL),
    pytest.param(2, SMALL, marks=slow),
    pytest.param(8, WIDE, marks=slow),
    (33, WIDE),
    (64, WIDE),  # more new pages than are compared pair by pair
]


@pytest.mark.parametrize("size, config", SIZES)
def test_identical_new_prefixes_in_one_batch(size, config):
    # Eight samples of one prompt is the normal case: the first one's pages go in.
    left, right = pair(config)
    ids = alloc_both(left, right, 4 * size)
    tables = [ids[4 * i : 4 * i + 4] for i in range(size)]
    result = insert_both(left, right, [prompt(1, 4)] * size, tables)
    assert result.prefix_len.tolist() == [0] + [8] * (size - 1)
    assert result.adopted()[0, :4, 0].all() and not result.adopted()[1:].any()
    assert result.duplicate()[1:, :4, 0].all()
    assert (result.page_table[:, :4] == ids[:4]).all()
    assert (result.path == result.path[0]).all()


@pytest.mark.parametrize("size, config", SIZES)
def test_half_shared_prompts_in_one_batch(size, config):
    left, right = pair(config)
    ids = alloc_both(left, right, 4 * size)
    tables = [ids[4 * i : 4 * i + 4] for i in range(size)]
    prompts = [prompt(1 + i % 20, 4, common=2) for i in range(size)]
    result = insert_both(left, right, prompts, tables)
    assert result.inserted_len.tolist() == [8] * size
    new = 2 + 2 * min(size, 20)
    assert int(left.cache.num_live_nodes) == new


def test_a_later_request_may_extend_or_cut_short_an_earlier_one():
    left, right = pair()
    ids = alloc_both(left, right, 12)
    result = insert_both(
        left,
        right,
        [prompt(1, 2), prompt(1, 6), prompt(1, 3)],
        [ids[:2], ids[2:8], ids[8:11]],
    )
    assert result.prefix_len.tolist() == [0, 4, 6]
    assert result.inserted_len.tolist() == [4, 12, 6]


BROKEN = {
    "free entry": lambda ids: ([ids[4], 16], 0, Status.NOT_OWNED),
    "no such page": lambda ids: ([ids[4], 99], 0, Status.NOT_OWNED),
    "padding": lambda ids: ([ids[4], 0], 0, Status.NOT_OWNED),
    "the tree's page": lambda ids: ([ids[4], 1], 0, Status.NOT_OWNED),
    "twice in one request": lambda ids: ([ids[4], ids[4]], 0, Status.NOT_OWNED),
    "an earlier request's": lambda ids: ([ids[4], ids[0]], 0, Status.NOT_OWNED),
    "stale prefix": lambda ids: (ids[4:6], 4, Status.STALE_PREFIX),
    "negative prefix": lambda ids: (ids[4:6], -1, Status.BAD_LENGTH),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("what", BROKEN)
def test_an_irregular_request_anywhere_in_a_batch(what, place):
    left, right = pair(prompts=[[5, 5, 5, 5]])
    ids = alloc_both(left, right, 8)
    broken, prev, status = BROKEN[what](ids)
    # Its neighbours share its first page, so that what it fails to bring is missed.
    requests = [
        (prompt(1, 2, common=1), ids[:2], 0),
        (prompt(2, 2, common=1), ids[2:4], 0),
    ]
    requests.insert(place, (prompt(3, 2, common=1), broken, prev))
    insert_both(left, right, *map(list, zip(*requests, strict=True)))
    # Nobody came before the first; a later one does not need its first page.
    if (what, place == 0) in (
        ("an earlier request's", True),
        ("twice in one request", False),
    ):
        status = Status.OK
    assert left.take_status() == right.take_status() == status


def test_a_batch_of_nothing_but_irregular_requests():
    left, right = pair()
    ids = alloc_both(left, right, 3)
    result = insert_both(
        left,
        right,
        [prompt(1, 3), prompt(1, 3), prompt(1, 3)],
        [[ids[0], 0, 0], [ids[0], ids[1], 0], [0, 0, ids[2]]],
    )
    assert result.inserted_len.tolist() == [2, 4, 6]
    assert left.take_status() == Status.NOT_OWNED


def test_matches_in_a_batch():
    left, right = pair(prompts=[prompt(1, 5), prompt(2, 5, common=2)])
    prompts = [prompt(1, 6), prompt(2, 3, common=2), prompt(3, 2), prompt(1, 5)[:7]]
    for some in (prompts[:3], prompts[1:]):
        peeked = left.peek_batch(some)
        batch = left.match_batch(some)
        same_results(batch, [right.match(tokens) for tokens in some])
        assert same(peeked, batch)
        assert canonical(left.cache) == canonical(right.cache)


def test_the_last_of_a_batch_is_the_freshest():
    left, _ = pair(prompts=[prompt(1, 3), prompt(2, 3), prompt(3, 3)])
    left.match_batch([prompt(2, 3), prompt(3, 3), prompt(1, 3)])
    left.evict(6)
    assert [left.hit(prompt(i, 3)) for i in (1, 2, 3)] == [6, 0, 6]


def test_locks_and_unlocks_in_a_batch():
    left, right = pair(prompts=[prompt(1, 4), prompt(2, 4, common=2)])
    prompts = [prompt(1, 4), prompt(2, 4, common=2), prompt(1, 2)]
    matches = left.match_batch(prompts)
    for tokens in prompts:
        right.match(tokens)
    receipts = left.lock_batch(matches)
    singles = [right.lock(row(matches, i)) for i in range(3)]
    same_results(receipts, singles)
    assert receipts.delta.tolist() == [-8, -8, 0]
    assert canonical(left.cache) == canonical(right.cache)
    # The same receipt twice in one batch: the first one counts.
    order = [2, 0, 2]
    chosen = stack([row(receipts, i) for i in order])
    batch = left.unlock_batch(chosen)
    same_results(batch, [right.unlock(singles[i]) for i in order])
    assert batch.is_released.tolist() == [True, True, False]
    assert left.take_status() == right.take_status() == Status.STALE_RECEIPT
    assert canonical(left.cache) == canonical(right.cache)
    batch = left.unlock_batch(stack([row(receipts, 1)] * 3))
    same_results(batch, [right.unlock(singles[1]) for _ in range(3)])
    assert left.protected == right.protected == 0
    assert canonical(left.cache) == canonical(right.cache)


def test_a_shared_page_is_released_by_the_last_of_a_batch():
    left, right = pair(prompts=[prompt(1, 3)])
    match = left.match(prompt(1, 3))
    right.match(prompt(1, 3))
    receipts = left.lock_batch(stack([match] * 3))
    singles = [right.lock(match) for _ in range(3)]
    assert receipts.delta.tolist() == [-6, 0, 0]
    batch = left.unlock_batch(receipts)
    same_results(batch, [right.unlock(receipt) for receipt in singles])
    assert batch.delta.tolist() == [0, 0, 6]


def test_stale_matches_and_a_full_ledger_inside_a_batch():
    left, right = pair(prompts=[prompt(1, 3), prompt(2, 2)])
    for cache in (left, right):
        stale, fresh = cache.match(prompt(1, 3)), cache.match(prompt(2, 2))
        assert cache.evict(6) == 6
        for _ in range(3):
            cache.lock(fresh)
    # One row of four is left: the stale one must not take it, the second finds none.
    batch = left.lock_batch(stack([stale, fresh, fresh]))
    singles = [right.lock(match) for match in (stale, fresh, fresh)]
    same_results(batch, singles)
    assert (batch.serial > 0).tolist() == [False, True, False]
    status = left.take_status()
    assert status == Status.STALE_MATCH | Status.LEDGER_FULL == right.take_status()
    assert canonical(left.cache) == canonical(right.cache)


@pytest.mark.parametrize("partial", [False, True])
def test_allocations_in_a_batch(partial):
    left, right = pair(prompts=[prompt(1, 4), prompt(2, 4)])
    for cache in (left, right):
        cache.lock(cache.match(prompt(2, 4)))
    # 8 free, 4 evictable, 4 locked: the second asks for more than there is left.
    for counts in ([6, 5, 4], [-1, 7, 0], [3, 3, 3]):
        batch = left.alloc_batch(counts, partial)
        same_results(batch, [right.alloc(n, partial) for n in counts])
        assert canonical(left.cache) == canonical(right.cache)
        assert left.take_status() == right.take_status()
    assert left.free == []


def test_a_default_prefix_length_serves_a_whole_batch():
    cache = Harness()
    ids = cache.alloc(4).ids
    params = InsertParams(
        key=cache.keys([prompt(1, 2), prompt(2, 2), []]),
        value=np.stack([pad(ids[:2], 6), pad(ids[2:4], 6), pad([], 6)]),
    )
    cache.cache, result = jitted.insert_batch(cache.cache, params)
    assert result.inserted_len.tolist() == [4, 4, 0]
