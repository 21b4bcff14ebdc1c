"""The jitted replay against numbers that others published, and against the oracle.

All capacities of a trace run in one compiled program: a pool in which a request holds
pages for ever is, for everybody else, a smaller pool.
"""

import json
import random

import numpy as np
import pytest
from harness import node_keys
from oracle import Oracle

from uhrc_fn import check_invariants, namespace
from uhrc_fn.replay import Workload, load_trace
from uhrc_fn.replay.engine import replay
from uhrc_fn.tree_arrays import NULL

# Published curves of RAGPulse.


@pytest.fixture(scope="module")
def ragpulse(traces_dir):
    """The workload and {capacity in blocks: hit tokens of leaf LRU}."""
    curves = json.loads((traces_dir / "published_reference_curves.json").read_text())
    rows = curves["kvcache_ai_precomputed"]["ragpulse_context_aware"]["rows"]
    leaf_lru = {capacity: hit_tokens for capacity, _, hit_tokens, _ in rows}
    return load_trace(traces_dir / "ragpulse.jsonl.gz"), leaf_lru


@pytest.mark.traces
def test_ragpulse_hits_are_the_published_integers(ragpulse):
    workload, published = ragpulse
    first = workload.first_measured(0.5)
    moving = [capacity for capacity in sorted(published) if capacity < 2_100]
    chosen = moving[::5]
    assert len(chosen) >= 20 and len({published[c] for c in chosen}) >= 15
    got = {}
    for capacity in chosen:
        result = replay(workload, capacity_pages=2_100, reserved_pages=2_100 - capacity)
        hits = result.hit_pages[first:]
        got[capacity] = int(workload.hit_tokens(hits, first).sum())
    assert got == {capacity: published[capacity] for capacity in chosen}


# The table of leaf LRU of the Mooncake traces; the largest capacity holds all blocks.

MOONCAKE = {
    "mooncake_conversation": {
        1_827: 0.0535,
        5_859: 0.1387,
        9_139: 0.1996,
        18_279: 0.2844,
        45_697: 0.3604,
        91_395: 0.3703,
        182_790: 0.3736,
    },
    "mooncake_synthetic": {
        439: 0.0388,
        2_196: 0.1596,
        4_392: 0.2673,
        5_859: 0.3151,
        10_981: 0.4522,
        21_962: 0.5996,
        43_924: 0.6512,
    },
}


@pytest.mark.traces
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if i else ())
        for i, name in enumerate(MOONCAKE)
    ],
)
def test_mooncake_hit_ratios_are_those_of_the_table(traces_dir, name):
    workload = load_trace(traces_dir / f"{name}.jsonl.gz")
    table = MOONCAKE[name]
    everything = max(table)
    got = {}
    for capacity in table:
        result = replay(
            workload,
            capacity_pages=everything,
            reserved_pages=everything - capacity,
        )
        hit_tokens = workload.hit_tokens(result.hit_pages).sum()
        got[capacity] = hit_tokens / workload.input_tokens.sum()
    assert got == pytest.approx(table, abs=5e-4)


# A generated workload, for machines without traces.

PAGE, POOL, RESERVED = 3, 80, 24
NAMES = ("left", "right")


def generated_requests(count: int, seed: int = 11) -> list[tuple[str, list[int]]]:
    """(Namespace, tokens) of conversations held side by side.

    They share a few beginnings, grow turn by turn, branch off, and the longest outgrow
    the pool of 56 pages that the requests get.
    """
    dice = random.Random(seed)
    beginnings = [[dice.randrange(9) for _ in range(n)] for n in (7, 12, 30, 31)]
    live: list[tuple[str, list[int]]] = []
    requests = []
    while len(requests) < count:
        if len(live) < 6 or dice.random() < 0.1:
            live.append((dice.choice(NAMES), list(dice.choice(beginnings))))
        place = dice.randrange(len(live))
        name, tokens = live[place]
        if dice.random() < 0.1:  # back to an earlier point of the conversation
            tokens = tokens[: dice.randint(1, len(tokens))]
        tokens = tokens[: 60 * PAGE] + [
            dice.randrange(9) for _ in range(dice.randint(1, 14))
        ]
        live[place] = name, tokens
        requests.append((name, tokens))
        if dice.random() < len(tokens) / 1_500:
            live.pop(place)
    return requests


def workload_of(requests) -> Workload:
    whole = [tokens[: len(tokens) // PAGE * PAGE] for _, tokens in requests]
    lengths = [len(tokens) for tokens in whole]
    return Workload(
        name="generated",
        page_size=PAGE,
        keys=np.concatenate(whole).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_tokens=np.array([len(tokens) for _, tokens in requests], np.int64),
        namespaces=np.stack([namespace(name) for name, _ in requests]),
    )


def oracle_replay(oracle: Oracle, requests):
    """Each request's pages as [hit, evicted, inserted]."""
    rows = []
    for name, tokens in requests:
        key = oracle.key(tokens, name)
        match = oracle.match(key)
        receipt = oracle.lock(match)
        hit, num_free = len(match.pages), len(oracle.pool.free)
        new = oracle.alloc(len(key) - hit, partial=True)
        held = hit + len(new)
        result = oracle.insert(key[:held], match.pages + new, match.hit_length)
        oracle.unlock(receipt)
        assert result.adopted == new
        rows.append([hit, max(len(new) - num_free, 0), len(new)])
    assert not oracle.take_status()
    return np.array(rows)


def test_a_generated_workload_does_what_the_oracle_does():
    requests = generated_requests(2_000)
    pages = np.array([len(tokens) // PAGE for _, tokens in requests])
    # Both compiled lengths (16 and 64 pages) are used, and the pool is outgrown.
    assert (pages <= 16).any() and POOL - RESERVED < pages.max() <= 64

    oracle = Oracle(PAGE, POOL)
    oracle.alloc(RESERVED)
    wanted = oracle_replay(oracle, requests)
    result = replay(
        workload_of(requests),
        capacity_pages=POOL,
        reserved_pages=RESERVED,
        measure_from=0.25,
    )
    assert result.hit_pages.tolist() == wanted[:, 0].tolist()
    assert result.evicted_pages == wanted[500:, 1].sum()
    assert result.inserted_pages == wanted[500:, 2].sum()
    # Fixed, so that an error in both would show as a change.
    assert wanted.sum(0).tolist() == [4_619, 33_320, 33_376]

    check_invariants(result.cache)
    names = {tuple(namespace(name).tolist()): name for name in NAMES}
    value = np.asarray(result.cache.tree.value)[0]
    tree = [
        (names[key[0]], tuple(t for page in key[1:] for t in page), int(value[node]), 0)
        for node, key in node_keys(result.cache).items()
    ]
    assert sorted(tree) == sorted(oracle.snapshot()["pages"])
    assert np.count_nonzero(value != NULL) == POOL - RESERVED


# What all of the above relies on.


@pytest.mark.slow
def test_a_pool_with_reserved_pages_is_a_smaller_pool():
    requests = [(n, tokens[: 16 * PAGE]) for n, tokens in generated_requests(300)]
    workload = workload_of(requests)
    reserved = replay(workload, capacity_pages=32, reserved_pages=20)
    smaller = replay(workload, capacity_pages=12)  # less than the longest request
    larger = replay(workload, capacity_pages=32)
    assert reserved.hit_pages.tolist() == smaller.hit_pages.tolist()
    assert reserved.evicted_pages == smaller.evicted_pages
    assert reserved.hit_pages.sum() < larger.hit_pages.sum()


@pytest.mark.parametrize("reserved", [-1, 16])
def test_reserved_pages_leave_something_of_the_pool(reserved):
    workload = workload_of(generated_requests(2))
    with pytest.raises(ValueError, match=f"reserved_pages={reserved} of a pool of 16"):
        replay(workload, capacity_pages=16, reserved_pages=reserved)
