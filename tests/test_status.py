"""Trouble: what is refused while building or tracing, and every bit met at run time."""

import jax
import numpy as np
import pytest
from harness import (
    ONE_TOKEN,
    SMALL,
    Harness,
    canonical,
    pad,
    ring_ids,
    same,
    with_counter,
)

import uhrc_fn
from uhrc_fn import (
    CacheConfig,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    Status,
    jitted,
    radix_key,
    raise_if_bad,
)
from uhrc_fn.state import Counter, Ring
from uhrc_fn.status import SENTENCES, describe

A = [1, 1, 2, 2, 3, 3]
B = [4, 4, 5, 5]


def harness() -> Harness:
    """A cache that holds A, and one page free in a request's hands."""
    cache = Harness()
    cache.publish(A)
    return cache


# Run time: one test a bit.


def expect(cache: Harness, bit: Status) -> None:
    """The bit is up and named with its remedy; the next look finds it down."""
    what, remedy = SENTENCES[bit]
    with pytest.raises(RuntimeError) as error:
        raise_if_bad(cache.cache)
    assert f"{bit.name}: {what} {remedy}" in str(error.value)
    assert cache.take_status() == bit
    raise_if_bad(cache.cache)


def test_nodes_exhausted():
    cache = harness()
    pages = cache.alloc(2).ids[:2]
    # No config allows it: only a forged state has pages but no nodes.
    size = Counter.RING_SIZE + Ring.NODES
    good = cache.cache
    cache.is_checked = False
    cache.cache = with_counter(good, size, 1)
    result = cache.insert(B, pages)
    assert result.inserted_len == 2
    assert result.adopted()[:, 0].tolist() == [True] + [False] * 5
    expect(cache, Status.NODES_EXHAUSTED)
    assert cache.hit(B) == 2 and cache.hit(A) == 6
    before = canonical(cache.cache)
    result = cache.insert([9, 9], pages[1:])
    assert result.inserted_len == 0 and not result.adopted().any()
    expect(cache, Status.NODES_EXHAUSTED)
    after = canonical(cache.cache)
    assert after.pop("CLOCK") > before.pop("CLOCK")
    assert after == before
    # With its nodes back the state is whole again.
    left = int(good.counters[size]) - 1
    cache.cache = with_counter(cache.cache, size, left)
    cache.check_now()


@pytest.mark.parametrize("partial", [False, True])
def test_pages_exhausted(partial):
    cache = harness()
    cache.publish(B)
    cache.lock(cache.match(A))
    for _ in range(3):
        assert cache.alloc(3).ok
    before, free = canonical(cache.cache), cache.free
    assert len(free) == 2
    result = cache.alloc(5, partial)
    if partial:
        assert result.count == 4 and not result.ok
        assert cache.hit(A) == 6 and cache.hit(B) == 0
        assert cache.take_status() == Status.OK
        return
    assert result.count == 0 and not result.ok and not result.ids.any()
    expect(cache, Status.PAGES_EXHAUSTED)
    assert canonical(cache.cache) == before


def test_ledger_full():
    cache = harness()
    match = cache.match(A)
    receipts = [cache.lock(match) for _ in range(SMALL.max_live_receipts)]
    before = canonical(cache.cache)
    receipt = cache.lock(match)
    assert receipt.serial == 0 and receipt.delta == 0
    expect(cache, Status.LEDGER_FULL)
    assert canonical(cache.cache) == before
    # Its receipt is nothing to give back; a real one makes room.
    assert not cache.unlock(receipt).is_released
    assert cache.take_status() == Status.OK
    assert canonical(cache.cache) == before
    cache.unlock(receipts[1])
    assert cache.lock(match).serial != 0


def test_a_receipt_given_back_twice_leaves_the_second_lock_standing():
    cache = harness()
    match = cache.match(A)
    first, second = cache.lock(match), cache.lock(match)
    assert cache.unlock(first).is_released
    before = canonical(cache.cache)
    assert not cache.unlock(first).is_released
    expect(cache, Status.STALE_RECEIPT)
    assert canonical(cache.cache) == before
    assert cache.evict() == 0 and cache.hit(A) == 6
    assert cache.unlock(second).delta == 6
    assert cache.evict() == 6


def test_a_receipt_is_no_good_for_another_row_or_path():
    cache = harness()
    cache.publish(B)
    mine, other = cache.lock(cache.match(A)), cache.lock(cache.match(B))
    before = canonical(cache.cache)
    place = lambda receipt, at, value: type(receipt)(
        path=receipt.path,
        scalars=np.where(np.arange(6) == at, value, receipt.scalars).astype(np.int32),
    )
    forged = [
        place(mine, 0, int(mine.serial) + 7),
        place(mine, 1, int(other.ledger_row)),
        place(mine, 1, 10**6),
        place(mine, 4, 1),
        type(mine)(path=other.path, scalars=mine.scalars),
    ]
    for receipt in forged:
        assert not cache.unlock(receipt).is_released
        expect(cache, Status.STALE_RECEIPT)
        assert canonical(cache.cache) == before


def test_stale_match_of_an_evicted_node():
    cache = harness()
    match = cache.match(A)
    cache.evict()
    before = canonical(cache.cache)
    receipt = cache.lock(match)
    assert receipt.serial == 0
    expect(cache, Status.STALE_MATCH)
    assert canonical(cache.cache) == before


def test_stale_match_of_a_node_that_was_written_but_did_not_go_in():
    # The node comes to the front of the free list; a refused insert then writes its
    # parent link before it knows. The old match must not take that for life.
    cache = Harness()
    for i in range(SMALL.num_pages):
        cache.publish([i, i])
    match = cache.match([0, 0])
    for i in range(1, SMALL.num_pages):
        cache.match([i, i])
    assert cache.evict(2) == 2
    while ring_ids(cache.cache, Ring.NODES)[0] != match.best_match_node:
        page = cache.alloc(1).ids[:1]
        cache.insert([50, 50], page)
    cache.insert([60, 60], [0])
    expect(cache, Status.NOT_OWNED)
    assert cache.lock(match).serial == 0
    expect(cache, Status.STALE_MATCH)


def test_matches_and_receipts_do_not_outlive_a_reset():
    cache = harness()
    match = cache.match(A)
    receipt = cache.lock(match)
    cache.reset()
    cache.publish(B)
    other = cache.lock(cache.match(B))
    assert cache.lock(match).serial == 0
    expect(cache, Status.STALE_MATCH)
    assert not cache.unlock(receipt).is_released
    expect(cache, Status.STALE_RECEIPT)
    assert cache.protected == 4
    assert cache.unlock(other).is_released


def test_stale_prefix():
    cache = harness()
    match = cache.match(A)
    cache.evict(4)
    pages = cache.alloc(2).ids[:2]
    size, held = cache.size, set(cache.held)
    table = [*match.device_indices[:3], *pages]
    result = cache.insert([*A, 7, 7, 8, 8], table, prev=int(match.hit_length))
    assert not result.adopted().any()
    assert result.inserted_len == result.prefix_len == 2
    expect(cache, Status.STALE_PREFIX)
    assert cache.size == size and cache.held == held


def test_double_free():
    cache = harness()
    pages = cache.alloc(3).ids[:3].tolist()
    cache.free_pages([pages[0]])
    before = cache.free
    cache.free_pages([pages[0], pages[1], pages[1]])
    expect(cache, Status.DOUBLE_FREE)
    assert cache.free == [*before, pages[1]]


def test_freed_tree_page():
    cache = harness()
    pages = cache.match(A).device_indices[:3]
    mine = cache.alloc(1).ids[:1]
    before = cache.free
    cache.free_pages([pages[1], mine[0]])
    expect(cache, Status.FREED_TREE_PAGE)
    assert cache.free == [*before, mine[0]]
    assert cache.hit(A) == 6


@pytest.mark.parametrize("bad", [-1, 17, 10**9, -(2**31)])
def test_bad_page(bad):
    cache = harness()
    mine = cache.alloc(1).ids[0]
    before = cache.free
    cache.free_pages([bad, mine, 0])
    expect(cache, Status.BAD_PAGE)
    assert cache.free == [*before, mine]


@pytest.mark.parametrize(
    "bad", [0, -1, 17, 16, 1], ids="pad neg high free tree".split()
)
def test_not_owned(bad):
    cache = harness()
    pages = cache.alloc(2).ids[:2]
    result = cache.insert([*B, 6, 6], [pages[0], bad, pages[1]])
    assert result.inserted_len == 2
    assert result.adopted()[:, 0].tolist() == [True] + [False] * 5
    expect(cache, Status.NOT_OWNED)
    assert cache.hit(B) == 2
    assert cache.held == {pages[1]}


@pytest.mark.parametrize("length", [-1, -(2**31), 13, 2**31 - 1])
def test_bad_length_of_a_key(length):
    cache = harness()
    key = cache.key(A)
    key = RadixKey(token_ids=key.token_ids, length=np.int32(length))
    params = MatchPrefixParams(key=key)
    cache.cache, match = jitted.match_prefix(cache.cache, params)
    assert match.hit_length == (0 if length < 0 else 6)
    expect(cache, Status.BAD_LENGTH)
    pages = cache.alloc(6).ids
    params = InsertParams(key=key, value=pages, prev_prefix_len=np.int32(0))
    cache.cache, result = jitted.insert(cache.cache, params)
    cache.held -= set(pages[result.adopted()[:, 0]].tolist())
    assert result.inserted_len == (0 if length < 0 else 12)
    expect(cache, Status.BAD_LENGTH)
    cache.check()


def test_bad_length_of_amounts():
    cache = harness()
    assert cache.evict(-1) == 0
    expect(cache, Status.BAD_LENGTH)
    assert cache.alloc(-1).count == 0
    expect(cache, Status.BAD_LENGTH)
    assert cache.alloc(7).count == 6
    expect(cache, Status.BAD_LENGTH)
    pages = cache.alloc(2).ids[:2]
    assert cache.insert(B, pages, prev=-1).inserted_len == 4
    expect(cache, Status.BAD_LENGTH)


def test_bad_token():
    cache = harness()
    key = cache.key([*A, 7, 7])
    for place, hit in [(0, 0), (3, 2), (5, 4), (7, 6)]:
        tokens = key.token_ids.copy()
        tokens[place] = -5
        bad = RadixKey(token_ids=tokens, length=np.int32(8))
        params = MatchPrefixParams(key=bad)
        cache.cache, match = jitted.match_prefix(cache.cache, params)
        assert match.hit_length == hit
        expect(cache, Status.BAD_TOKEN)
        pages = cache.alloc(4).ids
        value = np.where(np.arange(6) < hit // 2, match.device_indices, pages)
        params = InsertParams(key=bad, value=value, prev_prefix_len=np.int32(0))
        cache.cache, result = jitted.insert(cache.cache, params)
        assert result.inserted_len == hit
        expect(cache, Status.BAD_TOKEN)
        cache.check()
        cache.free_pages(pages)
    # In the partial tail and in the padding nobody reads it.
    tokens = np.where(np.arange(12) < 8, key.token_ids, -1).astype(np.int32)
    tokens[7] = -1
    params = MatchPrefixParams(key=RadixKey(token_ids=tokens, length=np.int32(7)))
    cache.cache, match = jitted.match_prefix(cache.cache, params)
    assert match.hit_length == 6
    assert cache.take_status() == Status.OK


def test_clock_high_until_compacted():
    cache = harness()
    cache.publish(B)
    cache.cache = with_counter(cache.cache, Counter.CLOCK, (1 << 30) - 8)
    cache.match(B)
    assert cache.take_status() == Status.OK
    cache.match(A)
    expect(cache, Status.CLOCK_HIGH)
    cache.match(B)
    assert Status(int(cache.cache.status)) == Status.CLOCK_HIGH
    cache.compact_clock()
    assert cache.take_status() == Status.OK
    assert int(cache.cache.clock) <= SMALL.num_nodes + 1
    # A is the older still.
    cache.match([])
    assert cache.evict(2) == 2
    assert cache.hit(A) == 4 and cache.hit(B) == 4


def test_bits_are_sticky_and_add_up():
    cache = harness()
    cache.alloc(-1)
    cache.free_pages([16])
    cache.match(A)
    assert cache.take_status() == Status.BAD_LENGTH | Status.DOUBLE_FREE


def test_every_bit_has_a_sentence_and_a_remedy():
    bits = [bit for bit in Status if bit]
    assert set(SENTENCES) == set(bits)
    text = describe(sum(bits))
    assert [line.split(":")[0] for line in text] == [bit.name for bit in bits]
    assert all(line.count(".") >= 2 and line.endswith(".") for line in text)
    assert describe(0) == []
    # A stack of caches: the bits of any rank.
    assert describe(np.array([1, 2])) == describe(3)


# While building or tracing.

CONFIGS = [
    ({"page_size": 0}, "page_size=0.*1 to"),
    ({"page_size": 2.0}, r"page_size=2\.0"),
    ({"page_size": True}, "page_size=True"),
    ({"num_pages": 0}, "num_pages=0"),
    ({"num_pages": (1 << 24) + 1}, "num_pages=16777217"),
    ({"max_prefix_pages": 0}, "max_prefix_pages=0"),
    ({"max_live_receipts": 0}, "max_live_receipts=0"),
    ({"num_pages": 8, "num_nodes": 7}, "num_nodes=7 with num_pages=8.*freeze"),
    ({"victim_plan_size": 0}, "victim_plan_size=0"),
    ({"hash_seed": -1}, "hash_seed=-1"),
    ({"hash_seed": 1 << 64}, r"\[0, 2\^64\)"),
    ({"components": ("FULL", "MAMBA")}, "unknown component.*choose one of"),
    ({"components": 3}, "unknown component"),
    ({"components": ("SWA",)}, r"\(SWA\) cannot share one tree"),
    ({"components": ("FULL", "FULL")}, "cannot share"),
    ({"components": "FULL,SWA,RECURRENT"}, r"\(FULL, SWA, RECURRENT\) cannot"),
    ({"num_swa_pages": 4}, "num_swa_pages=4.*Add SWA"),
    ({"sliding_window_size": 4}, "sliding_window_size=4.*Add SWA"),
    ({"components": "FULL,SWA", "sliding_window_size": 4}, "num_swa_pages=0"),
    ({"components": "FULL,SWA", "num_swa_pages": 4}, "sliding_window_size=0"),
    (
        {"components": "FULL,SWA", "num_swa_pages": 4, "sliding_window_size": 4},
        "window plus one page",
    ),
    ({"num_recurrent_slots": 4}, "Add RECURRENT"),
    ({"enable_recurrent_extra_buffer": True}, "Add RECURRENT"),
    ({"recurrent_track_interval": 4}, "Add RECURRENT"),
    ({"components": "FULL,RECURRENT"}, "num_recurrent_slots=0"),
]
RECURRENT = {"components": "FULL,RECURRENT", "num_recurrent_slots": 4, "num_pages": 8}
CONFIGS += [
    (RECURRENT | {"page_size": 2}, "extra buffer exactly where page_size > 1"),
    (RECURRENT | {"enable_recurrent_extra_buffer": True}, "Set page_size=1"),
    (RECURRENT | {"recurrent_track_interval": True}, "recurrent_track_interval=True"),
    (RECURRENT | {"recurrent_track_interval": 0}, "recurrent_track_interval=0"),
    (RECURRENT | {"num_recurrent_slots": True}, "num_recurrent_slots=True"),
]
EXTRA = RECURRENT | {"page_size": 4, "enable_recurrent_extra_buffer": True}
CONFIGS += [
    (EXTRA | {"recurrent_track_interval": 0}, "positive multiple of page_size"),
    (EXTRA | {"recurrent_track_interval": 6}, "positive multiple of page_size"),
    (EXTRA | {"recurrent_track_interval": 36}, "No prefix could ever hit"),
    (EXTRA | {"num_recurrent_slots": 1}, "num_recurrent_slots=1 with.*at least 2"),
    (EXTRA | {"enable_recurrent_extra_buffer": 1}, "enable_recurrent_extra_buffer=1"),
]
SLIDING = {"components": "FULL,SWA", "num_swa_pages": 5, "sliding_window_size": 4}
CONFIGS += [
    (SLIDING | {"num_swa_pages": True}, "num_swa_pages=True"),
    (SLIDING | {"sliding_window_size": True}, "sliding_window_size=True"),
    (SLIDING | {"swa_inserts_are_recent": 1}, "swa_inserts_are_recent=1"),
    ({"swa_inserts_are_recent": True}, "swa_inserts_are_recent=True.*False"),
]
CONFIGS += [
    ({name: True}, f"{name}=True")
    for name in (
        "num_pages",
        "num_nodes",
        "max_prefix_pages",
        "max_live_receipts",
        "victim_plan_size",
        "hash_seed",
    )
]


@pytest.mark.parametrize("settings, message", CONFIGS)
def test_a_config_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**settings)


def test_configs_that_work():
    assert CacheConfig().num_nodes == 1024
    assert CacheConfig(components="FULL, SWA", num_swa_pages=5, sliding_window_size=4)
    assert CacheConfig(**EXTRA, recurrent_track_interval=32).recurrent_grid == 32
    assert CacheConfig(**RECURRENT).recurrent_grid == 1
    assert CacheConfig(**EXTRA | {"num_recurrent_slots": 2}).recurrent_grid == 4
    assert CacheConfig(page_size=2) == CacheConfig(page_size=2)
    assert hash(CacheConfig(page_size=2)) == hash(CacheConfig(page_size=2))
    assert CacheConfig(page_size=2) != CacheConfig(page_size=4)


def trace(op, *args, **kwargs):
    """Only trace: misuse must be found before anything runs."""
    return jax.eval_shape(lambda *args: op(*args, **kwargs), *args)


def test_init_wants_a_config():
    with pytest.raises(ValueError, match=r"got dict; wanted a CacheConfig"):
        uhrc_fn.init({"page_size": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [11, 0, 14])
def test_a_key_of_a_wrong_length_is_refused(tokens):
    cache = uhrc_fn.init(SMALL)
    key = RadixKey(token_ids=np.zeros(tokens, np.int32), length=np.int32(1))
    for op, params in [
        (uhrc_fn.match_prefix, MatchPrefixParams(key=key)),
        (uhrc_fn.peek_prefix_len, key),
        (uhrc_fn.insert, InsertParams(key=key, value=np.zeros(6, np.int32))),
    ]:
        with pytest.raises(ValueError, match=rf"holds {tokens} tokens; .*radix_key"):
            trace(op, cache, params)


def test_a_key_made_for_a_longer_limit_is_refused():
    cache = uhrc_fn.init(SMALL)
    key = radix_key(range(40), CacheConfig(page_size=2, num_pages=32))
    with pytest.raises(ValueError, match="wanted 1 to 6 whole pages of 2"):
        trace(uhrc_fn.match_prefix, cache, MatchPrefixParams(key=key))


def test_a_key_that_holds_no_integers_is_refused():
    cache = uhrc_fn.init(SMALL)
    key = RadixKey(token_ids=np.zeros(4, np.float32), length=np.int32(1))
    with pytest.raises(ValueError, match=r"token_ids is float32\[.*\]; wanted int32"):
        trace(uhrc_fn.match_prefix, cache, MatchPrefixParams(key=key))


@pytest.mark.parametrize("shape", [(5,), (7,), (1, 6), ()])
def test_values_must_name_one_page_for_each_page_of_the_key(shape):
    cache = uhrc_fn.init(SMALL)
    key = radix_key(A, SMALL, num_pages=6)
    params = InsertParams(key=key, value=np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match=r"value has shape .*; wanted \(6,\)"):
        trace(uhrc_fn.insert, cache, params)


def test_a_traced_count_needs_its_static_bound():
    cache = uhrc_fn.init(SMALL)
    with pytest.raises(ValueError, match="without max_new"):
        trace(uhrc_fn.alloc_pages, cache, np.int32(3))
    with pytest.raises(ValueError, match="without max_new"):
        uhrc_fn.alloc_pages(cache, 0)
    for bad in (0, 17, 2.0):
        with pytest.raises(ValueError, match=rf"max_new={bad}.*from 1 to num_pages=16"):
            trace(uhrc_fn.alloc_pages, cache, np.int32(3), max_new=bad)


@pytest.mark.parametrize("bad", [0, 18])
def test_the_bound_on_victims_must_be_possible(bad):
    cache = uhrc_fn.init(SMALL)
    with pytest.raises(ValueError, match=rf"max_victims={bad}; wanted 1 to num_nodes"):
        trace(uhrc_fn.evict, cache, EvictParams(num_tokens=2), max_victims=bad)


def test_misuse_leaves_a_donated_cache_alive():
    cache = Harness(ONE_TOKEN)
    cache.publish([1, 2, 3])
    before = cache.snapshot()
    key = RadixKey(token_ids=np.zeros(17, np.int32), length=np.int32(1))
    with pytest.raises(ValueError):
        jitted.match_prefix(cache.cache, MatchPrefixParams(key=key))
    assert same(before, cache.cache)
    assert pad([1], 2).tolist() == [1, 0]


def test_a_bad_entry_in_a_full_tree_is_the_callers_fault():
    """With no node left, an entry that no request owns is still named as such."""
    config = uhrc_fn.CacheConfig(page_size=2, num_pages=4, max_prefix_pages=4)
    cache = uhrc_fn.init(config)
    cache, alloc = uhrc_fn.jitted.alloc_pages(cache, np.int32(4), max_new=4)
    key = uhrc_fn.radix_key(range(8), config)
    params = uhrc_fn.InsertParams(key=key, value=alloc.ids)
    cache, _ = uhrc_fn.jitted.insert(cache, params)
    other = uhrc_fn.radix_key([9, 9, 9, 9], config, num_pages=4)
    taken = uhrc_fn.InsertParams(key=other, value=np.array([1, 2, 0, 0], np.int32))
    cache, result = uhrc_fn.jitted.insert(cache, taken)
    assert int(result.inserted_len) == 0
    assert Status(int(cache.status)) == Status.NOT_OWNED
    uhrc_fn.check_invariants(cache)
