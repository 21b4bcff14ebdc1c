"""The ideal hit ratio and the offline optimum, against plain definitions."""

import functools
import itertools
import json
import random

import numpy as np
import pytest

from uhrc_fn.replay import (
    BeladyBound,
    Workload,
    ideal_hit_pages,
    load_trace,
    prefix_nodes,
)


def ideal_ratio(workload):
    hits = ideal_hit_pages(workload, prefix_nodes(workload))
    return workload.hit_tokens(hits).sum() / workload.input_tokens.sum()


def random_workload(seed, num_requests=14, tokens=2, longest=4, page_size=1):
    dice = random.Random(seed)
    lengths = [dice.randint(0, longest) * page_size for _ in range(num_requests)]
    keys = [dice.randrange(tokens) for _ in range(sum(lengths))]
    return Workload(
        name="random",
        page_size=page_size,
        keys=np.array(keys, np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_tokens=np.array(lengths, np.int64),
    )


def paths_of(workload):
    """Each request's nodes, as tuples of the key so far: the plain definition."""
    size = workload.page_size
    return [
        [tuple(keys[: i + size].tolist()) for i in range(0, len(keys), size)]
        for keys in np.split(workload.keys, workload.offsets[1:-1])
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("page_size", [1, 3])
def test_the_ideal_counts_pages_that_an_earlier_request_brought(seed, page_size):
    workload = random_workload(seed, page_size=page_size)
    seen, wanted = set(), []
    for path in paths_of(workload):
        wanted.append(sum(node in seen for node in path))
        seen.update(path)
    tree = prefix_nodes(workload)
    assert ideal_hit_pages(workload, tree).tolist() == wanted
    assert tree.num_nodes == len(seen)


def test_measuring_starts_at_the_exact_fraction():
    workload = random_workload(0, num_requests=100)
    # 0.29 * 100 is 28.999999999999996 in floating point.
    assert [workload.first_measured(f) for f in (0, 0.29, 0.5, 0.999)] == [
        0,
        29,
        50,
        99,
    ]


def test_namespaces_share_nothing():
    workload = random_workload(0, num_requests=8)
    names = np.array([[0, 0, 0, 1]] * 4 + [[0, 0, 0, 2]] * 4, np.int32)
    split = Workload(**{**vars(workload), "namespaces": names})
    paths = paths_of(workload)
    halves = [
        {node for path in half for node in path} for half in (paths[:4], paths[4:])
    ]
    wanted = len(halves[0]) + len(halves[1])
    assert prefix_nodes(split).num_nodes == wanted > prefix_nodes(workload).num_nodes


def best_by_exhaustion(workload, capacity):
    """Most page hits that any keeping of prefix-closed sets can reach."""
    paths = paths_of(workload)

    @functools.cache
    def best(step, held):
        if step == len(paths):
            return 0
        path = paths[step]
        hits = sum(node in held for node in path)
        union = sorted(held | set(path))
        keeps = (
            frozenset(some)
            for size in range(min(capacity, len(union)) + 1)
            for some in itertools.combinations(union, size)
        )
        closed = (
            keep for keep in keeps if all(n[:-1] in keep for n in keep if len(n) > 1)
        )
        return hits + max(best(step + 1, keep) for keep in closed)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_belady_equals_the_best_of_all_policies(seed, capacity):
    workload = random_workload(seed, num_requests=9, tokens=3, longest=3)
    bound = BeladyBound(workload, prefix_nodes(workload))
    assert bound.hit_pages(capacity).sum() == best_by_exhaustion(workload, capacity)


@pytest.mark.parametrize("seed", range(5))
def test_belady_with_room_for_everything_is_the_ideal(seed):
    workload = random_workload(seed, num_requests=200, tokens=3, longest=8)
    tree = prefix_nodes(workload)
    hits = BeladyBound(workload, tree).hit_pages(tree.num_nodes)
    assert hits.tolist() == ideal_hit_pages(workload, tree).tolist()


# Recorded traces, where the machine has them.


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "num_requests", "num_nodes", "ideal"),
    [
        ("mooncake_conversation", 12_031, 182_790, 0.3736),
        ("mooncake_synthetic", 3_993, 43_924, 0.6512),
    ],
)
def test_mooncake_ideal(traces_dir, name, num_requests, num_nodes, ideal):
    workload = load_trace(traces_dir / f"{name}.jsonl.gz")
    assert workload.num_requests == num_requests
    assert prefix_nodes(workload).num_nodes == num_nodes
    assert ideal_ratio(workload) == pytest.approx(ideal, abs=5e-5)


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "num_requests", "num_nodes", "ideal"),
    [
        ("lmcache_taubench_text", 471, 621, 0.8255),
        ("lmcache_miniswe_text", 402, 9_493, 0.9359),
        ("gsm8k_test", 1_314, 5_516, 0.8792),
        ("tot_game24_prompts", 10_438, 473, 0.9225),
    ],
)
def test_text_ideal_in_64_byte_blocks(traces_dir, name, num_requests, num_nodes, ideal):
    workload = load_trace(traces_dir / f"{name}.jsonl.gz", page_size=64)
    assert workload.num_requests == num_requests
    assert prefix_nodes(workload).num_nodes == num_nodes
    assert ideal_ratio(workload) == pytest.approx(ideal, abs=5e-5)


@pytest.mark.traces
def test_ragpulse_follows_the_conventions_of_its_published_curves(traces_dir):
    curves = json.loads((traces_dir / "published_reference_curves.json").read_text())
    published = curves["kvcache_ai_precomputed"]["ragpulse_context_aware"]
    workload = load_trace(traces_dir / "ragpulse.jsonl.gz")
    first = workload.first_measured(0.5)
    assert (workload.num_requests, first) == (7_106, 3_553)
    total = workload.input_tokens[first:].sum()
    assert total == published["total_measured_tokens"]
    tree = prefix_nodes(workload)
    ideal = ideal_hit_pages(workload, tree)[first:]
    assert workload.hit_tokens(ideal, first).sum() == published["ceiling_hit_tokens"]
    bound = BeladyBound(workload, tree)
    for capacity, _, _, optimum in published["rows"][::20]:
        hits = bound.hit_pages(capacity)[first:]
        assert workload.hit_tokens(hits, first).sum() == optimum
    # The published optimum is flat, so show that a smaller cache would lose.
    fewer = bound.hit_pages(10)[first:]
    assert workload.hit_tokens(fewer, first).sum() < published["ceiling_hit_tokens"]


@pytest.mark.traces
def test_ragpulse_with_the_tokens_of_each_chunk(traces_dir):
    workload = load_trace(traces_dir / "ragpulse.jsonl.gz", block_weights="chunk")
    assert ideal_ratio(workload) == pytest.approx(0.3153, abs=5e-5)
