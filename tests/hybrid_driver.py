"""Random operations on a hybrid cache and its oracle, from a seed.

The pools are so small that tombstones, eviction and exhaustion happen all the time.
"""

import random

from harness import EVERYTHING
from oracle_nodes import FULL, RECURRENT, SWA
from twin import NAMES
from twin_hybrid import HybridTwin
from twin_hybrid_batch import HybridBatchTwin

from uhrc_fn import CacheConfig

SETS = {
    "full": {"components": ("FULL",)},
    "swa": {"components": ("FULL", "SWA"), "num_swa_pages": 11},
    "swa-recent": {
        "components": ("FULL", "SWA"),
        "num_swa_pages": 11,
        "swa_inserts_are_recent": True,
    },
    "recurrent": {"components": ("FULL", "RECURRENT"), "num_recurrent_slots": 6},
}


def config(name: str, page_size: int) -> CacheConfig:
    """A small cache; at page size 4 the window is no whole number of pages."""
    changes = dict(SETS[name])
    if "SWA" in changes["components"]:
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


BATCH = 3


def entries(twin: HybridTwin, component: int, picks, used=()) -> list[int]:
    """Ids of a pool for an insert or a free: mostly held ones, now and then a bad one.

    Args:
      twin: says who owns what.
      component: the pool.
      picks: a number below 100 for each id wanted.
      used: ids that the same batch has brought already.
    """
    pool = twin.oracle.pools[component]
    held = iter(sorted(twin.core.owned[component].difference(used)))
    tree = twin.oracle.victim_order(component)
    ids: list[int] = []
    for pick in picks:
        if pick < 80:
            ids.append(next(held, 0))
        elif pick < 84:
            ids.append(next(iter(pool.free), 0))
        elif pick < 88:
            ids.append(next(iter(tree), 0))
        elif pick < 94:  # again
            ids.append([0, *used, *ids][-1])
        else:
            ids.append((0, 0, len(pool.owner), 1 << 30)[pick % 4])
    return ids


def offer(twin: HybridTwin, prompt, picks, prev, evicted, slot, length, used=()):
    """Arguments of an insert of arbitrary entries.

    Args:
      twin: says who owns what.
      prompt: tokens and their namespace.
      picks: for the pages, and in reverse for the SWA pages.
      prev: what the request says it shares.
      evicted: tokens whose SWA pages it let go.
      slot: a pick.
      length: tokens whose state the slot holds, None for all.
      used: arguments of earlier inserts of the same batch.
    """
    swa, slots = [], [0]
    if SWA in twin.components:
        before = [i for args in used for i in args[3]]
        swa = entries(twin, SWA, picks[::-1], before)
    if RECURRENT in twin.components:
        slots = entries(twin, RECURRENT, [slot], [args[5] for args in used])
    pages = entries(twin, FULL, picks, [i for args in used for i in args[1]])
    return prompt, pages, prev, swa, evicted, slots[0], length


class Driver:
    """Random operations from a seed; locks and entries held are kept in bounds."""

    def __init__(self, name: str, page_size: int, seed: int):
        self.twin = HybridBatchTwin(config(name, page_size))
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
        bad = 100 if self.random.random() < 0.3 else 80
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

    def offer(self, used=()):
        rng = self.random
        slot = rng.randrange(100) if rng.random() < 0.8 else 99
        length = None if rng.random() < 0.8 else self.length()
        prev = self.length() if rng.random() < 0.2 else 0
        args = (self.prompt(), self.picks(), prev, self.length(), slot, length)
        return offer(self.twin, *args, used)

    def insert_batch(self) -> None:
        offers: list[tuple] = []
        for _ in range(BATCH):
            offers.append(self.offer(offers))
        self.twin.insert_batch(offers)

    def free(self) -> None:
        component = self.component()
        self.twin.free(component, entries(self.twin, component, self.picks()))

    def step(self) -> None:
        rng, twin = self.random, self.twin
        few, many = lambda: rng.randrange(-1, 4), lambda: rng.randrange(-1, 8)
        batch = lambda make: [make() for _ in range(BATCH)]
        steps = {
            "serve": (10, lambda: twin.serve(self.prompt(), max(self.length(), 0))),
            "resume": (
                6,
                lambda: twin.resume(
                    self.prompt(), max(self.length(), 0), max(self.length(), 0)
                ),
            ),
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
            "alloc_request": (5, lambda: twin.alloc_request((few(), many(), few()))),
            "insert": (14, lambda: twin.insert(*self.offer())),
            "evict": (3, lambda: twin.evict(*self.amounts())),
            "evict_bounded": (4, lambda: twin.evict(*self.amounts(), max_victims=2)),
            "free": (4, self.free),
            "compact_clock": (1, twin.compact_clock),
            "reset": (0.1, twin.reset),
        }
        if self.page_size == 1:  # batches compile more
            steps |= {
                "peek_batch": (1, lambda: twin.peek_batch(batch(self.prompt))),
                "match_batch": (3, lambda: twin.match_batch(batch(self.prompt))),
                "lock_batch": (
                    3,
                    lambda: twin.matches and twin.lock_batch(batch(self.match)),
                ),
                "unlock_batch": (
                    4,
                    lambda: twin.receipts and twin.unlock_batch(batch(self.receipt)),
                ),
                "release_window_batch": (
                    1,
                    lambda: (
                        twin.receipts and twin.release_window_batch(batch(self.receipt))
                    ),
                ),
                "insert_batch": (6, self.insert_batch),
            }
        weights = [weight for weight, _ in steps.values()]
        (name,) = rng.choices(list(steps), weights)
        steps[name][1]()
        self.forget()
        self.num_steps += 1
        twin.compare(is_thorough=self.num_steps % 4 == 0)
