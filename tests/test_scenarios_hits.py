"""Faults that cost real prefix caches their hits: recency, order of eviction, silence.

Each docstring names the one-line fault that would turn its test red, and where a number
is not the scenario's own, which one and why. One token a page, a window of four tokens
and four slots unless a test says otherwise; every step of a harness ends with a check
of every entry and every invariant.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import node_keys, numpy, ring_ids, same
from harness_hybrid import FULL, RECURRENT, SWA, HybridHarness
from op_cases import op_cases
from request_machine import requests_of
from scenario_caches import FOUR_SLOTS, WINDOWED, a, b, c
from test_loop_free import LOOPS, asks_once, equations

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams
from uhrc_fn.pools.sliding import swa_frontier
from uhrc_fn.replay import load_trace
from uhrc_fn.replay.engine import replay
from uhrc_fn.replay.hybrid import Hybrid
from uhrc_fn.state import Ring
from uhrc_fn.tree_arrays import NULL


def live(cache: HybridHarness, tokens, component=SWA) -> list[int]:
    """Pages of a cached prompt that hold an entry of a component."""
    keys = {key[1:]: node for node, key in node_keys(cache.cache).items()}
    value = np.asarray(cache.cache.tree.value)[component]
    path = [keys[tuple((t,) for t in tokens[: i + 1])] for i in range(len(tokens))]
    return [i for i, node in enumerate(path) if value[node] != NULL]


def lengths(match) -> tuple[int, int, int]:
    """What every component serves, what FULL alone has, and the hint."""
    hint = int(match.swa_branching_seqlen) or int(match.recurrent_branching_seqlen)
    return int(match.hit_length), int(match.full_kv_hit_length), hint


def publish_anew(cache: HybridHarness, tokens, evicted: int = 0):
    """A request that computed all of its prompt; what the tree refuses is freed."""
    pages, swa = (cache.take(kind, len(tokens)) for kind in (FULL, SWA))
    result = cache.insert(
        tokens, pages, swa=[0] * evicted + swa[evicted:], evicted=evicted
    )
    for kind, mine in ((FULL, pages), (SWA, swa)):
        cache.free_of(kind, [i for i in mine if i in cache.owned[kind]])
    return result


# Recency, policy, cost.


@pytest.mark.skip(reason="no other eviction policy than LRU: LFU and hit counters")
def test_B30_a_hit_counts_for_a_policy_that_counts():
    """Fault: the hit counter is never incremented."""


def test_B31_a_match_keeps_its_window_and_not_all_that_stands_before_it():
    """Fault: a match refreshes SWA pages from the root on.

    EV(swa=4) takes a[0:4), which lie outside of every window, though the match on A is
    the younger one; the window of C stays.
    """
    cache = HybridHarness(WINDOWED)
    cache.publish(a(0, 20))
    cache.publish(c(0, 4))
    assert cache.match(a(0, 20)).hit_length == 20
    assert cache.evict_all_of(swa=4) == (0, 4, 0)
    assert live(cache, a(0, 20)) == list(range(4, 20))
    assert live(cache, c(0, 4)) == list(range(4))
    assert cache.hit(a(0, 20)) == 20 and cache.hit(c(0, 4)) == 4


def last_uses(trace) -> list[tuple]:
    """Every cached prefix, by what used it last, deeper ones first: plain Python."""
    used = {}
    for turn, tokens in enumerate(trace):
        for depth in range(1, len(tokens) + 1):
            used[tuple(tokens[:depth])] = (turn, -depth)
    return sorted(used, key=used.get)  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 5])
def test_B32_victims_come_in_the_order_of_a_sorted_oracle(at_once):
    """Fault: deeper pages are stamped younger, so that parents come first.

    LRU is the only policy.
    """
    rng = np.random.default_rng(32)
    cache = HybridHarness(WINDOWED)
    trace = []
    for _ in range(12):
        cut, name = int(rng.integers(0, 7)), 10 * int(rng.integers(4))
        tokens = a(0, cut) + b(name, name + 4)
        if rng.random() < 0.5 or not trace:
            cache.publish(tokens)
        else:
            tokens = tokens[: cache.match(tokens, full_only=True).hit_length]
        trace.append(tokens)
    wanted = last_uses(trace)
    assert len(wanted) == cache.size > 20
    got = []
    while cache.size:
        paths = {
            int(cache.cache.tree.value[FULL, node]): tuple(t for (t,) in key[1:])
            for node, key in node_keys(cache.cache).items()
        }
        before = cache.num_free(FULL)
        cache.evict_all_of(full=at_once, max_victims=5)
        # What is freed goes behind the end of the free list, in order.
        got += [paths[page] for page in cache.ring(FULL)[before:]]
    assert got == wanted


THIN = CacheConfig(
    page_size=1, num_pages=10_000, max_prefix_pages=1, victim_plan_size=500
)


@functools.partial(jax.jit, donate_argnums=0)
def publish_leaves(cache, names):
    """One leaf below the root for each name, in one loop on the device."""

    def publish(cache, name):
        key = uhrc_fn.RadixKey(token_ids=name[None], length=jnp.int32(1))
        cache, page = uhrc_fn.alloc_pages(cache, 1)
        params = InsertParams(key=key, value=page.ids)
        return uhrc_fn.insert(cache, params)[0], None

    return jax.lax.scan(publish, cache, names)[0]


@functools.partial(jax.jit, donate_argnums=0)
def use_leaves(cache, names):
    def use(cache, name):
        key = uhrc_fn.RadixKey(token_ids=name[None], length=jnp.int32(1))
        cache, match = uhrc_fn.match_prefix(cache, MatchPrefixParams(key=key))
        return cache, match.hit_length

    return jax.lax.scan(use, cache, names)


def test_B32_ten_thousand_thin_leaves_go_in_the_order_of_their_last_use():
    """Fault: a plan of victims is believed after its nodes were used again."""
    rng = np.random.default_rng(0)
    cache = publish_leaves(uhrc_fn.init(THIN), np.arange(10_000, dtype=np.int32))
    evict = jax.jit(uhrc_fn.evict, static_argnames="max_victims", donate_argnums=0)
    order, got, wanted = list(range(10_000)), [], []
    while order:
        # Some of those that a plan of victims holds already are used again.
        used = rng.choice(order[:600], 100).astype(np.int32)
        cache, hits = use_leaves(cache, used)
        assert np.all(np.asarray(hits) == 1)
        last = {name: turn for turn, name in enumerate(used.tolist())}
        order = [n for n in order if n not in last] + sorted(
            last, key=lambda n: last[n]
        )
        pages = np.asarray(cache.tree.value)[FULL].tolist()
        names = np.asarray(cache.tree.tokens)[:, 0].tolist()
        name_of = dict(zip(pages, names, strict=True))
        for _ in range(4):
            before = int(cache.num_free[FULL])
            params = EvictParams(num_tokens=np.int32(150))
            cache, result = evict(cache, params, max_victims=500)
            freed = int(result.num_tokens_evicted)
            assert freed == min(150, len(order))
            got += [name_of[page] for page in ring_ids(cache, Ring.FULL)[before:]]
            wanted, order = wanted + order[:freed], order[freed:]
    assert got == wanted and len(set(got)) == 10_000
    uhrc_fn.check_invariants(cache)


def test_B32_the_cost_of_a_victim_knows_no_number_of_leaves():
    """Fault: victims are popped one after another.

    Times at ten thousand leaves are the benchmarks' to take; here no equation more is
    traced for sixteen times the nodes, and no loop knows how many there are.
    """
    counts = set()
    for nodes in (2**10, 2**14):
        config = CacheConfig(
            page_size=16, num_pages=nodes, max_prefix_pages=64, victim_plan_size=512
        )
        found = list(equations(op_cases(config, 4, 3)["evict"].jaxpr(config)))
        names = [equation.primitive.name for equation in found]
        loops = [e for e in found if e.primitive.name in LOOPS and not asks_once(e)]
        assert not loops
        kept = [e.params["k"] for e in found if e.primitive.name == "top_k"]
        assert kept and set(kept) == {512}
        counts.add(len(names))
    assert len(counts) == 1


@pytest.mark.parametrize("config", [WINDOWED, FOUR_SLOTS], ids=["SWA", "RECURRENT"])
def test_B33_a_probe_of_a_hybrid_cache_changes_no_bit(config):
    """Fault: a peek leaves out what a match asks of the other component."""
    cache = HybridHarness(config)
    cache.publish(a(0, 8))
    cache.publish(a(0, 8) + b(0, 4))
    cache.publish(a(0, 4) + c(0, 8), has_slot=False)
    cache.evict_all_of(swa=6, recurrent=1)
    seen = set()
    for tokens in (a(0, 8), a(0, 7), a(0, 8) + b(0, 9), a(0, 4) + c(0, 9), b(0, 3), []):
        before = numpy(cache.cache)
        peeked = cache.peek(tokens)
        assert same(before, cache.cache)
        assert same(peeked, cache.match(tokens))
        seen.add(lengths(peeked))
    assert any(0 < hit == full for hit, full, _ in seen)
    assert any(hit < full and hint for hit, full, hint in seen)


# Tool agents share long prompts and part in small tails; they come as block ids in
# three formats, and as text in more.
TOOL_AGENTS = {
    "toolagent_trace.jsonl": [
        {"timestamp": t, "input_length": n, "output_length": 30, "hash_ids": ids}
        for t, n, ids in (
            (0, 1536, [0, 1, 2]),
            (9, 2000, [0, 1, 3, 4]),
            (11, 2048, [0, 1, 2, 5]),
        )
    ],
    "magagent.jsonl": [
        [0, 1, 192, 9, [0, 3]],
        [5, 2, 250, 9, [0, 2, 8, 2]],
        [9, 1, 256, 9, [0, 3, 5, 1]],
    ],
    "claude_code.jsonl": [
        {
            "id": "s",
            "tool": 1,
            "sys": 1,
            "models": [],
            "reqs": [
                [0.0, "m", 192, 1, 0, [1, 3]],
                [5.0, "m.1", 256, 1, 2, [7, 2]],
                [9.0, "m", 256, 1, 2, [3, 1, 9, 1]],
            ],
        }
    ],
}
HITS = {
    "toolagent_trace.jsonl": [0, 2, 3],
    "magagent.jsonl": [0, 2, 3],
    "claude_code.jsonl": [0, 2, 3],
}


@pytest.mark.parametrize("name", TOOL_AGENTS)
def test_B34_traces_of_tool_agents_are_recognised_and_replayed(name, tmp_path):
    """Fault: a reader of tool-agent traces is left out of the list of formats."""
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in TOOL_AGENTS[name]))
    workload = load_trace(path)
    assert workload.num_requests == 3
    result = replay(workload, capacity_pages=0)
    assert result.hit_pages.tolist() == HITS[name]
    assert not result.evicted_pages
    hybrid = Hybrid(components=("FULL", "RECURRENT"), checkpoints="branches")
    result = replay(workload, capacity_pages=0, hybrid=hybrid)
    # Snapshots stand at ends: the second request branches where there is none yet.
    assert result.hit_pages[1] == 0 < result.hit_pages[2]


# Hit tokens of full blocks over all tokens, from plain-Python replays of a trace: with
# room for all 14,961 unique blocks, and leaf LRU (block LRU: .285) for a hundredth.
MAGAGENT = {0: 0.8380, 149: 0.436}


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize("capacity", MAGAGENT)
def test_B34_a_recorded_tool_agent_trace_hits_as_its_table_says(capacity, traces_dir):
    """Fault: leaves are not what goes first.

    Partial last blocks are cached here too: they take room, and are left out of the
    count of hits.
    """
    workload = load_trace(traces_dir / "lmcache_magagent_blk64B.jsonl.gz")
    result = replay(workload, capacity_pages=capacity)
    blocks = np.minimum(result.hit_pages, workload.input_tokens // 64)
    ratio = blocks.sum() * 64 / workload.input_tokens.sum()
    assert ratio == pytest.approx(MAGAGENT[capacity], abs=1e-3)


def test_B35_an_idle_window_outlives_all_that_lies_outside_of_windows():
    """Fault: SWA pages outside the last window are stamped like those inside.

    A and C have 15 pages each outside of window and one page more, so that M(A) stays
    20 until 30 are asked; then age decides again, and one page more is A's spare one.
    """
    cache = HybridHarness(WINDOWED)
    cache.publish(a(0, 20))
    cache.publish(c(0, 20))
    for _ in range(3):
        assert cache.match(c(0, 20)).hit_length == 20
    assert cache.evict_all_of(swa=8) == (0, 8, 0)
    assert cache.hit(a(0, 20)) == cache.hit(c(0, 20)) == 20
    assert cache.evict_all_of(swa=22) == (0, 22, 0)
    assert cache.hit(a(0, 20)) == cache.hit(c(0, 20)) == 20
    assert live(cache, a(0, 20)) == live(cache, c(0, 20)) == list(range(15, 20))
    assert cache.evict_all_of(swa=2) == (0, 2, 0)
    assert cache.hit(a(0, 20)) == 0 and cache.hit(c(0, 20)) == 20


# Silent loss of hits.


def test_B37_a_shorter_prefix_says_what_it_lacks_and_takes_a_snapshot():
    """Fault: an internal node refuses a snapshot."""
    cache = HybridHarness(FOUR_SLOTS)
    cache.publish(a(0, 3))
    assert lengths(cache.match(a(0, 2))) == (0, 2, 2)
    assert cache.publish(a(0, 2)).recurrent_committed
    assert lengths(cache.match(a(0, 2))) == (2, 2, 0)
    assert lengths(cache.match(a(0, 3))) == (3, 3, 0)


def test_B38_more_snapshots_than_slots_cost_hits_and_say_how_many():
    """Fault: tokens that a component could not serve are not counted.

    No policy keeps a checkpoint near the fork, so that the first to come back there
    gets 0 of 8; its own snapshot then serves the next.
    """
    cache = HybridHarness(FOUR_SLOTS)
    for length in range(4, 33, 4):
        assert cache.publish(a(0, length)).recurrent_committed
    assert live(cache, a(0, 32), RECURRENT) == [19, 23, 27, 31]
    fork = a(0, 8) + b(0, 24)
    match = cache.match(fork)
    assert lengths(match) == (0, 8, 8)
    assert match.lost_tokens.tolist() == [0, 0, 8]
    assert cache.hit(a(0, 32)) == 32
    assert cache.publish(a(0, 8)).recurrent_committed
    match = cache.match(fork)
    assert lengths(match) == (8, 8, 0) and not match.lost_tokens.any()
    assert cache.take_status() == 0


def test_B39_a_checkpoint_at_the_branch_serves_whoever_parts_there_next():
    """Fault: the hint is the FULL run itself, off the grid.

    Grid 8, pages of 4: 2.8 grids are 22 tokens, of which five pages are shared.
    """
    h = requests_of(RECURRENT, 4)
    shared = np.arange(1, 25, dtype=np.int32)
    prompts = [np.r_[shared[:22], [100 * k, 100 * k + 1]] for k in (1, 2, 3)]

    def start(tokens):
        request = h.admit(tokens, len(tokens))
        assert request is not None
        return request

    def prefill(request, upto: int):
        while request.written < upto:
            assert h.extend(request, h.chunk(request, 64))

    first = start(prompts[0])
    prefill(first, 24)
    h.finish(first)  # its one snapshot stands behind tokens of its own
    second = start(prompts[1])
    assert (second.hit, second.branching) == (0, 16)
    prefill(second, 16)
    assert h.publish(second).recurrent_committed
    prefill(second, 24)
    h.finish(second)
    assert start(prompts[2]).hit == 16


def test_B40_sessions_keep_their_windows_while_the_pool_is_mostly_free():
    """Fault: a request lets go of SWA pages by its live position, window and all.

    Four sessions in turn, each by four tokens longer than before, half of the pool in
    use at the end.
    """
    cache = HybridHarness(WINDOWED)
    before = 0
    for length in (8, 12, 16):
        for session in range(4):
            tokens = list(range(100 * session, 100 * session + length))
            assert cache.hit(tokens) == before
            frontier = int(swa_frontier(length, 4, 1))
            cache.publish(tokens, evicted=frontier)
            assert cache.hit(tokens) == length
        before = length
    assert cache.num_free(SWA) >= 64 and cache.num_free(FULL) == 64
    assert cache.take_status() == 0


def test_B43_a_grid_that_no_key_reaches_is_refused_when_it_is_built():
    """Fault: the interval is compared with pages, or with nothing."""
    settings = {
        "components": ("FULL", "RECURRENT"),
        "page_size": 16,
        "num_pages": 64,
        "num_recurrent_slots": 8,
        "max_prefix_pages": 8,
        "enable_recurrent_extra_buffer": True,
    }
    for interval in (144, 1024):
        with pytest.raises(ValueError, match=f"{interval} with a longest key of 128"):
            CacheConfig(**settings, recurrent_track_interval=interval)
    # The longest key is one grid: it can hit.
    cache = HybridHarness(CacheConfig(**settings, recurrent_track_interval=128))
    cache.publish(list(range(128)))
    assert cache.hit(list(range(128))) == 128


@pytest.mark.parametrize("component", [FULL, SWA, RECURRENT], ids=lambda x: x.name)
def test_B44_what_was_not_published_is_used_again_before_anything_cached(component):
    """Fault: an allocation evicts all that it wants, not what is short."""
    h = requests_of(component, 4)
    tokens = np.arange(1, 25, dtype=np.int32)

    def serve(tokens, count: int):
        request = h.admit(tokens, count)
        assert request is not None
        while request.written < count:
            assert h.extend(request, h.chunk(request, 64))
        h.finish(request)

    serve(tokens, 18)
    cached = [h.in_tree(kind) for kind in h.config.components]
    nodes = int(h.cache.num_live_nodes)
    assert nodes == 4
    for k in range(12):  # partial pages of prompts too short for a page, and states
        serve(tokens + 100 * (k + 1), 3)
        assert [h.in_tree(kind) for kind in h.config.components] == cached
    assert int(h.cache.num_live_nodes) == nodes
    assert int(numpy(h.match(tokens)).hit_length) == 16


@pytest.mark.parametrize("component", [SWA, RECURRENT], ids=lambda x: x.name)
def test_B45_victims_of_each_component_do_not_depend_on_when_entries_are_freed(
    component,
):
    """Fault: victims are ordered by the ids of what they hold."""
    orders = []
    for is_deferred in (False, True):
        cache = HybridHarness(WINDOWED if component == SWA else FOUR_SLOTS)
        if component == SWA:  # so few that freed pages come round
            for count in (32, 32, 32, 10):
                cache.take(SWA, count)
        for i in range(2 if component == RECURRENT else 3):
            spare = cache.take(component, 1)
            tokens = a(0, 2) + b(10 * i, 10 * i + 4)
            cache.publish(tokens)
            if not is_deferred:
                cache.free_of(component, spare)
            if component == SWA:  # a duplicate, whose entries are freed
                publish_anew(cache, tokens)
            else:
                cache.publish(tokens)
            if is_deferred:
                cache.free_of(component, spare)
        cache.match(a(0, 2) + b(0, 4))
        victims, ids = [], []
        value = np.asarray(cache.cache.tree.value)[component]
        while (value != NULL).any():
            keys = node_keys(cache.cache)
            counts = {"swa": 1} if component == SWA else {"recurrent": 1}
            cache.evict_all_of(**counts)
            left = np.asarray(cache.cache.tree.value)[component]
            (node,) = np.flatnonzero((value != NULL) & (left == NULL))
            victims.append(keys[int(node)][1:])
            ids.append(int(value[node]))
            value = left
        orders.append((victims, ids))
    (at_once, ids), (deferred, others) = orders
    assert len(at_once) == (2 if component == RECURRENT else 6 + 4 + 4)
    assert at_once == deferred and ids != others


def test_B46_a_branch_inside_what_was_let_go_is_a_hit_for_the_third_request():
    """Fault: an insert does not bring back SWA pages that the tree has lost."""
    cache = HybridHarness(WINDOWED)
    publish_anew(cache, a(0, 12), evicted=8)
    assert live(cache, a(0, 12)) == [8, 9, 10, 11]
    branch = a(0, 10) + b(0, 2)
    assert lengths(cache.match(branch)) == (0, 10, 10)
    # It computes all of it anew, and keeps the window before the hint.
    publish_anew(cache, branch, evicted=6)
    assert live(cache, a(0, 12)) == [6, 7, 8, 9, 10, 11]
    assert lengths(cache.match(a(0, 10) + c(0, 2))) == (10, 10, 0)
    assert cache.hit(a(0, 12)) == cache.hit(branch) == 12
