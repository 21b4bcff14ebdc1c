"""All operations of the jitted core against the hybrid oracle, in any order.

A hypothesis state machine finds short failures; a seeded driver covers more ground.
"""

import dataclasses

import hypothesis
import numpy as np
import pytest
from harness import same
from hybrid_driver import SETS, Driver, config, entries, offer
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle_nodes import FULL, SWA
from twin import NAMES
from twin_hybrid import HybridTwin

# FULL alone has a machine of its own; here it runs in the long cases.
CASES = [(name, size) for name in SETS for size in (1, 4)]
SHORT = [case for case in CASES if case[0] != "full" and case != ("swa-recent", 1)]

tokens = st.lists(st.sampled_from([0, 1]), max_size=8)
prompts = st.tuples(tokens, st.sampled_from([*NAMES, None, None]))
picks = st.lists(st.integers(0, 99), min_size=7, max_size=7)
small = st.integers(-1, 8)
maybe = st.one_of(st.just(0), small)
indices = st.integers(0, 10**6) | st.integers(-3, -1)
has_match = precondition(lambda self: self.twin.matches)
has_receipt = precondition(lambda self: self.twin.receipts)


class Model(RuleBasedStateMachine):
    """Every operation of one component set, at one token a page."""

    name: str

    def __init__(self):
        super().__init__()
        self.twin = HybridTwin(config(self.name, 1))

    def a_component(self, index: int) -> int:
        return self.twin.components[index % len(self.twin.components)]

    @rule(prompt=prompts, full_only=st.booleans())
    def match(self, prompt, full_only):
        self.twin.match(prompt, full_only)

    @rule(prompt=prompts)
    def peek(self, prompt):
        before = self.twin.core.snapshot()
        self.twin.peek(prompt)
        assert same(before, self.twin.core.snapshot())

    @rule(prompt=prompts, evicted=maybe)
    def serve(self, prompt, evicted):
        self.twin.serve(prompt, max(evicted, 0))

    @rule(prompt=prompts, prev=maybe, evicted=maybe)
    def resume(self, prompt, prev, evicted):
        self.twin.resume(prompt, max(prev, 0), max(evicted, 0))

    @has_match
    @rule(which=indices)
    def lock(self, which):
        self.twin.lock(which)

    @has_receipt
    @rule(which=indices)
    def unlock(self, which):
        self.twin.unlock(which)

    @has_receipt
    @rule(which=indices)
    def release_window(self, which):
        self.twin.release_window(which)

    @rule(index=st.integers(0, 1), count=small, partial=st.booleans())
    def alloc(self, index, count, partial):
        self.twin.alloc(self.a_component(index), count, partial)

    @rule(counts=st.tuples(small, small, st.integers(-1, 3)))
    def alloc_request(self, counts):
        self.twin.alloc_request(counts)

    @rule(
        prompt=prompts,
        picks=picks,
        prev=maybe,
        evicted=maybe,
        slot=st.integers(0, 99),
        length=st.one_of(st.none(), small),
    )
    def insert(self, prompt, picks, prev, evicted, slot, length):
        args = (prompt, picks, prev, evicted, slot, length)
        self.twin.insert(*offer(self.twin, *args))

    @rule(full=maybe, swa=maybe, recurrent=maybe)
    def evict(self, full, swa, recurrent):
        self.twin.evict(full, swa, recurrent)

    @rule(full=maybe, swa=maybe, recurrent=maybe)
    def evict_bounded(self, full, swa, recurrent):
        self.twin.evict(full, swa, recurrent, max_victims=2)

    @rule(index=st.integers(0, 1), picks=picks)
    def free(self, index, picks):
        component = self.a_component(index)
        self.twin.free(component, entries(self.twin, component, picks))

    @rule()
    def compact_clock(self):
        self.twin.compact_clock()

    @precondition(lambda self: self.twin.oracle.count(FULL)[0] > 12)
    @rule()
    def reset(self):
        self.twin.reset()

    @invariant()
    def both_agree(self):
        self.twin.compare()


def check_model(name: str, max_examples: int) -> None:
    run_state_machine_as_test(
        type(f"Model_{name}", (Model,), {"name": name}),
        settings=hypothesis.settings(
            max_examples=max_examples,
            stateful_step_count=40,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", ["swa", "recurrent"])
def test_any_sequence_of_operations_agrees_with_the_hybrid_oracle(name):
    check_model(name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_many_sequences_of_operations_agree_with_the_hybrid_oracle(name):
    check_model(name, 300)


@pytest.mark.parametrize(("name", "page_size"), SHORT)
def test_random_operations_agree_with_the_hybrid_oracle(name, page_size):
    driver = Driver(name, page_size, seed=page_size)
    for _ in range(500):
        driver.step()


def test_an_swa_page_that_comes_twice_is_taken_once():
    twin = HybridTwin(config("swa", 1))
    pages, swa = twin.alloc(FULL, 4), twin.alloc(SWA, 2)
    seen = twin.insert(([1, 1, 1, 1], None), pages, swa=[swa[0], *swa, swa[1]])
    assert seen.adopted[SWA] == [0, 2]
    assert twin.oracle.status == {"NOT_OWNED"}
    twin.compare()


@pytest.mark.parametrize("entry", [-1, -5, 1000])
def test_what_is_no_swa_page_is_refused_with_a_status(entry):
    twin = HybridTwin(config("swa", 1))
    pages, swa = twin.alloc(FULL, 2), twin.alloc(SWA, 1)
    seen = twin.insert(([1, 1], None), pages, swa=[swa[0], entry])
    assert seen.adopted[SWA] == [0]
    assert twin.oracle.status == {"NOT_OWNED"}
    twin.compare()


@pytest.mark.parametrize("entry", [-1, -5, 1000])
def test_what_is_no_slot_is_refused_with_a_status(entry):
    twin = HybridTwin(config("recurrent", 1))
    seen = twin.insert(([1, 1], None), twin.alloc(FULL, 2), slot=entry)
    assert not seen.recurrent_committed and seen.adopted[FULL] == [0, 1]
    assert twin.oracle.status == {"NOT_OWNED"}
    twin.compare()


def test_a_renewed_receipt_has_the_anchor_of_the_ledger():
    twin = HybridTwin(config("swa", 1))
    twin.serve(([1, 1, 0, 1], None))
    twin.match(([1, 1, 0, 1], None))
    twin.lock(-1)
    receipt, seen = twin.receipts[-1]
    scalars = np.array(receipt.scalars)
    scalars[2] = receipt.path[1]  # the anchor, forged
    forged = dataclasses.replace(receipt, scalars=scalars)
    twin.receipts[-1] = forged, seen
    twin.release_window(-1)
    twin.unlock(-1)
    twin.compare()
    assert twin.oracle.count(FULL) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_many_random_operations_agree_with_the_hybrid_oracle(name, page_size, seed):
    driver = Driver(name, page_size, seed=1000 + seed)
    for _ in range(4000):
        driver.step()
