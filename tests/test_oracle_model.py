"""The oracle against a model that is dumber still, under random operations."""

import itertools
import random
from typing import Any

import pytest
from oracle import Oracle, Receipt
from oracle_tree import Edge


class Model:
    """A dict from each path to its page; every question is a scan."""

    def __init__(self, page_size, num_pages, max_live_receipts):
        self.page_size, self.num_pages = page_size, num_pages
        self.max_live_receipts = max_live_receipts
        self.tree: dict[tuple, dict[str, Any]] = {}  # path -> page, stamp, locks
        self.free_pages = list(range(1, num_pages + 1))
        self.held: set[int] = set()
        self.live: dict[int, list[tuple]] = {}  # serial -> locked paths
        self.clock, self.serial, self.status = 0, 0, set()

    def run(self, key):
        """Paths of the key that are in the tree, root first."""
        paths = [tuple(key[: i + 1]) for i in range(len(key))]
        return list(itertools.takewhile(self.tree.__contains__, paths))

    def refresh(self, paths, bound):
        for i, path in enumerate(paths):
            self.tree[path]["stamp"] = self.clock + bound - i - 1
        self.clock += bound + 1

    def peek(self, key):
        return [self.tree[path]["page"] for path in self.run(key)]

    def match(self, key, bound):
        self.refresh(self.run(key), bound)
        return self.peek(key)

    def insert(self, key, pages, prev, bound):
        old = len(self.run(key))
        duplicates = [
            page
            for i, page in enumerate(pages[:old])
            if i >= prev // self.page_size and page not in (0, self.peek(key)[i])
        ]
        adopted = []
        if old < min(prev // self.page_size, len(key)):
            self.status.add("STALE_PREFIX")
        else:
            for i in range(old, len(key)):
                if pages[i] not in self.held:
                    self.status.add("NOT_OWNED")
                    break
                self.held.remove(pages[i])
                adopted.append(pages[i])
                entry = {"page": pages[i], "locks": 0, "born": self.clock}
                self.tree[tuple(key[: i + 1])] = entry
        self.refresh(self.run(key), bound)
        end = len(self.run(key))
        table = self.peek(key) + pages[end:]
        lengths = old * self.page_size, end * self.page_size
        return (*lengths, adopted, duplicates, table)

    def unlocked(self):
        return sorted(
            (entry["stamp"], path)
            for path, entry in self.tree.items()
            if not entry["locks"]
        )

    def victim_order(self):
        return [self.tree[path]["page"] for _, path in self.unlocked()]

    def evict(self, num_tokens):
        victims = []
        for _, path in self.unlocked():
            if len(victims) * self.page_size >= num_tokens:
                break
            longer = [other for other in self.tree if other[: len(path)] == path]
            assert longer == [path], "a page left before the one below it"
            victims.append(self.tree.pop(path)["page"])
        self.free_pages += victims
        return victims

    def lock(self, key, hit, born):
        """Lock what a match of `key` hit; `born` says of which last page."""
        paths = [tuple(key[: i + 1]) for i in range(hit)]
        if paths and self.tree.get(paths[-1], {}).get("born") != born:
            self.status.add("STALE_MATCH")
            return None
        if len(self.live) == self.max_live_receipts:
            self.status.add("LEDGER_FULL")
            return None
        for path in paths:
            self.tree[path]["locks"] += 1
        self.serial += 1
        self.live[self.serial] = paths
        return self.serial

    def unlock(self, serial):
        if serial not in self.live:
            self.status.add("STALE_RECEIPT")
            return False
        for path in self.live.pop(serial):
            self.tree[path]["locks"] -= 1
        return True

    def alloc(self, count, partial):
        room = len(self.free_pages) + len(self.unlocked())
        if count > room and not partial:
            self.status.add("PAGES_EXHAUSTED")
            return []
        count = min(count, room)
        self.evict((count - len(self.free_pages)) * self.page_size)
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        self.held |= set(pages)
        return pages

    def free(self, pages):
        for page in pages:
            if page in self.held:
                self.held.remove(page)
                self.free_pages.append(page)
            elif page in self.free_pages:
                self.status.add("DOUBLE_FREE")
            elif 0 < page <= self.num_pages:
                self.status.add("FREED_TREE_PAGE")
            elif page:
                self.status.add("BAD_PAGE")

    def snapshot(self):
        pages = [
            (
                path[0][0],
                sum(path[1:], path[0][1]),
                entry["page"],
                entry["locks"],
            )
            for path, entry in self.tree.items()
        ]
        num_evictable = len(self.unlocked())
        return {
            "pages": sorted(pages, key=lambda row: (repr(row[0]), row[1])),
            "free": self.free_pages,
            "evictable": num_evictable * self.page_size,
            "protected": (len(pages) - num_evictable) * self.page_size,
        }


class Pair:
    """The oracle and the model under the same random operations."""

    def __init__(self, seed, page_size, num_pages, num_tokens):
        self.random = random.Random(seed)
        self.page_size, self.num_tokens = page_size, num_tokens
        self.oracle = Oracle(page_size, num_pages, 8, max_live_receipts=5)
        self.model = Model(page_size, num_pages, 5)
        self.matches = []
        self.serials = []
        self.seen: set[str] = set()

    def key(self):
        length = self.random.randint(0, 9 * self.page_size)
        # Pages of one token repeated: few kinds, so that keys meet and part often.
        pages = [self.random.randrange(self.num_tokens) for _ in range(length)]
        tokens = [pages[i // self.page_size] for i in range(length)]
        return self.oracle.key(tokens, self.random.choice([None, None, "other"]))

    def step(self):
        operations = [self.match, self.insert, self.insert, self.lock, self.unlock]
        operations += [self.evict, self.alloc, self.free]
        ours, theirs = self.random.choice(operations)()
        assert ours == theirs
        self.oracle.check()
        assert self.oracle.snapshot() == self.model.snapshot()
        assert self.oracle.victim_order() == self.model.victim_order()
        status = self.oracle.take_status()
        assert status == self.model.status
        self.model.status = set()
        self.seen |= status

    def match(self):
        key = self.key()
        bound = len(key) + self.random.randint(0, 3)
        peeked = self.oracle.peek(key).pages, self.model.peek(key)
        match = self.oracle.match(key, bound)
        pages = self.model.match(key, bound)
        born = self.model.tree[tuple(key[: len(pages)])]["born"] if pages else 0
        self.matches = [*self.matches[-8:], (match, key, len(pages), born)]
        hit = len(pages) * self.page_size
        return (match.pages, match.hit_length, peeked[0]), (pages, hit, peeked[1])

    def insert(self):
        key = self.key()
        bound = len(key) + self.random.randint(0, 3)
        shared = self.model.peek(key)
        missing = len(key) - len(shared)
        new = self.oracle.alloc(missing, True), self.model.alloc(missing, True)
        assert new[0] == new[1]
        pages = (shared + new[0] + [0] * len(key))[: len(key)]
        if pages and self.random.random() < 0.4:  # entries that are not its own
            place = self.random.randrange(len(pages))
            pages[place] = self.random.randint(-1, self.model.num_pages + 1)
        prev = len(shared) * self.page_size + self.random.randint(-1, 1)
        prev = max(prev, 0) * (self.random.random() < 0.8)
        result = self.oracle.insert(key, pages, prev, bound)
        ours = (
            result.prefix_len,
            result.inserted_len,
            result.adopted,
            result.duplicates,
            result.page_table,
        )
        return ours, self.model.insert(key, pages, prev, bound)

    def lock(self):
        if not self.matches:
            return None, None
        match, *known = self.random.choice(self.matches)
        ours, theirs = self.oracle.lock(match), self.model.lock(*known)
        self.serials = [*self.serials[-6:], theirs] if theirs else self.serials
        return ours.serial if ours else None, theirs

    def unlock(self):
        # The oldest live one, or any that was seen.
        known = [*list(self.model.live)[:1], *self.serials]
        if not known:
            return None, None
        serial = known[0] if self.random.random() < 0.6 else self.random.choice(known)
        return self.oracle.unlock(Receipt(serial)), self.model.unlock(serial)

    def evict(self):
        count = self.random.randint(0, 4 * self.page_size)
        return self.oracle.evict(count), self.model.evict(count)

    def alloc(self):
        count, partial = self.random.randint(0, 6), self.random.random() < 0.3
        return self.oracle.alloc(count, partial), self.model.alloc(count, partial)

    def free(self):
        held = sorted(self.model.held)
        pages = self.random.sample(held, min(len(held), 4))
        if self.random.random() < 0.3:
            pages += pages[:1]
            pages += [self.random.randint(-1, self.model.num_pages + 1)]
        return self.oracle.free(pages), self.model.free(pages)


@pytest.fixture
def splits(monkeypatch) -> list[int]:
    """Where edges were split."""
    places, split = [], Edge.split
    monkeypatch.setattr(Edge, "split", lambda e, at: places.append(at) or split(e, at))
    return places


@pytest.mark.parametrize(
    ("page_size", "num_pages", "num_tokens"), [(1, 24, 2), (2, 40, 3), (3, 14, 2)]
)
@pytest.mark.parametrize("seed", range(2))
def test_it_does_what_a_model_without_a_tree_does(
    splits, page_size, num_pages, num_tokens, seed
):
    pair = Pair(seed, page_size, num_pages, num_tokens)
    for _ in range(3_000):
        pair.step()
    # The walk must have met everything, or it shows little.
    assert len(splits) >= 30
    assert pair.seen == {
        "BAD_PAGE",
        "DOUBLE_FREE",
        "FREED_TREE_PAGE",
        "LEDGER_FULL",
        "NOT_OWNED",
        "PAGES_EXHAUSTED",
        "STALE_MATCH",
        "STALE_PREFIX",
        "STALE_RECEIPT",
    }
