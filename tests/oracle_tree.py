"""What the oracle is built of: edges of a path-compressed tree, victims, pools."""

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

FREE, REQUEST, TREE = "free", "request", "tree"

Key = list[tuple]
"""Whole pages, each a tuple of tokens; the first one is (namespace, tokens), which
alone keeps the subtrees of namespaces apart. A slice from the front is a key too."""


class Lane:
    """A component's value, stamp and lock count for each page of an edge."""

    __slots__ = ("locks", "stamps", "values")

    def __init__(self, values=(), stamps=(), locks=()):
        self.values = list(values)
        self.stamps = list(stamps)
        self.locks = list(locks)

    def __len__(self):
        return len(self.values)

    def grow(self, values: Sequence[int]) -> None:
        """Append unlocked pages, which the caller is about to stamp."""
        self.values += values
        self.stamps += [-1] * len(values)
        self.locks += [0] * len(values)

    def split(self, at: int) -> "Lane":
        """Cut the first `at` pages off; they are returned."""
        upper = Lane(self.values[:at], self.stamps[:at], self.locks[:at])
        del self.values[:at], self.stamps[:at], self.locks[:at]
        return upper

    def is_last_older(self, stamp: float) -> bool:
        """Whether there is a last page, unlocked and older than `stamp`."""
        return bool(self.values) and not self.locks[-1] and self.stamps[-1] < stamp

    def pop(self) -> int:
        """Cut the last page off."""
        self.stamps.pop()
        self.locks.pop()
        return self.values.pop()


class Edge:
    """A run of pages that starts `start` pages below the root."""

    __slots__ = ("children", "full", "is_queued", "parent", "start", "tokens")

    def __init__(self, parent: "Edge | None", start: int, tokens: Key, full: Lane):
        self.parent = parent  # None: the root, which holds no pages
        self.start = start
        self.tokens = tokens
        self.full = full
        self.children: dict[tuple, Edge] = {}
        self.is_queued = False

    def common(self, key: Key) -> int:
        """Count the pages that `key` shares with this edge, from its start on."""
        length = min(len(self.tokens), len(key) - self.start)
        theirs = key[self.start : self.start + length]
        mine = self.tokens if length == len(self.tokens) else self.tokens[:length]
        if mine == theirs:
            return length
        return next(i for i in range(length) if mine[i] != theirs[i])

    def split(self, at: int) -> "Edge":
        """Move the first `at` pages to a new edge above this one; it is returned.

        The lower part stays this object: whoever remembers an edge and a depth finds
        the page by going up (`locate`).
        """
        assert self.parent is not None and 0 < at < len(self.tokens)
        upper = Edge(self.parent, self.start, self.tokens[:at], self.full.split(at))
        self.parent.children[upper.tokens[0]] = upper
        del self.tokens[:at]
        self.parent, self.start = upper, self.start + at
        upper.children[self.tokens[0]] = self
        return upper

    def locate(self, depth: int) -> "Edge":
        """Find the edge, this one or one above, that holds the page at `depth`."""
        edge = self
        while edge.parent is not None and edge.start >= depth:
            edge = edge.parent
        return edge

    def upwards(self, depth: int) -> "Iterator[tuple[Edge, int]]":
        """Go from the page at `depth` to the root: edges and how much of each."""
        edge = self.locate(depth)
        while edge.parent is not None:
            yield edge, depth - edge.start
            edge, depth = edge.parent, edge.start

    def below(self) -> "Iterator[Edge]":
        """Every edge of this subtree but this one, parents first."""
        stack = list(self.children.values())
        while stack:
            edge = stack.pop()
            stack.extend(edge.children.values())
            yield edge

    def page_rows(self) -> "Iterator[tuple[Hashable, tuple, int, int]]":
        """Namespace, tokens from the root, page and locks of all below this root."""
        paths: dict[Edge | None, tuple[Hashable, tuple]] = {self: (None, ())}
        for edge in self.below():
            namespace, path = paths[edge.parent]
            lane = edge.full
            for i, (page, locks) in enumerate(
                zip(lane.values, lane.locks, strict=True)
            ):
                tokens = edge.tokens[i]
                if edge.start + i == 0:
                    namespace, tokens = tokens
                path += tokens
                yield namespace, path, page, locks
            paths[edge] = namespace, path

    def check(self) -> None:
        """Assert what must hold of an edge and the one above it."""
        above, lane = self.parent, self.full
        assert above is not None and self.tokens
        assert above.children[self.tokens[0]] is self
        assert self.start == above.start + len(above.tokens)
        assert len(self.tokens) == len(lane) == len(lane.stamps) == len(lane.locks)
        # A parent is newer than its child and locked at least as often.
        stamps = above.full.stamps[-1:] + lane.stamps
        locks = above.full.locks[-1:] + lane.locks
        assert all(a > b for a, b in pairwise(stamps))
        assert all(a >= b for a, b in pairwise(locks)) and locks[-1] >= 0


class VictimQueue:
    """Edges by the stamp of their last page, for eviction in the order of stamps.

    An edge without children whose last page is unlocked has one entry, under a stamp
    that this page or one that was below it had. Stamps only grow, so no entry is too
    late, and `take` corrects those that are early. No stamp is given out twice, so
    entries never tie.
    """

    def __init__(self):
        self._heap: list[tuple[int, Edge]] = []

    def add(self, edge: Edge) -> None:
        """Queue an edge if its last page could go next."""
        lane = edge.full
        if edge.is_queued or edge.children or not lane.values or lane.locks[-1]:
            return
        edge.is_queued = True
        heapq.heappush(self._heap, (lane.stamps[-1], edge))

    def take(self, count: int) -> list[int]:
        """Remove the `count` oldest unlocked pages from the tree, or what there is."""
        victims, newest = [], -1
        while len(victims) < count and self._heap:
            _, edge = heapq.heappop(self._heap)
            edge.is_queued = False
            lane = edge.full
            if not edge.children:
                # No other page can be older than what the queue says next. Where the
                # entry was early, this one may be newer, and goes back.
                until = self._heap[0][0] if self._heap else math.inf
                head = edge.tokens[0]
                while len(victims) < count and lane.is_last_older(until):
                    # Victims go in the order of their stamps, so children first.
                    assert lane.stamps[-1] > newest
                    newest = lane.stamps[-1]
                    edge.tokens.pop()
                    victims.append(lane.pop())
                if not lane.values:
                    assert edge.parent is not None
                    del edge.parent.children[head]
                    edge = edge.parent
            self.add(edge)
        return victims

    def check(self, edges: list[Edge]) -> None:
        """Assert that each edge that could go next is queued, none of them late."""
        assert sum(edge.is_queued for edge in edges) == len(self._heap)
        assert all(edge.full.stamps[-1] >= stamp for stamp, edge in self._heap)
        for edge in edges:
            assert edge.is_queued or edge.children or edge.full.locks[-1]


class Pool:
    """Page ids 1 to `num_pages`: who owns each, and those that are free in order."""

    def __init__(self, num_pages: int):
        self.owner = [FREE] * (num_pages + 1)
        self.free = deque(range(1, num_pages + 1))

    def owner_of(self, page: int) -> str | None:
        """Say who owns `page`; None: there is no such page."""
        return self.owner[page] if 0 < page < len(self.owner) else None

    def take(self, count: int) -> list[int]:
        """Give the first free pages to a request."""
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.owner[page] = REQUEST
        return pages

    def give(self, page: int) -> None:
        """Append a page to the free ones."""
        self.owner[page] = FREE
        self.free.append(page)
