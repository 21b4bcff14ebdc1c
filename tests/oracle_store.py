"""The state of the hybrid oracle, and how things leave it: evict, locks, pools."""

from collections.abc import Iterator, Sequence

from oracle_nodes import FULL, RECURRENT, SWA, Freed, Match, Node, Receipt, Settings
from oracle_tree import FREE, REQUEST, TREE, Pool

EXHAUSTED = {
    FULL: "PAGES_EXHAUSTED",
    SWA: "SWA_PAGES_EXHAUSTED",
    RECURRENT: "SLOTS_EXHAUSTED",
}


class Store:
    """Tree, pools and ledger. `status` collects the names of what went wrong."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.components = settings.components
        self.pools = {c: Pool(settings.capacity[c]) for c in self.components}
        self.clock = 0
        self.status: set[str] = set()
        self.root = Node(None, None)
        self.ledger: dict[int, tuple[Node, frozenset[int]]] = {}
        self.next_serial = 1

    def take_status(self) -> set[str]:
        """Return the names collected since the last call."""
        status, self.status = self.status, set()
        return status

    # Evict.

    def evict(
        self, num_tokens=0, swa_num_tokens=0, recurrent_num=0, max_victims=None
    ) -> Freed:
        """Free at least so much of each pool, or what is unlocked.

        Returns:
          The ids freed of each component, in order.
        """
        wanted = (num_tokens, swa_num_tokens, recurrent_num)
        if min(wanted) < 0:
            self.status.add("BAD_LENGTH")
        sizes = (self.settings.page_size, self.settings.page_size, 1)
        need = [-(-max(w, 0) // s) for w, s in zip(wanted, sizes, strict=True)]
        if max_victims is not None:
            need = [min(n, max_victims) for n in need]
        return self._evict(need)

    def _evict(self, need: Sequence[int]) -> Freed:
        freed: Freed = {c: [] for c in self.components}
        for c in (RECURRENT, SWA):
            if c in self.components:
                for node in self.victims(c)[: max(need[c], 0)]:
                    self._drop(node, c, freed)
        for node in self.victims(FULL)[: max(need[FULL], 0)]:
            assert not node.children, "a parent came before its child"
            for c in self.components:
                if node.values[c]:
                    self._drop(node, c, freed)
            node.unlink()
        return freed

    def _drop(self, node: Node, component: int, freed: Freed) -> None:
        entry = node.values[component]
        node.values[component] = None
        self.pools[component].give(entry)
        freed[component].append(entry)

    def victims(self, component: int) -> list[Node]:
        """Nodes whose value could go, in the order in which they would."""
        nodes = [n for n in self.nodes() if n.values[component]]
        nodes = [n for n in nodes if not n.locks[component]]
        return sorted(nodes, key=lambda node: node.stamps[component])

    # Locks.

    def lock(self, match: Match) -> Receipt | None:
        """Lock FULL to the root, the SWA window, and the snapshot's place.

        Status:
          STALE_MATCH: the anchor left the tree. LEDGER_FULL. Nothing is locked.
        """
        anchor = match.path[-1] if match.path else self.root
        if not anchor.is_alive:
            self.status.add("STALE_MATCH")
            return None
        if len(self.ledger) >= self.settings.max_live_receipts:
            self.status.add("LEDGER_FULL")
            return None
        held = {FULL, SWA} if match.full_only else {FULL, SWA, RECURRENT}
        return self._hold(anchor, held.intersection(self.components))

    def _hold(self, anchor: Node, held) -> Receipt:
        for node, c in self._locked_by(anchor, held):
            node.locks[c] += 1
        serial, self.next_serial = self.next_serial, self.next_serial + 1
        self.ledger[serial] = anchor, frozenset(held)
        return Receipt(serial)

    def _locked_by(self, anchor: Node, held) -> Iterator[tuple[Node, int]]:
        """What a lock on `anchor` counts, by position: values may come and go."""
        for up, node in enumerate(anchor.upwards()):
            near = {FULL: True, SWA: up < self.settings.window_pages, RECURRENT: not up}
            yield from ((node, c) for c in held if near[c])

    def unlock(self, receipt: Receipt | None) -> bool:
        """Give a lock back; None is nothing to give back.

        Status:
          STALE_RECEIPT: it was given back before, or renewed.
        """
        if receipt is None:
            return False
        if receipt.serial not in self.ledger:
            self.status.add("STALE_RECEIPT")
            return False
        for node, c in self._locked_by(*self.ledger.pop(receipt.serial)):
            node.locks[c] -= 1
        return True

    def release_window(self, receipt: Receipt | None) -> Receipt | None:
        """Give back all but FULL, for a receipt of another serial."""
        anchor = self.ledger[receipt.serial][0] if self._is_live(receipt) else None
        if not self.unlock(receipt):
            return None
        assert anchor is not None
        return self._hold(anchor, {FULL})

    def _is_live(self, receipt: Receipt | None) -> bool:
        return receipt is not None and receipt.serial in self.ledger

    # Pages and slots of requests.

    def alloc(self, component: int, count: int, partial: bool = False) -> list[int]:
        """Give free entries to a request, evicting exactly what is short."""
        if partial:
            pool, more = self.pools[component], len(self.victims(component))
            count = min(count, len(pool.free) + more)
        need = [0, 0, 0]
        need[component] = count
        return self.alloc_request(*need)[component]

    def alloc_request(self, num_pages: int, num_swa_pages: int, num_slots: int):
        """Give all or none of what a request needs of every pool.

        Status:
          BAD_LENGTH: a negative count is 0. PAGES_EXHAUSTED, SWA_PAGES_EXHAUSTED,
          SLOTS_EXHAUSTED: less is free or evictable; nothing is evicted or given.
        """
        need = [num_pages, num_swa_pages, num_slots]
        if min(need) < 0:
            self.status.add("BAD_LENGTH")
        need = [max(n, 0) for n in need]
        free = {c: len(self.pools[c].free) for c in self.components}
        short = [c for c in free if need[c] > free[c] + len(self.victims(c))]
        self.status |= {EXHAUSTED[c] for c in short}
        if short:
            return {c: [] for c in self.components}
        self._evict([need[c] - free.get(c, 0) for c in (FULL, SWA, RECURRENT)])
        return {c: self.pools[c].take(need[c]) for c in self.components}

    def free(self, component: int, entries: Sequence[int]) -> None:
        """Return a request's entries; 0 is padding.

        Status:
          DOUBLE_FREE, FREED_TREE_PAGE, BAD_PAGE: those were left alone.
        """
        names = {FREE: "DOUBLE_FREE", TREE: "FREED_TREE_PAGE", None: "BAD_PAGE"}
        pool = self.pools[component]
        for entry in entries:
            owner = pool.owner_of(entry)
            if owner == REQUEST:
                pool.give(entry)
            elif entry != 0:
                self.status.add(names[owner])

    # Looking inside.

    def nodes(self) -> list[Node]:
        """All live nodes but the root."""
        return list(self.root.below())

    def count(self, component: int) -> tuple[int, int]:
        """Entries of the tree that are evictable, and that are locked."""
        nodes = [n for n in self.nodes() if n.values[component]]
        locked = sum(n.locks[component] > 0 for n in nodes)
        return len(nodes) - locked, locked

    def rows(self) -> list[tuple]:
        """(namespace, tokens from the root, values, locks) of every node, sorted."""
        rows = [
            (*n.name(), tuple(v or -1 for v in n.values), tuple(n.locks))
            for n in self.nodes()
        ]
        return sorted(rows, key=lambda row: (repr(row[0]), row[1]))

    def victim_order(self, component: int) -> list[int]:
        """Ids in the order in which an eviction of that component takes them."""
        return [n.values[component] for n in self.victims(component)]

    def check(self) -> None:
        """Assert what must hold between any two operations."""
        nodes = self.nodes()
        locks = {node: [0, 0, 0] for node in nodes}
        for anchor, held in self.ledger.values():
            for node, c in self._locked_by(anchor, held):
                locks[node][c] += 1
        assert locks == {node: node.locks for node in nodes}
        for c in self.components:
            owner, held = self.pools[c].owner, [n.values[c] for n in nodes]
            of = lambda who, owner=owner: [
                e for e in range(1, len(owner)) if owner[e] == who
            ]
            assert sorted(filter(None, held)) == of(TREE)
            assert sorted(self.pools[c].free) == of(FREE)
            stamps = [n.stamps[c] for n in nodes if n.values[c]]
            assert len(set(stamps)) == len(stamps)
        for node in nodes:
            assert node.values[FULL], "FULL has no tombstones"
            above = node.parent
            assert above is self.root or above.stamps[FULL] > node.stamps[FULL]
