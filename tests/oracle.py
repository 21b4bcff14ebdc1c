"""A prefix cache in plain Python: what the array operations are tested against.

The tree is path-compressed, as host trees are: an edge holds a run of pages and is
split where a key leaves it midway. It shares no code and no idea of layout with the
package. Page ids run from 1; a key is a list of whole pages (`Oracle.key`).

Every page of an edge has an entry in the edge's lanes, one lane a component: its
value, stamp and lock count. There is one lane and one pool today, FULL's. Another
component is one more lane in `Edge` (split and cut come with it), a pool of its own,
and its rules in `match`, `insert`, `evict` and `lock`.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import batched

from oracle_tree import FREE, REQUEST, TREE, Edge, Key, Lane, Pool, VictimQueue


@dataclass(frozen=True)
class Match:
    """What a key hits."""

    pages: list[int]
    hit_length: int  # tokens
    edge: Edge = field(repr=False, compare=False)
    born: int = field(compare=False)  # clock at which the last page was adopted


@dataclass(frozen=True)
class Receipt:
    """A lock to be given back once."""

    serial: int


@dataclass(frozen=True)
class InsertResult:
    """Lengths in tokens, pages by id."""

    prefix_len: int  # what the tree held already
    inserted_len: int  # what it holds now
    adopted: list[int]
    duplicates: list[int]
    page_table: list[int]


class Oracle:
    """The cache. `status` collects the names of what went wrong."""

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        max_prefix_pages: int | None = None,
        max_live_receipts: int = 256,
    ):
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_prefix_pages = max_prefix_pages
        self.max_live_receipts = max_live_receipts
        self.pool = Pool(num_pages)
        self.clock = 0
        self.status: set[str] = set()
        self._root = Edge(None, 0, [], Lane())
        self._born = [0] * (num_pages + 1)  # clock at which the tree adopted a page
        self._ledger: dict[int, tuple[Edge, int]] = {}  # serial -> anchor, its depth
        self._next_serial = 1
        self._num_evictable = self._num_protected = 0
        self._queue = VictimQueue()

    # Sizes, in tokens.

    @property
    def evictable(self) -> int:
        """Unlocked tokens of the tree."""
        return self._num_evictable * self.page_size

    @property
    def protected(self) -> int:
        """Locked tokens of the tree."""
        return self._num_protected * self.page_size

    @property
    def size(self) -> int:
        """Tokens of the tree."""
        return self.evictable + self.protected

    def take_status(self) -> set[str]:
        """Return the names collected since the last call."""
        status, self.status = self.status, set()
        return status

    # Keys and matches.

    def key(self, tokens: Sequence[int], namespace: Hashable = None) -> Key:
        """Cut tokens into whole pages, at most `max_prefix_pages`; a tail is left."""
        count = len(tokens) // self.page_size
        if self.max_prefix_pages is not None:
            count = min(count, self.max_prefix_pages)
        pages: Key = list(batched(tokens[: count * self.page_size], self.page_size))
        if pages:
            pages[0] = (namespace, pages[0])
        return pages

    def match(self, key: Key, bound: int | None = None) -> Match:
        """Find the longest cached prefix and refresh it.

        Args:
          key: pages.
          bound: length in pages by which the clock advances; default the key's.
        """
        bound = _bound(key, bound)
        match = self.peek(key)
        self._refresh(match.edge, len(match.pages), bound)
        return match

    def peek(self, key: Key) -> Match:
        """Find what `match` would find; nothing changes."""
        edge, pages = self._walk(key)
        born = self._born[pages[-1]] if pages else 0
        return Match(pages, len(pages) * self.page_size, edge, born)

    def _walk(self, key: Key) -> tuple[Edge, list[int]]:
        """Follow a key down: the edge that holds its last page, and its pages."""
        edge, pages = self._root, []
        while len(pages) < len(key):
            child = edge.children.get(key[len(pages)])
            if child is None:
                break
            edge, length = child, child.common(key)
            pages += edge.full.values[:length]
            if length < len(edge.tokens):
                break
        return edge, pages

    def _refresh(self, edge: Edge, depth: int, bound: int) -> None:
        """Stamp all pages down to `depth`, deeper ones older; then advance."""
        for at, length in edge.upwards(depth):
            newest = self.clock + bound - at.start - 1
            at.full.stamps[:length] = range(newest, newest - length, -1)
        self.clock += bound + 1

    # Insert.

    def insert(
        self,
        key: Key,
        pages: Sequence[int],
        prev_prefix_len: int = 0,
        bound: int | None = None,
    ) -> InsertResult:
        """Adopt the pages of a key that the tree lacks.

        Args:
          key: pages of tokens.
          pages: a page id for each of them.
          prev_prefix_len: tokens that the request already shares with the tree.
          bound: as in `match`.

        Status:
          STALE_PREFIX: the tree holds less than `prev_prefix_len`; nothing went in.
          NOT_OWNED: cut at an entry that no request owns or that came twice.
          BAD_LENGTH: a negative `prev_prefix_len` counted as 0.
        """
        bound = _bound(key, bound)
        pages = list(pages)
        if len(pages) != len(key):
            raise ValueError(f"{len(pages)} page ids; wanted {len(key)}, one a page")
        if prev_prefix_len < 0:
            self.status.add("BAD_LENGTH")
        prev = max(prev_prefix_len, 0) // self.page_size
        edge, held = self._walk(key)
        old, adopted = len(held), []
        if old < min(prev, len(key)):
            self.status.add("STALE_PREFIX")
        else:
            adopted = self._adopt(pages[old:])
        end = old + len(adopted)
        if adopted:
            edge = self._attach(edge, old, key[old:end], adopted)
        self._refresh(edge, end, bound)
        self._queue.add(edge)
        duplicates = [
            mine
            for mine, theirs in zip(pages[prev:old], held[prev:], strict=True)
            if mine not in (0, theirs)
        ]
        return InsertResult(
            prefix_len=old * self.page_size,
            inserted_len=end * self.page_size,
            adopted=adopted,
            duplicates=duplicates,
            page_table=held + pages[old:],
        )

    def _adopt(self, pages: Sequence[int]) -> list[int]:
        """Make pages the tree's, up to the first that no request owns (any more)."""
        for count, page in enumerate(pages):
            if self.pool.owner_of(page) != REQUEST:
                self.status.add("NOT_OWNED")
                return list(pages[:count])
            self.pool.owner[page] = TREE
            self._born[page] = self.clock
        return list(pages)

    def _attach(self, edge: Edge, depth: int, tokens: Key, pages: list[int]) -> Edge:
        """Hang new pages below the page at `depth`, which `edge` holds."""
        self._num_evictable += len(pages)
        length = depth - edge.start
        if length < len(edge.tokens):
            edge = edge.split(length)
        if edge.parent is None or edge.children:
            child = Edge(edge, depth, [], Lane())
            edge.children[tokens[0]] = child
            edge = child
        edge.tokens += tokens
        edge.full.grow(pages)
        return edge

    # Evict.

    def evict(self, num_tokens: int) -> list[int]:
        """Free at least so many tokens, or what is unlocked; the victims in order."""
        if num_tokens < 0:
            self.status.add("BAD_LENGTH")
        return self._evict(-(-num_tokens // self.page_size))

    def _evict(self, count: int) -> list[int]:
        victims = self._queue.take(count)
        for page in victims:
            self.pool.give(page)
        self._num_evictable -= len(victims)
        return victims

    # Locks.

    def lock(self, match: Match) -> Receipt | None:
        """Lock from the root to the last page of a match.

        Status:
          STALE_MATCH: that page left the tree since. LEDGER_FULL. Nothing is locked.
        """
        depth = len(match.pages)
        edge = match.edge.locate(depth)
        if depth:
            place, page = depth - 1 - edge.start, match.pages[-1]
            is_there = edge.full.values[place : place + 1] == [page]
            if not is_there or self._born[page] != match.born:
                self.status.add("STALE_MATCH")
                return None
        if len(self._ledger) >= self.max_live_receipts:
            self.status.add("LEDGER_FULL")
            return None
        self._add_locks(edge, depth, 1)
        receipt = Receipt(self._next_serial)
        self._ledger[receipt.serial] = edge, depth
        self._next_serial += 1
        return receipt

    def unlock(self, receipt: Receipt | None) -> bool:
        """Give a lock back; None is nothing to give back.

        Status:
          STALE_RECEIPT: it was given back before.
        """
        if receipt is None:
            return False
        if receipt.serial not in self._ledger:
            self.status.add("STALE_RECEIPT")
            return False
        edge, depth = self._ledger.pop(receipt.serial)
        self._add_locks(edge, depth, -1)
        self._queue.add(edge.locate(depth))
        return True

    def _add_locks(self, edge: Edge, depth: int, step: int) -> None:
        for at, length in edge.upwards(depth):
            locks = [count + step for count in at.full.locks[:length]]
            at.full.locks[:length] = locks
            moved = locks.count(1) if step > 0 else -locks.count(0)
            self._num_evictable -= moved
            self._num_protected += moved

    # Pages of requests.

    def alloc(self, count: int, partial: bool = False) -> list[int]:
        """Give free pages to a request, evicting exactly what is short.

        Status:
          PAGES_EXHAUSTED: there are less; nothing is evicted or given. With
          `partial` there is no such status: what there is is given.
        """
        if count < 0:
            self.status.add("BAD_LENGTH")
            count = 0
        room = len(self.pool.free) + self._num_evictable
        if count > room and not partial:
            self.status.add("PAGES_EXHAUSTED")
            return []
        count = min(count, room)
        self._evict(count - len(self.pool.free))
        return self.pool.take(count)

    def free(self, pages: Sequence[int]) -> None:
        """Return a request's pages; 0 is padding.

        Status:
          DOUBLE_FREE, FREED_TREE_PAGE, BAD_PAGE: those were left alone.
        """
        names = {FREE: "DOUBLE_FREE", TREE: "FREED_TREE_PAGE", None: "BAD_PAGE"}
        for page in pages:
            owner = self.pool.owner_of(page)
            if owner == REQUEST:
                self.pool.give(page)
            elif page != 0:
                self.status.add(names[owner])

    # Looking inside.

    def snapshot(self) -> dict:
        """All that a caller can tell, in a canonical order.

        Returns:
          `pages`: (namespace, tokens from the root, page id, locks) of every page;
          `free`: free pages in order; `evictable`, `protected`: tokens.
        """
        rows = self._root.page_rows()
        return {
            "pages": sorted(rows, key=lambda row: (repr(row[0]), row[1])),
            "free": list(self.pool.free),
            "evictable": self.evictable,
            "protected": self.protected,
        }

    def victim_order(self) -> list[int]:
        """Unlocked pages of the tree in the order in which `evict` would take them."""
        lanes = [edge.full for edge in self._root.below()]
        entries = [
            (stamp, page)
            for lane in lanes
            for stamp, page, lock in zip(
                lane.stamps, lane.values, lane.locks, strict=True
            )
            if lock == 0
        ]
        return [page for _, page in sorted(entries)]

    def check(self) -> None:
        """Assert what must hold between any two operations."""
        edges = list(self._root.below())
        for edge in edges:
            edge.check()
        locks = {edge: [0] * len(edge.tokens) for edge in edges}
        for anchor, depth in self._ledger.values():
            for edge, length in anchor.upwards(depth):
                for i in range(length):
                    locks[edge][i] += 1
        assert locks == {edge: edge.full.locks for edge in edges}
        in_tree = [page for edge in edges for page in edge.full.values]
        stamps = [stamp for edge in edges for stamp in edge.full.stamps]
        assert len(set(stamps)) == len(stamps)
        assert all(0 <= stamp < self.clock for stamp in stamps)
        owner = self.pool.owner
        everyone = range(1, self.num_pages + 1)
        assert sorted(in_tree) == [p for p in everyone if owner[p] == TREE]
        assert sorted(self.pool.free) == [p for p in everyone if owner[p] == FREE]
        unlocked = sum(edge.full.locks.count(0) for edge in edges)
        assert self._num_evictable == unlocked
        assert self._num_protected == len(in_tree) - unlocked
        assert len(self._ledger) <= self.max_live_receipts
        self._queue.check(edges)


def _bound(key: Key, bound: int | None) -> int:
    if bound is None:
        return len(key)
    if bound < len(key):
        raise ValueError(f"bound={bound} is less than the key's {len(key)} pages")
    return bound
