"""Keys and namespaces: what the host makes before anything is dispatched."""

import itertools

import numpy as np
import pytest
from harness import SMALL, Harness

from uhrc_fn import CacheConfig, namespace, radix_key, stack_keys


def test_a_key_is_padded_to_a_power_of_two_of_pages():
    config = CacheConfig(page_size=4, num_pages=64, max_prefix_pages=20)
    for tokens, pages in [(0, 1), (1, 1), (4, 1), (5, 2), (9, 4), (33, 16), (65, 20)]:
        key = radix_key(list(range(1, tokens + 1)), config)
        assert key.token_ids.shape == (pages * 4,)
        assert key.token_ids.dtype == np.int32
        assert int(key.length) == tokens
        assert key.token_ids[:tokens].tolist() == list(range(1, tokens + 1))
        assert not key.token_ids[tokens:].any()
        assert not key.is_truncated


def test_num_pages_fixes_the_static_length():
    key = radix_key([7, 8, 9], SMALL, num_pages=6)
    assert key.token_ids.tolist() == [7, 8, 9] + [0] * 9


@pytest.mark.parametrize("num_pages", [1, 7])
def test_num_pages_must_hold_the_prompt_and_fit_the_limit(num_pages):
    with pytest.raises(ValueError, match=rf"num_pages={num_pages} .*Leave num_pages"):
        radix_key([1, 2, 3], SMALL, num_pages=num_pages)


def test_a_longer_prompt_is_truncated_and_says_so():
    limit = SMALL.max_prefix_pages * SMALL.page_size
    assert not radix_key(range(limit), SMALL).is_truncated
    key = radix_key(range(limit + 1), SMALL)
    assert key.is_truncated
    assert int(key.length) == limit
    assert key.token_ids.tolist() == list(range(limit))


def test_any_integer_sequence_makes_the_same_key():
    tokens = [3, 1, 4, 1, 5]
    keys = [
        radix_key(kind, SMALL)
        for kind in (
            tokens,
            tuple(tokens),
            np.array(tokens),
            np.array(tokens, np.int32),
            np.array(tokens, np.uint64),
            range(3, 8),
        )
    ]
    for key in keys[:-1]:
        assert key.token_ids.tolist() == [*tokens, 0, 0, 0]
    assert keys[-1].token_ids.tolist()[:5] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "bad", [-1, 1 << 31, (1 << 32) + 5, -(1 << 31)], ids=["-1", "2^31", "2^32", "-2^31"]
)
def test_ids_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=rf"id {bad}; wanted ids in \[0, 2\^31\)"):
        radix_key([1, bad, 2], SMALL)


def test_the_largest_id_is_a_token():
    assert radix_key([(1 << 31) - 1], SMALL).token_ids[0] == (1 << 31) - 1


@pytest.mark.parametrize("bad", [[[1, 2], [3, 4]], [0.5, 1.0], ["a"], 7, [True, False]])
def test_only_flat_sequences_of_integers_are_prompts(bad):
    with pytest.raises(ValueError, match="wanted a flat sequence of integers"):
        radix_key(bad, SMALL)


def test_namespaces_are_pairwise_different():
    # Plain concatenation, or a missing mark for None, would let some pair meet.
    parts = [None, "", "a", "ab", "abc", "bc", "c", b"a", "1", 1, ("a",), ("a", "b")]
    digests = {
        (extra, salt): tuple(namespace(extra, salt).tolist())
        for extra, salt in itertools.product(parts, parts)
    }
    assert len(set(digests.values())) == len(digests)


def test_namespace_is_a_function_of_its_parts():
    assert namespace("a", "b").tolist() == namespace("a", "b").tolist()
    assert namespace().tolist() == [0, 0, 0, 0]
    assert namespace("a").dtype == np.int32
    assert namespace(("a", ("b", 2))).shape == (4,)


@pytest.mark.parametrize("bad", [1.5, {"a": 1}, True, ("a", 2.0)])
def test_a_namespace_part_without_one_meaning_is_refused(bad):
    with pytest.raises(ValueError, match="Convert it to a stable string"):
        namespace(bad)


def test_stacked_keys_are_padded_to_the_longest():
    keys = [
        radix_key([1], SMALL),
        radix_key(range(1, 8), SMALL, extra_key="x"),
        radix_key(range(50), SMALL),
    ]
    batch = stack_keys(iter(keys))
    assert batch.token_ids.shape == (3, 12)
    assert batch.length.tolist() == [1, 7, 12]
    assert batch.is_truncated.tolist() == [False, False, True]
    assert batch.namespace[1].tolist() == namespace("x").tolist()
    for row, key in zip(batch.token_ids, keys, strict=True):
        assert row[: key.token_ids.size].tolist() == key.token_ids.tolist()
        assert not row[key.token_ids.size :].any()


def test_no_keys_cannot_be_stacked():
    with pytest.raises(ValueError, match="at least one"):
        stack_keys([])


def test_an_empty_prompt_and_one_below_a_page_match_nothing():
    cache = Harness()
    cache.publish([0, 0, 0, 0])
    assert cache.hit([]) == 0
    assert cache.hit([0]) == 0
    assert cache.hit([0, 0, 0]) == 2
