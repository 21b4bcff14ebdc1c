"""Faults that made real engines give wrong output: hits that were none.

A toy model of full attention and linear recurrence runs over the cache and its pools;
its logits are the same bits whatever was found and whatever was computed. Each
docstring names the one-line fault that would turn its test red.
"""

import jax
import numpy as np
import pytest
import request_programs as programs
from harness import node_keys, numpy, pad, same
from harness_hybrid import FULL, RECURRENT, SWA, HybridHarness
from request_harness import RequestHarness
from request_machine import config_of, requests_of
from scenario_caches import FOUR_SLOTS, WINDOWED, a, b
from toy_engine import CHUNK, INTERVAL, ToyEngine, forward_and_publish, init_params
from toy_engine import reference as recompute

import uhrc_fn as u
from uhrc_fn import CacheConfig, Status
from uhrc_fn.pools.tracking import Outcome, TrackSlots, plan_donation
from uhrc_fn.tree_arrays import NULL


def words(seed: int, count: int) -> list[int]:
    """Tokens of the toy model."""
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def plain(tokens):
    """Logits of a prompt that finds nothing."""
    return ToyEngine().serve(tokens)


# One joint length.


def short_of_swa() -> HybridHarness:
    """FULL has 12 tokens, windows end at 8."""
    cache = HybridHarness(WINDOWED)
    cache.publish(a(0, 8))
    cache.publish(a(0, 12), evicted=12)
    return cache


def short_of_snapshots() -> HybridHarness:
    """FULL has 12 tokens, a snapshot stands at 8."""
    cache = HybridHarness(FOUR_SLOTS)
    cache.publish(a(0, 8))
    cache.publish(a(0, 12), has_slot=False)
    return cache


SHORT = {SWA: short_of_swa, RECURRENT: short_of_snapshots}


@pytest.mark.parametrize("component", SHORT, ids=lambda x: x.name)
def test_B47_no_component_goes_further_than_all_of_them_accept(component):
    """Fault: each component's own length is what is locked, or what is refreshed."""
    cache = SHORT[component]()
    cache.publish(b(0, 4))
    match = cache.match(a(0, 12))
    assert (match.hit_length, match.full_kv_hit_length) == (8, 12)
    assert match.device_indices[8:].tolist() == [0] * 24
    assert match.lost_tokens[component] == 4 and match.lost_tokens.sum() == 4
    receipt = cache.lock(match)
    assert cache.num_protected(FULL) == 8
    assert cache.num_protected(component) == (4 if component == SWA else 1)
    # What is past the joint length was not refreshed: it goes before b.
    assert cache.evict_all_of(full=4) == (4, 0, 0)
    assert cache.hit(b(0, 4)) == 4
    assert cache.match(a(0, 12), full_only=True).full_kv_hit_length == 8
    cache.unlock(receipt)


def joint_length(cache: HybridHarness, tokens) -> int:
    """The deepest boundary that every component accepts, asked one by one."""
    nodes = {key[1:]: node for node, key in node_keys(cache.cache).items()}
    value = np.asarray(cache.cache.tree.value)
    run = []
    for depth in range(1, len(tokens) + 1):
        node = nodes.get(tuple((t,) for t in tokens[:depth]))
        if node is None:
            break
        run.append([value[c, node] != NULL for c in (FULL, SWA, RECURRENT)])
    window = cache.config.sliding_window_size
    best = 0
    for depth in range(1, len(run) + 1):
        has_window = all(swa for _, swa, _ in run[max(depth - window, 0) : depth])
        accepted = has_window if cache.config.has_swa else run[depth - 1][2]
        best = depth if accepted else best
    return best


@pytest.mark.parametrize("config", [WINDOWED, FOUR_SLOTS], ids=["SWA", "RECURRENT"])
def test_B54_the_length_that_an_engine_sees_is_the_joint_one(config):
    """Fault: the API gives the longest length of a component, not the joint one.

    Every reader says the same: match, peek, page table, lock and clone source.
    """
    rng = np.random.default_rng(54)
    cache = HybridHarness(config, is_checked=False)
    kinds = set()
    for turn in range(12):
        cut, name = 2 * int(rng.integers(0, 6)), 20 * int(rng.integers(2))
        tokens = a(0, cut) + b(name, name + int(rng.integers(1, 9)))
        cache.publish(
            tokens,
            evicted=len(tokens) * int(rng.integers(2)) if config.has_swa else 0,
            has_slot=bool(rng.random() < 0.6),
        )
        if turn % 4 == 3:
            cache.evict_all_of(**{"swa" if config.has_swa else "recurrent": 1})
        for asked in (tokens, tokens[:-1], a(0, 12), b(name, name + 8)):
            wanted = joint_length(cache, asked)
            assert cache.hit(asked) == wanted
            match = cache.match(asked)
            assert match.hit_length == match.cache_protected_len == wanted
            assert np.count_nonzero(match.device_indices) == wanted
            alloc = cache.alloc(len(asked) - wanted)
            table = np.asarray(u.page_table(match, alloc))
            assert np.count_nonzero(table) == len(asked)
            assert (
                table[wanted : len(asked)].tolist() == alloc.ids[: alloc.count].tolist()
            )
            assert (match.cow_src_slot > 0) == (wanted > 0 and config.has_recurrent)
            receipt = cache.lock(match)
            assert receipt.num_pages == wanted
            assert cache.num_protected(FULL) == wanted
            cache.unlock(receipt)
            cache.free_pages(alloc.ids)
            kinds.add((wanted > 0, wanted < match.full_kv_hit_length))
        cache.check_now()
    assert {(True, False), (False, True), (True, True)} <= kinds


class Written(RequestHarness):
    """Requests whose pages hold their tokens, in both kinds of KV."""

    def __init__(self, config: CacheConfig):
        super().__init__(config)
        shape = {"page_size": config.page_size, "num_kv_heads": 1, "head_dim": 1}
        self.kv = u.init_swa_kv_pool(
            u.KVConfig(
                num_pages=config.num_pages, layers=(0,), dtype="float32", **shape
            ),
            u.KVConfig(
                num_pages=config.num_swa_pages, layers=(1,), dtype="float32", **shape
            ),
        )

    def extend(self, request, num_new: int) -> bool:
        start = request.written
        assert super().extend(request, num_new)
        rows = np.full(num_new, request.row, np.int32)
        position = np.arange(start, start + num_new, dtype=np.int32)
        token = request.tokens[start : start + num_new].astype(np.float32)
        self.kv = write_tokens(self.kv, self.tables, rows, position, token)
        return True

    def hit(self, tokens) -> int:
        """Match, and read what the hit would attend to."""
        match = numpy(self.match(tokens))
        size, hit = self.config.page_size, int(match.hit_length)
        if not hit:
            return 0
        node = match.path[: hit // size]
        value = np.asarray(self.cache.tree.value)[SWA, node]
        first = max(len(node) - self.config.window_pages, 0)
        read = lambda layer: np.asarray(
            self.kv.read_pages(layer, match.device_indices[: len(node)], value)[0]
        ).reshape(-1)
        assert read(0).tolist() == tokens[:hit].tolist()
        assert read(1)[first * size :].tolist() == tokens[first * size : hit].tolist()
        return hit


@jax.jit
def write_tokens(kv, tables, rows, position, token):
    place = [tables.locations(rows, position, swa=swa) for swa in (False, True)]
    value = token[:, None, None]
    for layer in (0, 1):
        kv = kv.set_kv_buffer(layer, *place, value, value)
    return kv


def test_B48_no_hit_is_served_from_pages_that_went_round():
    """Fault: a boundary is accepted by its own page, whatever became of its window.

    Windows of six tokens; nine SWA pages of four, which each prompt here goes through
    more than once.
    """
    h = Written(config_of(SWA, 4))
    prompts = [np.arange(24, dtype=np.int32) + 100 * k for k in (1, 2, 3)]
    served = []
    for prompt in [*prompts, prompts[0], np.r_[prompts[1][:14], prompts[2][:10]]]:
        request = h.admit(prompt, len(prompt))
        assert request is not None
        while request.written < len(prompt):
            assert h.extend(request, min(4, len(prompt) - request.written))
            h.slide(request)
        h.finish(request)
        served.append(prompt)
        hits = [h.hit(p[:length]) for p in served for length in range(25)]
        assert max(hits) == 24
        # Boundaries whose window has gone round are no hits.
        assert 0 in hits[9:]


# Recurrent states.


def test_B49_a_hit_gives_the_logits_of_a_request_that_computed_all_of_it():
    """Fault: the clone leaves the running slot as it was."""
    engine = ToyEngine()
    shared = words(1, 16)
    first, second = shared + words(2, 14), shared + words(3, 14)
    np.testing.assert_allclose(
        engine.serve(first), recompute(tuple(first))[0], atol=0.02
    )
    hits = []
    for tokens in (first, second, second[:17] + words(4, 9)):
        request = engine.admit(tokens)
        hits.append(request.hit)
        logits = engine.run(request)
        engine.finish(request)
        assert np.array_equal(logits, plain(tokens)[request.hit :])
    # The snapshot of the end; none where they part; then that of the branch.
    assert hits == [24, 0, 0] or hits == [24, 0, 16]
    assert engine.take_status() == 0


def test_B49_full_pages_without_their_state_are_no_hit():
    """Fault: a hit asks FULL alone."""
    engine = ToyEngine()
    tokens = words(1, 30)
    engine.serve(tokens)
    assert engine.evict(recurrent_num=8) == [0, 0, 1]
    match = engine.match(tokens[:-1])
    assert (match.hit_length, match.full_kv_hit_length, match.cow_src_slot) == (
        0,
        24,
        0,
    )
    assert match.lost_tokens.tolist() == [0, 0, 24]
    request = engine.admit(tokens)
    assert request.hit == 0
    assert np.array_equal(engine.run(request), plain(tokens))


def test_B50_what_is_committed_depends_on_the_forward_that_writes_it():
    """Fault: the track slot takes the state from before the forward.

    Forward and publishing are one program here; with other weights its snapshot is
    another, so it comes from this forward's output and not from what lay there.
    """
    tokens = words(5, 16)
    snapshots = []
    for seed in (0, 1):
        engine = ToyEngine(seed)
        request = engine.admit(tokens)
        engine.run(request, INTERVAL)
        engine.give_pages(request, CHUNK)
        engine.cache, engine.pools, published, _ = forward_and_publish(
            engine.cache,
            engine.pools,
            init_params(seed),
            np.int32(request.row),
            pad(tokens[8:], CHUNK),
            np.int32(CHUNK),
            engine.key(tokens),
            request.receipt,
        )
        request.receipt = published.receipt
        engine.check()
        assert bool(published.insert.recurrent_committed)
        slots = engine.tree_slots()
        assert list(slots) == [16]
        snapshots.append(engine.state_of(slots[16]))
        for got, wanted in zip(
            snapshots[-1], recompute(tuple(tokens), seed)[1], strict=True
        ):
            np.testing.assert_allclose(np.float32(got), wanted, atol=0.02)
    for left, right in zip(*snapshots, strict=True):
        assert np.abs(np.float32(left) - np.float32(right)).max() > 0.05


def test_B51_a_snapshot_stays_as_it_was_while_its_request_runs_on():
    """Fault: the running slot itself is given to the tree."""
    engine = ToyEngine()
    tokens = words(6, 120)
    request = engine.admit(tokens)
    engine.run(request, 16)
    assert engine.publish(request).recurrent_committed
    (slot,) = engine.tree_slots().values()
    assert slot != engine.running_slot(request)
    assert slot not in np.asarray(engine.pools.tables.track_slots)[request.row]
    before = engine.state_of(slot)
    running = engine.state_of(engine.running_slot(request))
    for _ in range(100):
        engine.forward(request, 1)
    assert request.written == 116
    assert all(map(np.array_equal, before, engine.state_of(slot)))
    after = engine.state_of(engine.running_slot(request))
    assert not any(map(np.array_equal, running, after))
    engine.finish(request)
    again = engine.admit(tokens[:16] + words(7, 9))
    assert again.hit == 16
    assert np.array_equal(engine.run(again), plain(again.tokens)[16:])


def test_B52_a_reservation_that_is_given_up_leaves_nothing_to_read():
    """Fault: an abort keeps the request's slots, or leaves its row filled."""
    engine = ToyEngine()
    tokens = words(8, 30)
    engine.serve(tokens)
    engine.set_aside += engine.slots(8)
    before = numpy(engine.pools.tables)
    request = engine.admit(tokens)
    slot = engine.running_slot(request)
    assert request.hit == 24 and int(engine.cache.num_free[RECURRENT]) == 0
    engine.abort(request)
    assert same(before, numpy(engine.pools.tables))
    assert int(engine.cache.num_free[RECURRENT]) == 3
    assert not np.any(engine.cache.tree.lock_ref)
    # The same row and the same slot serve one that finds nothing.
    other = words(9, 12)
    for _ in range(3):
        again = engine.admit(other)
        if engine.running_slot(again) == slot:
            break
        engine.abort(again)
    assert (again.row, engine.running_slot(again), again.hit) == (request.row, slot, 0)
    assert np.array_equal(engine.run(again), plain(other))


@pytest.mark.skip(reason="no speculative decoding: nothing writes unverified tokens")
def test_B53_states_of_rejected_drafts_are_not_published():
    """Fault: a slot is published at the drafted length."""


def test_B53_a_slot_without_a_written_state_never_becomes_valid():
    """Fault: a track slot counts as written as soon as it is allocated."""
    engine = ToyEngine()
    tokens = words(10, 14)
    request = engine.admit(tokens)
    engine.run(request, 7)
    assert engine.publish(request).inserted_len == 0
    result = engine.finish(request)
    assert result.inserted_len == 0 and not result.recurrent_committed
    assert engine.tree_slots() == {}
    assert engine.match(tokens).full_kv_hit_length == 0
    tracks = TrackSlots(*map(np.int32, ([5, 6], 0, 0)))
    donation = plan_donation(tracks, 14, 4, is_live=False)
    assert (int(donation.outcome), int(donation.slot)) == (Outcome.NOTHING, 0)


def test_B53_only_what_is_written_is_published():
    """Fault: the key's length is believed, not the table's.

    The key goes on past what the request has written, as one with drafts would.
    """
    engine = ToyEngine()
    tokens = words(11, 20)
    request = engine.admit(tokens)
    engine.run(request, 9)
    result = engine.finish(request, tokens + words(12, 12))
    assert result.inserted_len == 8 and result.recurrent_committed
    assert list(engine.tree_slots()) == [8]
    match = engine.match(tokens)
    assert match.hit_length == match.full_kv_hit_length == 8
    # Without snapshots to stop at, a page is published once it is written to its end.
    h = requests_of(FULL, 4)
    prompt = np.arange(1, 25, dtype=np.int32)
    request = h.admit(prompt, 24)
    assert request is not None and h.extend(request, 9)
    assert h.finish(request).inserted_len == 8 and h.in_tree(FULL) == 2


def test_B55_a_table_follows_the_tree_though_count_and_first_page_stay():
    """Fault: a table whose first page and length are unchanged is not written.

    Two requests share two pages and compute the next two at once. The second to publish
    must read the tree's pages from then on, since its own are another's.
    """
    engine = ToyEngine()
    tokens = words(13, 26)
    engine.serve(tokens[:8])
    left, right = engine.admit(tokens), engine.admit(tokens)
    assert left.hit == right.hit == 8
    for request in (left, right):
        engine.run(request, 16)
    table = lambda request: np.asarray(engine.pools.tables.pages)[request.row, :4]
    old = table(right)
    assert old[0] == table(left)[0] and old[2] != table(left)[2]
    engine.publish(left)
    engine.publish(right)
    new = table(right)
    assert new.tolist() == table(left).tolist()
    assert (new != 0).sum() == (old != 0).sum() and new[0] == old[0]
    # The copies are free: fill every free page with something else.
    filler = engine.admit(words(14, 120))
    engine.run(filler, 120)
    logits = plain(tokens)
    for request in (left, right):
        assert np.array_equal(engine.run(request), logits[16:])
    assert engine.take_status() == Status.OK
    assert programs.owned(engine.pools.tables).pages.shape == (4, 32)
