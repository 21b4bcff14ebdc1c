"""All operations of the jitted core against the oracle, in any order.

A hypothesis state machine finds short failures; a seeded driver covers more ground.
The caches are so small that eviction, exhaustion and branching happen all the time.
"""

import random

import hypothesis
import pytest
from harness import EVERYTHING, SMALL, Harness, same
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from twin import NAMES, Twin

from uhrc_fn import CacheConfig

BATCH = 3
CONFIGS = {
    # One selection covers fewer victims than there are nodes.
    1: CacheConfig(
        page_size=1,
        num_pages=24,
        num_nodes=25,
        max_prefix_pages=6,
        max_live_receipts=5,
        victim_plan_size=7,
    ),
    2: SMALL,
    4: CacheConfig(page_size=4, num_pages=12, num_nodes=13, max_prefix_pages=6),
    16: CacheConfig(page_size=16, num_pages=20, num_nodes=21, max_prefix_pages=6),
}
FULL_BATCHES = (1, 2)
"""Page sizes at which the batched operations run too; the others compile less."""


def entries(twin: Twin, picks, used=()) -> list[int]:
    """Page ids for an insert or a free: mostly held ones, now and then a bad one.

    Args:
      twin: says who owns what.
      picks: a number below 100 for each id wanted.
      used: ids that the same batch has brought already.
    """
    core = twin.core
    held = iter(sorted(core.held - set(used)))
    ids: list[int] = []
    for pick in picks:
        if pick < 80:
            ids.append(next(held, 0))
        elif pick < 85:
            ids.append(core.free[0] if core.free else 0)
        elif pick < 90:
            ids.append(twin.oracle.victim_order()[0] if core.evictable else 0)
        elif pick < 95:  # again, perhaps another request's
            ids.append([*used, *ids, 0][0])
        else:
            ids.append((0, -1, core.config.num_pages + 1, 1 << 30)[pick % 4])
    return ids


def tables(twin: Twin, picks) -> list[list[int]]:
    """Page ids for a batch of inserts; a bad pick may repeat another request's."""
    used: list[int] = []
    for row in picks:
        used += entries(twin, row, used)
    return [used[i : i + 6] for i in range(0, len(used), 6)]


tokens = st.lists(st.sampled_from([0, 1]), max_size=13)
prompts = st.tuples(tokens, st.sampled_from([*NAMES, None]))
picks = st.lists(st.integers(0, 99), min_size=6, max_size=6)
prefixes = st.one_of(st.just(0), st.integers(-1, 14))
indices = st.integers(0, 10**6) | st.integers(-3, -1)
batch_of = lambda values: st.lists(values, min_size=BATCH, max_size=BATCH)
has_match = precondition(lambda self: self.twin.matches)
has_receipt = precondition(lambda self: self.twin.receipts)


class Model(RuleBasedStateMachine):
    """Every operation, single and batched."""

    def __init__(self):
        super().__init__()
        self.twin = Twin(SMALL)

    @rule(prompt=prompts)
    def match(self, prompt):
        self.twin.match(prompt)

    @rule(prompt=prompts)
    def peek(self, prompt):
        before = self.twin.core.snapshot()
        self.twin.peek(prompt)
        assert same(before, self.twin.core.snapshot())

    @rule(prompt=prompts)
    def serve(self, prompt):
        self.twin.serve(prompt)

    @has_match
    @rule(which=indices)
    def lock(self, which):
        self.twin.lock(which)

    @has_receipt
    @rule(which=indices)
    def unlock(self, which):
        self.twin.unlock(which)

    @rule(count=st.integers(-1, 8), partial=st.booleans())
    def alloc(self, count, partial):
        self.twin.alloc(count, partial)

    @rule(prompt=prompts, picks=picks, prev=prefixes)
    def insert(self, prompt, picks, prev):
        self.twin.insert(prompt, entries(self.twin, picks), prev)

    @rule(num_tokens=st.integers(-2, 12) | st.just(int(EVERYTHING)))
    def evict(self, num_tokens):
        self.twin.evict(num_tokens)

    @rule(num_tokens=st.integers(0, 12))
    def evict_bounded(self, num_tokens):
        self.twin.evict(num_tokens, max_victims=2)

    @rule(picks=picks)
    def free(self, picks):
        self.twin.free_pages(entries(self.twin, picks))

    @rule()
    def free_all(self):
        self.twin.free_pages(sorted(self.twin.core.held)[:6])

    @rule()
    def compact_clock(self):
        self.twin.compact_clock()

    @precondition(lambda self: self.twin.core.size > 20)
    @rule()
    def reset(self):
        self.twin.reset()

    @rule(prompts=batch_of(prompts))
    def match_batch(self, prompts):
        self.twin.peek_batch(prompts)
        self.twin.match_batch(prompts)

    @has_match
    @rule(which=batch_of(indices))
    def lock_batch(self, which):
        self.twin.lock_batch(which)

    @has_receipt
    @rule(which=batch_of(indices))
    def unlock_batch(self, which):
        self.twin.unlock_batch(which)

    @rule(counts=batch_of(st.integers(-1, 7)), partial=st.booleans())
    def alloc_batch(self, counts, partial):
        self.twin.alloc_batch(counts, partial)

    @rule(prompts=batch_of(prompts), picks=batch_of(picks), prevs=batch_of(prefixes))
    def insert_batch(self, prompts, picks, prevs):
        self.twin.insert_batch(prompts, tables(self.twin, picks), prevs)

    @invariant()
    def both_agree(self):
        self.twin.compare()


def check_model(max_examples: int) -> None:
    run_state_machine_as_test(
        Model,
        settings=hypothesis.settings(
            max_examples=max_examples,
            stateful_step_count=40,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def test_any_sequence_of_operations_agrees_with_the_oracle():
    check_model(16)


@pytest.mark.slow
def test_many_sequences_of_operations_agree_with_the_oracle():
    check_model(400)


class Driver:
    """Random operations from a seed; locks and pages held are kept in bounds."""

    def __init__(self, page_size: int, seed: int):
        self.twin = Twin(CONFIGS[page_size])
        self.page_size = page_size
        self.random = random.Random(seed)
        self.num_steps = 0
        self.has_batches = page_size in FULL_BATCHES
        # Only here a batch may free more than one selection covers, in another order.
        self.has_batch_alloc = self.has_batches and (
            self.twin.config.plan_size >= BATCH * self.twin.bound
            or self.twin.config.plan_size == self.twin.config.num_nodes
        )

    def prompt(self):
        rng = self.random
        pages = [rng.choice("aaaab") for _ in range(rng.randrange(8))]
        tokens = []
        for page in pages:
            body = [int(page == "b")] * self.page_size
            if rng.random() < 0.05:  # pages that differ in one token
                body[rng.randrange(self.page_size)] = 2
            tokens += body
        tokens += [0] * rng.randrange(self.page_size)
        return tokens, rng.choice([*[None] * 5, *NAMES])

    def picks(self):
        bad = 100 if self.random.random() < 0.3 else 80
        return [self.random.randrange(bad) for _ in range(6)]

    def prev(self) -> int:
        rng = self.random
        return rng.randrange(-1, 14) if rng.random() < 0.2 else 0

    def match(self) -> int:
        """Which match to lock: one of the last, or a possibly stale one."""
        return self.random.choice([-1, -2, -3, self.random.randrange(10**6)])

    def receipt(self) -> int:
        """Which receipt to give back: mostly a live one."""
        live = [i for i, pair in enumerate(self.twin.receipts) if self.is_live(pair)]
        some = live if live and self.random.random() < 0.8 else [0, 1, 2, 3, -1]
        return self.random.choice(some)

    def is_live(self, pair) -> bool:
        return bool(pair[1]) and pair[1].serial in self.twin.oracle._ledger

    def forget(self) -> None:
        """Keep the lists short; a live receipt is never lost."""
        twin = self.twin
        del twin.matches[:-20]
        live = [pair for pair in twin.receipts if self.is_live(pair)]
        dead = [pair for pair in twin.receipts if not self.is_live(pair)]
        twin.receipts[:] = dead[-5:] + live

    def step(self) -> None:
        rng, twin = self.random, self.twin
        many = lambda make: [make() for _ in range(BATCH)]
        steps = {
            8: lambda: twin.serve(self.prompt()),
            5: lambda: twin.match(self.prompt()),
            2: lambda: twin.peek(self.prompt()),
            6: lambda: twin.matches and twin.lock(self.match()),
            9: lambda: twin.receipts and twin.unlock(self.receipt()),
            7: lambda: twin.alloc(rng.randrange(-1, 5), rng.random() < 0.5),
            10: lambda: twin.insert(
                self.prompt(), entries(twin, self.picks()), self.prev()
            ),
            3: lambda: twin.evict(
                rng.choice([1, 2, 3, 5, 5, 9, 9, int(EVERYTHING), -1])
            ),
            4: lambda: twin.evict(rng.randrange(3) * self.page_size, max_victims=2),
            3.5: lambda: twin.free_pages(entries(twin, self.picks())),
            1: lambda: twin.compact_clock(),
            0.1: lambda: twin.reset(),
        }
        if self.has_batches:
            steps |= {
                5.1: lambda: twin.match_batch(many(self.prompt)),
                1.1: lambda: twin.peek_batch(many(self.prompt)),
                4.1: lambda: twin.matches and twin.lock_batch(many(self.match)),
                6.1: lambda: twin.receipts and twin.unlock_batch(many(self.receipt)),
                8.1: lambda: twin.insert_batch(
                    many(self.prompt),
                    tables(twin, many(self.picks)),
                    many(self.prev),
                ),
            }
        if self.has_batch_alloc:
            steps[4.2] = lambda: twin.alloc_batch(
                many(lambda: rng.randrange(-1, 4)), rng.random() < 0.5
            )
        rng.choices(list(steps.values()), list(steps))[0]()
        self.forget()
        self.num_steps += 1
        twin.compare(is_thorough=self.num_steps % 4 == 0)


@pytest.mark.parametrize("page_size", CONFIGS)
def test_random_operations_agree_with_the_oracle(page_size):
    driver = Driver(page_size, seed=page_size)
    for _ in range(600):
        driver.step()


def test_a_lock_taken_after_its_node_was_planned_as_a_victim_holds():
    # No match in between: the stamps are still the ones that the plan has, and the
    # locked pages are the older ones.
    cache = Harness(SMALL)
    a, b = [1] * 6, [2] * 6
    cache.publish(a)
    match = cache.match(a[:4])
    cache.publish(b)
    assert cache.evict(2, max_victims=2) == 2
    receipt = cache.lock(match)
    assert cache.evict(4, max_victims=2) == 4
    assert (cache.hit(a), cache.hit(b)) == (4, 2)
    cache.unlock(receipt)
    assert cache.evict(4, max_victims=2) == 4
    assert (cache.hit(a), cache.hit(b)) == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page_size", CONFIGS)
def test_many_random_operations_agree_with_the_oracle(page_size, seed):
    driver = Driver(page_size, seed=1000 + seed)
    for _ in range(5000):
        driver.step()
