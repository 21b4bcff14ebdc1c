"""Routing over data-parallel ranks: policies, probes, and a tick of intake."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import SMALL, numpy, same, stack
from hypothesis import given
from hypothesis import strategies as st
from op_cases import busy_harness

import uhrc_fn
from uhrc_fn.engine import dp_routing as dp
from uhrc_fn.engine.dp_routing.loads import TOKENS_LIMIT
from uhrc_fn.engine.dp_routing.probe import MAX_ESTIMATED_TOKENS

CACHE_AWARE = jax.jit(dp.cache_aware)
PROMPT = 512


def _loads(requests, tokens=None, outputs=None):
    zeros = [0] * len(requests)
    return dp.RankLoads(requests, tokens or zeros, outputs or zeros)


def _cache_aware(
    loads, matched, *, prompt_len=PROMPT, item=(0, 0), eligible=None, **kw
):
    eligible = [True] * loads.num_ranks if eligible is None else eligible
    rest: Any = (*item, np.array(eligible), np.array(matched), prompt_len)
    on_host = dp.cache_aware(loads, *rest, **kw)
    jitted = CACHE_AWARE(dp.RankLoads(*map(jnp.array, loads)), *rest, **kw)
    assert int(on_host) == int(jitted)
    return int(jitted)


# cache_aware


def test_a_holder_wins_when_loads_are_equal():
    assert _cache_aware(_loads([3, 3, 3]), [0, 0, 500]) == 2


def test_the_least_loaded_of_the_holders_wins_not_the_longest_hit():
    assert _cache_aware(_loads([5, 1, 3]), [512, 0, 300]) == 2


def test_without_a_holder_the_shapes_decide():
    loads = _loads([0, 1], [1000, 100], [0, 0])
    assert _cache_aware(loads, [0, 0], item=(10, 10)) == 1


def test_a_hit_of_a_part_below_the_threshold_makes_no_holder():
    loads = _loads([0, 0], [900, 0])
    assert _cache_aware(loads, [100, 0]) == 1


def test_half_of_the_prompt_is_not_more_than_half():
    loads = _loads([0, 0], [900, 0])
    assert _cache_aware(loads, [256, 0]) == 1
    assert _cache_aware(loads, [257, 0]) == 0
    assert _cache_aware(loads, [256, 0], prompt_len=511) == 0
    assert _cache_aware(loads, [255, 0], prompt_len=511) == 1


def test_a_large_skew_of_load_overrides_affinity():
    assert _cache_aware(_loads([40, 0]), [512, 0]) == 1


def test_a_small_skew_keeps_affinity():
    assert _cache_aware(_loads([5, 0]), [512, 0]) == 0


def test_a_skew_is_large_only_beyond_both_limits():
    assert _cache_aware(_loads([32, 0]), [512, 0]) == 0  # not more than 32
    assert _cache_aware(_loads([33, 0]), [512, 0]) == 1
    assert _cache_aware(_loads([363, 330]), [512, 0]) == 0  # 1.1 times exactly
    assert _cache_aware(_loads([364, 330]), [512, 0]) == 1


def test_skew_is_measured_among_eligible_ranks():
    loads = _loads([90, 40, 20])
    assert _cache_aware(loads, [0, 512, 0], eligible=[False, True, True]) == 1
    assert _cache_aware(loads, [0, 512, 0]) == 2


def test_a_hot_prefix_spills_when_its_rank_is_full():
    loads = _loads([4, 4], [0, 70])
    assert _cache_aware(loads, [512, 0], eligible=[False, True]) == 1


@pytest.mark.parametrize("matched", [[0, 400, 400], [0, 400, 512]])
def test_ties_among_holders_go_to_fewer_tokens_then_to_the_lowest_rank(matched):
    assert _cache_aware(_loads([0, 2, 2]), matched) == 1
    assert _cache_aware(_loads([0, 2, 2], [0, 9, 8]), matched) == 2
    assert _cache_aware(_loads([0, 2, 2], [0, 5, 4], [0, 3, 4]), matched) == 1


def test_ties_of_a_skewed_load_go_to_fewer_tokens_then_to_the_lowest_rank():
    assert _cache_aware(_loads([50, 1, 1]), [512, 0, 0]) == 1
    assert _cache_aware(_loads([50, 1, 1], [0, 9, 8]), [512, 0, 0]) == 2


def test_a_prompt_of_no_length_is_routed_by_shape():
    loads = _loads([0, 0], [9, 0])
    assert _cache_aware(loads, [512, 0], prompt_len=0) == 1


def test_with_every_rank_full_there_is_no_rank():
    full = np.array([False, False])
    loads = _loads([1, 1])
    assert _cache_aware(loads, [512, 0], eligible=full) == dp.NO_RANK
    assert int(dp.min_running_queue(loads, full)) == dp.NO_RANK
    assert int(dp.shape_aware(loads, 1, 1, full)) == dp.NO_RANK


def test_thresholds_are_settings():
    strict = dp.Affinity(max_skew=3)
    assert _cache_aware(_loads([5, 0]), [512, 0], affinity=strict) == 1
    shy = dp.Affinity(holder_percent=90)
    loads = _loads([0, 0], [9, 0])
    assert _cache_aware(loads, [400, 0]) == 0
    assert _cache_aware(loads, [400, 0], affinity=shy) == 1


# shape_aware and min_running_queue


def _shape(loads, item, eligible=None):
    eligible = [True] * loads.num_ranks if eligible is None else eligible
    input_tokens, output_tokens = item
    return int(dp.shape_aware(loads, input_tokens, output_tokens, np.array(eligible)))


def test_the_smallest_bottleneck_wins():
    assert _shape(_loads([0, 0], [100, 60], [0, 60]), (10, 10)) == 1


def test_complementary_shapes_meet():
    loads = _loads([1, 1], [1000, 0], [0, 1000])
    assert _shape(loads, (500, 1)) == 1
    assert _shape(loads, (1, 500)) == 0


def test_equal_bottlenecks_go_to_the_smaller_total_then_to_the_lowest_rank():
    assert _shape(_loads([0, 0], [100, 100], [50, 20]), (0, 0)) == 1
    assert _shape(_loads([0, 0], [100, 100], [20, 20]), (0, 0)) == 0


def test_the_shape_of_the_request_flips_the_choice():
    loads = _loads([0, 0], [100, 10], [10, 90])
    assert _shape(loads, (0, 60)) == 0
    assert _shape(loads, (60, 0)) == 1


def test_shape_aware_looks_at_eligible_ranks_only_and_not_at_requests():
    assert _shape(_loads([0, 9], [100, 10]), (0, 0)) == 1
    assert _shape(_loads([0, 9], [100, 10]), (0, 0), [True, False]) == 0


def test_min_running_queue_orders_by_requests_then_tokens_then_rank():
    everyone = np.array([True] * 3)
    pick = lambda *loads: int(dp.min_running_queue(_loads(*loads), everyone))
    assert pick([2, 1, 1], [0, 8, 7]) == 2
    assert pick([2, 1, 1], [0, 8, 7], [0, 0, 1]) == 1
    assert pick([1, 1, 1], [5, 5, 5]) == 0


def test_round_robin_takes_turns():
    assert [int(dp.round_robin(turn, 3)) for turn in range(5)] == [0, 1, 2, 0, 1]


rows = st.lists(
    st.tuples(*[st.integers(0, n) for n in (45, 90, 90, 520)], st.booleans()),
    min_size=4,
    max_size=4,
)


@given(rows, st.tuples(st.integers(0, 80), st.integers(0, 80)))
def test_cache_aware_follows_its_rules(rows, item):
    requests, inputs, outputs, matched, eligible = map(list, zip(*rows, strict=True))
    ranks = [r for r in range(4) if eligible[r]]

    def by_load(r):
        return requests[r], inputs[r] + outputs[r], r

    def by_shape(r):
        after = inputs[r] + item[0], outputs[r] + item[1]
        return max(after), sum(after), r

    wanted = dp.NO_RANK
    if ranks:
        counts = [requests[r] for r in ranks]
        holders = [r for r in ranks if matched[r] * 2 > PROMPT]
        wanted = min(ranks, key=by_shape)
        if max(counts) - min(counts) > 32 and 10 * max(counts) > 11 * min(counts):
            wanted = min(ranks, key=by_load)
        elif holders:
            wanted = min(holders, key=by_load)
    loads = dp.RankLoads(requests, inputs, outputs)
    got = CACHE_AWARE(
        dp.RankLoads(*map(np.array, loads)), *item, np.array(eligible),
        np.array(matched), PROMPT,
    )  # fmt: skip
    assert int(got) == wanted


# Loads


def test_waiting_requests_count_like_running_ones():
    ranks, tokens = [0, 1, 1, -1], [5, 6, 7, 90]
    loads = dp.count_loads(ranks, tokens, [1, 1, 1, 1], 3)
    assert loads.requests.tolist() == [1, 2, 0]
    assert loads.input_tokens.tolist() == [5, 13, 0]
    assert loads.output_tokens.tolist() == [1, 2, 0]
    assert dp.eligible_ranks(loads, 2).tolist() == [True, False, True]
    assert dp.eligible_ranks(loads, 2, [0, 0, 1]).tolist() == [True, False, False]


def test_sums_of_tokens_stop_at_a_limit_rather_than_wrap():
    huge = dp.count_loads([0] * 9, [2**30] * 9, [0] * 9, 2)
    assert huge.input_tokens.tolist() == [TOKENS_LIMIT, 0]
    more = dp.add_load(huge, 0, 2**30, 2**30)
    assert more.input_tokens.tolist() == [TOKENS_LIMIT, 0]
    assert _shape(more, (2**30, 2**30)) == 1


def test_loads_are_counted_exactly_below_the_limit():
    tokens = np.random.default_rng(0).integers(0, 1 << 20, 200)
    loads = dp.count_loads([1] * 200, tokens, tokens // 2, 2)
    assert loads.input_tokens.tolist() == [0, tokens.sum()]
    assert loads.output_tokens.tolist() == [0, (tokens // 2).sum()]


# Probes


def _probe(ids, **fields) -> Any:
    return dp.probe_key(dp.RouteRequest(input_ids=ids, **fields))


def test_the_probe_leaves_one_token_to_compute():
    assert _probe([1, 2, 3, 4]) == ([1, 2, 3], None, None)
    assert _probe(np.array([1, 2, 3])).token_ids.tolist() == [1, 2]


def test_the_probe_carries_the_namespace():
    assert _probe([1, 2], extra_key="t", cache_salt="s")[1:] == ("t", "s")
    assert _probe([1, 2], extra_key="t", lora_id="lora")[1] == "tlora"


def test_a_lora_id_is_a_key_by_itself():
    assert _probe([1, 2], lora_id="lora")[1] == "lora"


def test_log_probabilities_clamp_the_probe_to_their_start():
    ids = [1, 2, 3, 4]
    ask = dict(return_logprob=True)
    assert _probe(ids, **ask, logprob_start_len=2).token_ids == [1, 2]
    assert _probe(ids, **ask, logprob_start_len=9).token_ids == [1, 2, 3]
    assert _probe(ids, logprob_start_len=2).token_ids == [1, 2, 3]
    assert _probe(ids, **ask, logprob_start_len=0) is None


@pytest.mark.parametrize("start", [None, -1])
def test_log_probabilities_of_the_last_token_clamp_nothing(start):
    probe = _probe([1, 2, 3], return_logprob=True, logprob_start_len=start)
    assert probe.token_ids == [1, 2]


@pytest.mark.parametrize(
    "ids", [[7], [], None, [[1, 2], [3]], np.zeros((2, 2), int), "text", [[0.5]]]
)
def test_what_has_no_prefix_to_reuse_is_not_probed(ids):
    assert _probe(ids) is None


def test_an_extra_key_that_cannot_take_a_lora_id_is_refused():
    with pytest.raises(ValueError, match="lora_id='b'"):
        _probe([1, 2], extra_key=("a",), lora_id="b")


@pytest.fixture(scope="module")
def ranks():
    """Caches of three ranks, and a key that they hit 0, 2 and 3 pages of."""
    prompts = [[9, 9], [1, 2, 3, 4, 8, 8], [1, 2, 3, 4, 5, 6, 7, 7]]
    states = [busy_harness(p, [0, 9, 9, 9]).snapshot() for p in prompts]
    states = [jax.tree.map(jnp.asarray, state) for state in states]
    return states, uhrc_fn.radix_key([1, 2, 3, 4, 5, 6, 9], SMALL)


def test_B33_a_probe_reports_what_a_match_would_and_leaves_every_cache_as_it_is(ranks):
    states, key = ranks
    stacked = stack(states)
    before = numpy(jax.tree.map(jnp.copy, stacked))
    lengths = jax.jit(dp.peek_ranks)(stacked, key)
    assert same(before, numpy(stacked))
    params = uhrc_fn.MatchPrefixParams(key=key)
    wanted = [int(uhrc_fn.match_prefix(s, params)[1].hit_length) for s in states]
    assert lengths.tolist() == wanted == [0, 4, 6]
    assert dp.peek_ranks(states, key).tolist() == wanted


# Estimates


@pytest.mark.parametrize(
    ("fields", "settings", "wanted"),
    [
        ({}, {}, 128),
        ({"max_new_tokens": None}, {}, MAX_ESTIMATED_TOKENS),
        ({"max_new_tokens": 9000}, {}, MAX_ESTIMATED_TOKENS),
        ({"max_new_tokens": 9}, {"new_token_ratio": 0.7}, 6),
        ({"max_new_tokens": 9000}, {"max_request_len": 50}, 45),
        ({"max_new_tokens": 9}, {"max_request_len": 3}, 0),
        ({"max_new_tokens": 9, "ignore_eos": True}, {"new_token_ratio": 0.1}, 10),
        ({"max_new_tokens": 9, "ignore_eos": True}, {"page_size": 8}, 17),
    ],
)
def test_the_expected_answer(fields, settings, wanted):
    request = dp.RouteRequest(input_ids=[1, 2, 3, 4], **fields)
    assert dp.estimate_tokens(request, **settings) == (4, wanted)


def test_a_negative_limit_is_refused():
    request = dp.RouteRequest(input_ids=[1], max_new_tokens=-1)
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        dp.estimate_tokens(request)


# Intake


def _request(length=8, **fields):
    fields.setdefault("max_new_tokens", 0)
    return dp.RouteRequest(input_ids=[1] * length, **fields)


def _tick(arrivals, requests, *, policy=None, most=8, deferred=(), **kw):
    router = dp.Router(
        policy=policy, num_ranks=len(requests), max_running_requests=most
    )
    return dp.assign_dp_ranks(
        deferred, arrivals, router=router, loads=_loads(requests), **kw
    )


def _ranks(tick):
    return [rank for _, rank in tick.passed]


POLICIES = ["min_running_queue", "shape_aware", "cache_aware"]
NOTHING_HIT = {"peek": lambda probe: np.zeros(2, np.int32)}


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_are_deferred_while_all_ranks_are_full(policy):
    wait, go = _request(), _request()
    tick = _tick([wait], [2, 2], policy=policy, most=2, **NOTHING_HIT)
    assert not tick.passed and tick.deferred == [wait] and wait.dp_rank is None
    tick = _tick([go], [2, 1], policy=policy, most=2, deferred=[wait], **NOTHING_HIT)
    assert tick.passed == [(wait, 1)] and tick.deferred == [go]


def test_a_batch_that_the_scheduler_calls_full_gets_nothing():
    tick = _tick([_request()], [5, 0], is_full=np.array([False, True]))
    assert _ranks(tick) == [0]


def test_deferred_requests_come_before_new_ones():
    old, new = _request(), _request()
    tick = _tick([new], [0, 1], most=1, deferred=[old])
    assert tick.passed == [(old, 0)] and tick.deferred == [new]


def test_a_valid_rank_is_kept_and_counts_for_the_next_request():
    first, second = _request(dp_rank=0), _request()
    assert _ranks(_tick([first, second], [0, 0])) == [0, 1]
    # No look at capacity: the request insists.
    tick = _tick([_request(dp_rank=1)], [2, 2], most=2)
    assert _ranks(tick) == [1] and tick.loads.requests.tolist() == [2, 3]


def test_round_robin_never_defers_and_goes_on_where_it_stopped():
    tick = _tick([_request() for _ in range(3)], [9, 9], policy="round_robin", most=2)
    assert _ranks(tick) == [0, 1, 0] and not tick.deferred
    kept = [_request(dp_rank=0), _request()]
    tick = _tick(kept, [9, 9], policy="round_robin", turn=tick.turn)
    assert _ranks(tick) == [0, 1] and tick.turn == 4


@pytest.mark.parametrize("rank", [-1, 2, 70])
def test_a_rank_that_does_not_exist_is_reassigned_with_a_warning(rank, caplog):
    tick = _tick([_request(dp_rank=rank)], [3, 0])
    assert _ranks(tick) == [1]
    assert f"dp_rank={rank}" in caplog.text


def test_cache_aware_sees_the_requests_and_tokens_of_the_same_tick():
    hit = {"peek": lambda probe: np.array([len(probe.token_ids)] * 2)}
    tick = _tick([_request(8), _request(8)], [0, 0], policy="cache_aware", **hit)
    assert _ranks(tick) == [0, 1]
    assert tick.loads.requests.tolist() == [1, 1]
    tick = _tick([_request(8)], [0, 0], policy="cache_aware", **hit)
    assert tick.loads.requests.tolist() == [1, 0]
    assert tick.loads.input_tokens.tolist() == [8, 0]


@pytest.mark.parametrize("policy", ["cache_aware", "shape_aware"])
def test_prompts_and_answers_of_the_same_tick_are_kept_apart(policy):
    """By tokens in all the third would go to the second rank."""
    shapes = [(10, 2), (1, 9), (1, 6)]
    arrivals = [_request(a, max_new_tokens=b) for a, b in shapes]
    tick = _tick(arrivals, [0, 0], policy=policy, **NOTHING_HIT)
    assert _ranks(tick) == [0, 1, 0]
    assert tick.loads.input_tokens.tolist() == [11, 1]
    assert tick.loads.output_tokens.tolist() == [8, 9]


def test_one_rank_takes_every_request_and_messages_pass_in_place():
    a, b = _request(), _request(dp_rank=3)
    tick = _tick([a, "flush", b], [9], most=2)
    assert tick.passed == [(a, 0), ("flush", None), (b, 0)] and not tick.deferred


def test_messages_pass_in_place_among_deferred_requests():
    a, b = _request(), _request(dp_rank=1)
    tick = _tick(["abort", a, "flush", b], [2, 2], most=2)
    assert tick.passed == [("abort", None), ("flush", None), (b, 1)]
    assert tick.deferred == [a]


def test_cache_aware_routes_to_the_rank_that_holds_the_prompt(ranks):
    states, _ = ranks
    ask = jax.jit(dp.peek_ranks)
    peek = lambda probe: ask(states, uhrc_fn.radix_key(probe.token_ids, SMALL))
    known, new = _request(), _request()
    known.input_ids, new.input_ids = [1, 2, 3, 4, 5, 6, 5, 9, 9], [5, 5, 5]
    tick = _tick([known, new], [0, 0, 4], policy="cache_aware", peek=peek)
    assert _ranks(tick) == [2, 0]


def test_only_cache_aware_peeks_and_only_for_what_it_routes():
    def peek(probe):
        raise AssertionError("peeked")

    for policy in ("round_robin", "min_running_queue", "shape_aware"):
        _tick([_request()], [0, 0], policy=policy, peek=peek)
    _tick([_request(dp_rank=1), _request(1)], [0, 0], policy="cache_aware", peek=peek)


def test_a_tick_is_the_same_for_every_padding():
    """Five requests are padded to eight rows, and padding adds no load."""
    arrivals = [_request(n, max_new_tokens=n) for n in (5, 3, 9, 1, 7)]
    tick = _tick(arrivals, [0, 1, 0])
    assert _ranks(tick) == [0, 2, 1, 2, 0]
    assert tick.loads.requests.tolist() == [2, 2, 2]
    assert tick.loads.input_tokens.tolist() == [12, 9, 4]


def test_an_empty_tick_changes_nothing():
    tick = _tick([], [1, 2])
    assert not tick.passed and tick.loads.requests.tolist() == [1, 2]


# Settings


def test_the_default_policy_is_min_running_queue():
    assert dp.resolve_policy() is dp.DpSchedulePolicy.MIN_RUNNING_QUEUE
    router = dp.Router(num_ranks=2, max_running_requests=1)
    assert router.policy == "min_running_queue"


@pytest.mark.parametrize("name", list(dp.DpSchedulePolicy))
def test_an_explicit_policy_is_kept(name):
    assert dp.Router(num_ranks=2, max_running_requests=1, policy=name).policy == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "fastest"}, "'fastest'; wanted one of round_robin, min_running"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"max_running_requests": 0}, "max_running_requests=0; wanted at least 1"),
        ({"page_size": 0}, "page_size=0; wanted at least 1"),
        ({"affinity": dp.Affinity(max_skew=-1)}, "no negative threshold"),
        ({"affinity": dp.Affinity(holder_percent=101)}, "at most 100"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dp.Router(**({"num_ranks": 2, "max_running_requests": 1} | fields))


def test_arguments_that_do_not_fit_each_other_are_refused():
    loads = _loads([0, 0])
    with pytest.raises(ValueError, match="matched has shape"):
        dp.cache_aware(loads, 0, 0, np.ones(2, bool), np.zeros(3, int), 1)
    with pytest.raises(ValueError, match="is_eligible has shape"):
        dp.min_running_queue(loads, np.ones(3, bool))
    with pytest.raises(ValueError, match="loads have shapes"):
        dp.add_load(dp.RankLoads([0, 0], [0], [0, 0]), 0, 1, 1)
    router = dp.Router(num_ranks=3, max_running_requests=1)
    with pytest.raises(ValueError, match="loads are of 2 ranks"):
        dp.assign_dp_ranks([], [], router=router, loads=loads)
    with pytest.raises(ValueError, match="cache_aware without peek"):
        _tick([_request()], [0, 0], policy="cache_aware")
    with pytest.raises(ValueError, match="peek gave shape"):
        _tick([_request()], [0] * 3, policy="cache_aware", **NOTHING_HIT)


def test_every_policy_runs_over_ranks_inside_one_program():
    loads = dp.RankLoads(*np.array([[1, 2, 0], [5, 0, 9], [0, 0, 0]], np.int32))

    @jax.jit
    def route(loads):
        eligible = dp.eligible_ranks(loads, 2)
        return [
            dp.round_robin(jnp.sum(loads.requests), 3),
            dp.min_running_queue(loads, eligible),
            dp.shape_aware(loads, 4, 4, eligible),
            dp.cache_aware(loads, 4, 4, eligible, jnp.array([8, 0, 0]), 8),
        ]

    assert [int(rank) for rank in route(loads)] == [0, 2, 0, 0]
