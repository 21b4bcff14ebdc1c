"""Trees of data-parallel ranks, stacked under `vmap`: each is alone."""

import functools

import jax
import numpy as np
import pytest
from harness import SMALL, Harness, numpy, pad, row, same, stack
from op_cases import busy_harness

import uhrc_fn
from uhrc_fn import EvictParams, InsertParams, MatchPrefixParams

PAGES = SMALL.max_prefix_pages


def operations(harness: Harness, prompt, other) -> dict:
    """{name: (function, arguments)} for a harness of `busy_harness`."""
    held = sorted(harness.held)
    match = harness.match(prompt)
    receipt = harness.lock(harness.match(other))
    # In the batch the second request brings a page that nobody gave it, so it and
    # the third one are irregular and go in one by one.
    values = [held[:2], [SMALL.num_pages] * 2, [held[0], held[2], held[3]]]
    values = np.stack([pad(ids, PAGES) for ids in values])
    keys = harness.keys([[7, 7, 6, 6], [5, 5, 5, 5], [7, 7, 4, 4, 3, 3]])
    key = harness.key([*prompt[:4], 8, 8, 8, 9])
    table = pad([*match.device_indices[:2].tolist(), *held[:3]], PAGES)
    insert = InsertParams(key=key, value=table, prev_prefix_len=np.int32(0))
    inserts = InsertParams(
        key=keys, value=values, prev_prefix_len=np.zeros(3, np.int32)
    )
    evict = functools.partial(uhrc_fn.evict, max_victims=4)
    alloc = functools.partial(uhrc_fn.alloc_pages, max_new=4)
    return {
        "match": (uhrc_fn.match_prefix, MatchPrefixParams(key=harness.key(prompt))),
        "peek": (uhrc_fn.peek_prefix_len, harness.key(prompt)),
        "lock": (uhrc_fn.inc_lock_ref, match),
        "unlock": (uhrc_fn.dec_lock_ref, receipt),
        "insert": (uhrc_fn.insert, insert),
        "insert_batch": (uhrc_fn.insert_batch, inserts),
        "evict": (evict, EvictParams(num_tokens=np.int32(len(prompt)))),
        "alloc": (alloc, np.int32(len(other))),
        "free": (uhrc_fn.free_pages, pad(held[:3], PAGES)),
    }


@pytest.fixture(scope="module")
def ranks():
    """Three (state, operations), all different."""
    prompts = [
        ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 9, 9]),
        ([1, 1, 2, 2, 3, 3], [4, 4]),
        ([5, 4, 3, 2, 1, 0], [5, 4, 0]),
    ]
    found = []
    for prompt, other in prompts:
        harness = busy_harness(prompt, other)
        cases = operations(harness, prompt, other)
        found.append((harness.snapshot(), cases))
    return found


VMAPPED = "match peek lock unlock insert insert_batch evict alloc free".split()


@pytest.mark.parametrize("name", VMAPPED)
def test_ranks_under_vmap_are_isolated(name, ranks):
    (zero, of_zero), (one, of_one), (other, of_other) = ranks
    function = of_zero[name][0]
    single, both = jax.jit(function), jax.jit(jax.vmap(function))

    def run(*pairs):
        return numpy(
            both(*stack([(state, *cases[name][1:]) for state, cases in pairs]))
        )

    got = run((zero, of_zero), (one, of_one))
    for rank, (state, cases) in enumerate(ranks[:2]):
        assert same(row(got, rank), numpy(single(state, *cases[name][1:])))
    # Rank 1 does not notice what rank 0 holds or does.
    again = run((other, of_other), (one, of_one))
    assert same(row(again, 1), row(got, 1))
    assert not same(row(again, 0), row(got, 0))


def test_the_batch_under_vmap_is_irregular(ranks):
    state, cases = ranks[0]
    function, params = cases["insert_batch"]
    cache, result = jax.jit(function)(state, params)
    assert result.inserted_len.tolist() == [4, 0, 6]
    names = {bit.name for bit in uhrc_fn.Status(int(cache.status))}
    assert names == {"NOT_OWNED"}
