"""All operations of the jitted core against the hybrid oracle, in any order.

A hypothesis state machine finds short failures; a seeded driver covers more ground. The
pools are so small that tombstones, eviction and exhaustion happen all the time.
"""

import random

import hypothesis
import pytest
from harness import EVERYTHING, same
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle_nodes import FULL, RECURRENT, SWA
from twin import NAMES
from twin_hybrid import HybridTwin

from uhrc_fn import CacheConfig

SETS = {
    "full": {"components": ("FULL",)},
    "swa": {"components": ("FULL", "SWA"), "num_swa_pages": 11},
    "recurrent": {"components": ("FULL", "RECURRENT"), "num_recurrent_slots": 6},
}


def config(name: str, page_size: int) -> CacheConfig:
    """A small cache; at page size 4 the window is no whole number of pages."""
    changes = dict(SETS[name])
    if name == "swa":
        changes["sliding_window_size"] = 2 if page_size == 1 else 6
    if name == "recurrent" and page_size > 1:
        changes["enable_recurrent_extra_buffer"] = True
        changes["recurrent_track_interval"] = 2 * page_size
    return CacheConfig(
        page_size=page_size,
        num_pages=20,
        num_nodes=21,
        max_prefix_pages=7,
        max_live_receipts=5,
        # At one token a page a selection covers fewer victims than there are nodes.
        victim_plan_size=8 if page_size == 1 else 2048,
        **changes,
    )


CASES = [(name, size) for name in SETS for size in (1, 4)]


def entries(twin: HybridTwin, component: int, picks) -> list[int]:
    """Ids of a pool for an insert or a free: mostly held ones, now and then a bad one.

    Args:
      twin: says who owns what.
      component: the pool.
      picks: a number below 100 for each id wanted.
    """
    pool = twin.oracle.pools[component]
    held = iter(sorted(twin.core.owned[component]))
    tree = twin.oracle.victim_order(component)
    ids: list[int] = []
    for pick in picks:
        if pick < 80:
            ids.append(next(held, 0))
        elif pick < 84:
            ids.append(next(iter(pool.free), 0))
        elif pick < 88:
            ids.append(next(iter(tree), 0))
        elif pick < 92:  # again
            ids.append([*ids, 0][0])
        else:
            ids.append((0, 0, len(pool.owner), 1 << 30)[pick % 4])
    return ids


def offer(twin: HybridTwin, prompt, picks, prev: int, evicted: int, slot: int, length):
    """An insert of arbitrary entries; `slot` is a pick, `length` None for the end."""
    swa, slots = (), [0]
    if SWA in twin.components:
        swa = entries(twin, SWA, reversed(picks))
    if RECURRENT in twin.components:
        slots = entries(twin, RECURRENT, [slot])
    pages = entries(twin, FULL, picks)
    twin.insert(prompt, pages, prev, swa, evicted, slots[0], length)


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
        offer(self.twin, prompt, picks, prev, evicted, slot, length)

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
    check_model(name, 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_many_sequences_of_operations_agree_with_the_hybrid_oracle(name):
    check_model(name, 300)


class Driver:
    """Random operations from a seed; locks and entries held are kept in bounds."""

    def __init__(self, name: str, page_size: int, seed: int):
        self.twin = HybridTwin(config(name, page_size))
        self.page_size = page_size
        self.random = random.Random(seed)
        self.num_steps = 0
        self.seen: dict[str, int] = {}

    def prompt(self):
        rng = self.random
        pages = [rng.choice("aab") for _ in range(rng.randrange(9))]
        if rng.random() < 0.6:  # one of a few lines, so that keys come again
            pages = list(rng.choice(["aaaaaaa", "aaabbbb"])[: rng.randrange(9)])
        tokens = [int(page == "b") for page in pages for _ in range(self.page_size)]
        if rng.random() < 0.15:  # a tail, so that no snapshot stands at the end
            tokens += [0] * rng.randrange(self.page_size)
        return tokens, rng.choice([*[None] * 6, *NAMES])

    def length(self) -> int:
        """Tokens, at a page's end or off it."""
        rng = self.random
        if rng.random() < 0.5:
            return 0
        return rng.randrange(-1, 8) * self.page_size + rng.choice([0, 0, 1, -1])

    def picks(self):
        bad = 100 if self.random.random() < 0.2 else 80
        return [self.random.randrange(bad) for _ in range(7)]

    def component(self) -> int:
        return self.random.choice(self.twin.components)

    def match(self) -> int:
        """Which match to lock: one of the last, or a possibly stale one."""
        return self.random.choice([-1, -1, -2, -3, self.random.randrange(10**6)])

    def receipt(self) -> int:
        """Which receipt to give back: mostly a live one."""
        live = [i for i, pair in enumerate(self.twin.receipts) if self.is_live(pair)]
        some = live if live and self.random.random() < 0.85 else [0, 1, 2, 3, -1]
        return self.random.choice(some)

    def is_live(self, pair) -> bool:
        return bool(pair[1]) and pair[1].serial in self.twin.oracle.ledger

    def forget(self) -> None:
        """Keep the lists short; a live receipt is never lost."""
        twin = self.twin
        del twin.matches[:-20]
        live = [pair for pair in twin.receipts if self.is_live(pair)]
        dead = [pair for pair in twin.receipts if not self.is_live(pair)]
        twin.receipts[:] = dead[-5:] + live

    def amounts(self) -> list[int]:
        """What to evict of each component: often of one alone."""
        rng, size = self.random, self.page_size
        asked = [
            rng.choice([0, 0, 1, size, 3 * size, 6 * size]),
            rng.choice([0, 1, size, 3 * size, 6 * size]),
            rng.choice([0, 0, 1, 2]),
        ]
        if rng.random() < 0.05:
            asked[rng.randrange(3)] = rng.choice([-1, int(EVERYTHING)])
        return [a if c in self.twin.components else 0 for c, a in enumerate(asked)]

    def insert(self) -> None:
        rng = self.random
        slot = rng.randrange(100) if rng.random() < 0.8 else 99
        length = None if rng.random() < 0.8 else self.length()
        prev = self.length() if rng.random() < 0.2 else 0
        offer(self.twin, self.prompt(), self.picks(), prev, self.length(), slot, length)

    def free(self) -> None:
        component = self.component()
        self.twin.free(component, entries(self.twin, component, self.picks()))

    def step(self) -> None:
        rng, twin = self.random, self.twin
        few = lambda: rng.randrange(-1, 4)
        steps = {
            "serve": (10, lambda: twin.serve(self.prompt(), max(self.length(), 0))),
            "match": (6, lambda: twin.match(self.prompt())),
            "full_only": (2, lambda: twin.match(self.prompt(), full_only=True)),
            "peek": (1, lambda: twin.peek(self.prompt())),
            "lock": (7, lambda: twin.matches and twin.lock(self.match())),
            "unlock": (9, lambda: twin.receipts and twin.unlock(self.receipt())),
            "release_window": (
                3,
                lambda: twin.receipts and twin.release_window(self.receipt()),
            ),
            "alloc": (
                6,
                lambda: twin.alloc(
                    self.component(), rng.randrange(-1, 5), rng.random() < 0.5
                ),
            ),
            "alloc_request": (4, lambda: twin.alloc_request((few(), few(), few()))),
            "insert": (14, self.insert),
            "evict": (3, lambda: twin.evict(*self.amounts())),
            "evict_bounded": (4, lambda: twin.evict(*self.amounts(), max_victims=2)),
            "free": (4, self.free),
            "compact_clock": (1, twin.compact_clock),
            "reset": (0.1, twin.reset),
        }
        weights = [weight for weight, _ in steps.values()]
        (name,) = rng.choices(list(steps), weights)
        steps[name][1]()
        self.forget()
        self.num_steps += 1
        twin.compare(is_thorough=self.num_steps % 4 == 0)


@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_random_operations_agree_with_the_hybrid_oracle(name, page_size):
    driver = Driver(name, page_size, seed=page_size)
    for _ in range(500):
        driver.step()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_many_random_operations_agree_with_the_hybrid_oracle(name, page_size, seed):
    driver = Driver(name, page_size, seed=1000 + seed)
    for _ in range(4000):
        driver.step()
