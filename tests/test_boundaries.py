"""Where a prefill is cut, and how far a sliding window lets go."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uhrc_fn.pools.boundaries import cut_prefill, cut_prefills, next_boundary
from uhrc_fn.pools.sliding import must_slide, swa_frontier, swa_release_range

INTERVAL = 128
STATIC = ("interval", "page_size", "max_unfinished")
CUT = jax.jit(cut_prefill, static_argnames=STATIC[:2])
SHARE = jax.jit(cut_prefills, static_argnames=STATIC)


def _cut(prefix, prompt, budget=4096, *, interval=INTERVAL, page_size=1, branching=0):
    """Tokens of the next forward, and whether they end the prompt."""
    cut = CUT(
        prefix,
        prompt,
        budget,
        interval=interval,
        page_size=page_size,
        branching_length=branching,
    )
    return int(cut.num_tokens), bool(cut.is_final)


def test_a_long_prompt_stops_at_the_first_boundary_and_goes_on():
    assert _cut(0, 300) == (128, False)


def test_the_boundary_counts_from_the_start_of_the_prompt_not_from_the_hit():
    assert _cut(200, 400) == (56, False)


def test_a_prompt_within_the_first_interval_is_not_cut():
    assert _cut(0, 100) == (100, True)


def test_a_prompt_that_ends_on_a_boundary_is_final():
    assert _cut(0, 128) == (128, True)


def test_a_tighter_budget_may_end_off_the_boundary():
    assert _cut(0, 300, 64, page_size=64) == (64, False)
    assert _cut(0, 300, 127, page_size=64) == (64, False)
    assert _cut(64, 300, 4096, page_size=64) == (64, False)


def test_less_than_a_page_of_budget_takes_nothing():
    assert _cut(0, 300, 63, page_size=64) == (0, False)
    assert _cut(0, 300, -5, page_size=64) == (0, False)


def test_without_the_extra_buffer_nothing_is_cut():
    assert _cut(0, 300, interval=0) == (300, True)
    assert _cut(200, 400, interval=0, branching=300) == (200, True)


def test_a_prompt_in_the_middle_is_cut_at_each_boundary_till_its_rest():
    assert _cut(128, 600) == (128, False)
    assert _cut(256, 300) == (44, True)
    assert _cut(128, 600, interval=0) == (472, True)


def test_a_prefill_stops_at_the_branching_length_too():
    assert _cut(0, 300, branching=96, page_size=32) == (96, False)
    assert _cut(96, 300, branching=96, page_size=32) == (32, False)
    assert _cut(128, 300, branching=96, page_size=32) == (128, False)
    assert int(next_boundary(0, 128, 256)) == 128
    assert int(next_boundary(128, 128, 256)) == 256


def test_nothing_is_left_of_a_prompt_that_is_computed():
    assert _cut(300, 300) == (0, True)


def _share(prefix, prompt, budget, page_size=1, **more):
    cut = SHARE(np.array(prefix), np.array(prompt), budget, page_size=page_size, **more)
    return cut.num_tokens.tolist(), cut.is_final.tolist()


def test_a_second_request_waits_while_one_is_in_the_middle_of_its_prompt():
    got = _share([0, 0], [300, 300], 4096, interval=128)
    assert got == ([128, 0], [False, False])
    got = _share([0, 0, 0], [100, 300, 50], 4096, interval=128)
    assert got == ([100, 128, 0], [True, False, False])


def test_more_unfinished_requests_may_share_the_budget():
    got = _share([0, 0], [300, 300], 4096, interval=128, max_unfinished=2)
    assert got == ([128, 128], [False, False])


def test_the_budget_goes_to_the_first_and_is_cut_for_the_last():
    got = _share([0, 0, 0], [100, 100, 10], 150, interval=128, max_unfinished=3)
    assert got == ([100, 50, 0], [True, False, False])


def test_the_last_piece_of_a_prompt_counts_as_whole_pages():
    got = _share([0, 0], [10, 16], 31, interval=64, page_size=16)
    assert got == ([10, 0], [True, False])
    got = _share([0, 0], [10, 16], 32, interval=64, page_size=16)
    assert got == ([10, 16], [True, True])


lengths = st.integers(0, 700)


@settings(max_examples=30)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    pages_an_interval=st.integers(1, 6),
    hit_pages=st.integers(0, 20),
    length=st.integers(1, 300),
    branching_page=st.integers(0, 40),
    budgets=st.lists(st.integers(0, 120), min_size=1, max_size=4),
)
def test_chunks_cover_a_prefill_exactly_and_never_cross_a_boundary(
    page_size, pages_an_interval, hit_pages, length, branching_page, budgets
):
    interval = page_size * pages_an_interval
    branching = branching_page * page_size
    start = prefix = hit_pages * page_size
    prompt = prefix + length
    budgets = [*budgets, 128]  # the last can take a page of any size
    ends = []
    for turn in range(2 * len(budgets) * prompt):
        budget = budgets[turn % len(budgets)]
        tokens, is_final = _cut(
            prefix,
            prompt,
            budget,
            interval=interval,
            page_size=page_size,
            branching=branching,
        )
        assert 0 <= tokens <= budget
        inside = range(prefix + 1, prefix + tokens)
        assert not any(n % interval == 0 or n == branching for n in inside)
        prefix += tokens
        assert is_final == (prefix == prompt)
        assert is_final or prefix % page_size == 0
        ends += [prefix] * (tokens > 0)
        if is_final:
            break
    assert prefix == prompt
    stops = {n for n in range(start + 1, prompt + 1) if n % interval == 0}
    stops |= {branching} & set(range(start + 1, prompt + 1))
    assert stops <= set(ends)


@given(
    requests=st.lists(st.tuples(lengths, st.integers(0, 300)), min_size=5, max_size=5),
    budget=st.integers(0, 600),
    max_unfinished=st.integers(1, 3),
)
def test_sharing_a_budget_is_cutting_one_by_one(requests, budget, max_unfinished):
    page_size, interval = 16, 64
    prefix = np.array([p // page_size * page_size for p, _ in requests], np.int32)
    prompt = prefix + np.array([n for _, n in requests], np.int32)
    got = SHARE(
        prefix,
        prompt,
        budget,
        interval=interval,
        page_size=page_size,
        max_unfinished=max_unfinished,
    )
    wanted, unfinished, left = [], 0, budget
    for start, end in zip(prefix.tolist(), prompt.tolist(), strict=True):
        budget_now = left if unfinished < max_unfinished else 0
        cost = -(-min(end - start, interval - start % interval) // page_size)
        tokens, is_final = _cut(
            start, end, budget_now, interval=interval, page_size=page_size
        )
        wanted.append(tokens)
        unfinished += not is_final
        left = max(left - cost * page_size, 0)  # who comes short takes what is left
    assert got.num_tokens.tolist() == wanted
    assert got.is_final.tolist() == [
        p + n == q for p, n, q in zip(prefix, wanted, prompt, strict=True)
    ]


# Sliding windows.


def test_the_frontier_keeps_the_window_and_a_page():
    assert int(swa_frontier(30, 4, 1)) == 25
    assert int(swa_frontier(21, 4, 4)) == 12
    assert int(swa_frontier(8, 4, 1, extra_pages=0)) == 4
    assert int(swa_frontier(3, 4, 1)) == 0
    assert swa_frontier(np.array([30, 3]), 4, 1).tolist() == [25, 0]


def test_b18_frontier_follows_what_is_published_not_the_live_position():
    """Counting from the live position (14) would free up to 9: no window before 8."""
    published = 8
    assert int(swa_frontier(published, 4, 1)) <= published - 4
    assert int(swa_frontier(14, 4, 1)) > published - 4


def test_a_request_frees_only_beyond_what_the_tree_owns():
    start, end, evicted = swa_release_range(swa_frontier(30, 4, 1), 0, 20)
    assert (int(start), int(end), int(evicted)) == (20, 25, 25)
    start, end, evicted = swa_release_range(5, 0, 20)
    assert (int(start), int(end), int(evicted)) == (20, 20, 5)
    start, end, evicted = swa_release_range(25, 30, 20)
    assert (int(start), int(end), int(evicted)) == (30, 30, 30)


@given(
    st.integers(0, 400),
    st.integers(1, 60),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 3),
)
def test_what_is_kept_serves_the_last_boundaries_and_nothing_more(
    published, window, page_size, extra
):
    frontier = int(swa_frontier(published, window, page_size, extra))
    last = published // page_size
    cover = -(-window // page_size)
    assert frontier % page_size == 0
    earliest = last - extra  # in pages: the first boundary that is kept servable
    assert frontier == max(earliest - cover, 0) * page_size
    for boundary in range(max(earliest, 1), last + 1):
        live = boundary * page_size - frontier
        assert live >= window or frontier == 0


def test_b46_a_request_that_diverges_in_the_last_page_still_hits_a_page_earlier():
    """Without the extra page the boundary before it would lack its window."""
    window, page_size, published = 4, 4, 24
    diverges_at = 20
    kept_from = int(swa_frontier(published, window, page_size))
    assert diverges_at - kept_from >= window
    tight = int(swa_frontier(published, window, page_size, extra_pages=0))
    assert diverges_at - tight < window


@pytest.mark.parametrize("bad", [(0, 1, 1), (4, 0, 1), (4, 1, -1)])
def test_a_frontier_needs_sizes(bad):
    with pytest.raises(ValueError, match="wanted positive sizes"):
        swa_frontier(10, *bad)


@pytest.mark.parametrize(
    ("free", "outside", "chunk", "wanted"),
    [(2, 2, 4, False), (2, 1, 4, True), (0, 0, 0, False)],
)
def test_a_prefill_slides_when_its_next_chunk_is_not_covered(
    free, outside, chunk, wanted
):
    assert bool(must_slide(free, outside, chunk)) == wanted
