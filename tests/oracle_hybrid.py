"""A cache of several components in plain Python, one node a page, walked node by node.

It states the rules of FULL, SWA and RECURRENT as one would tell them and shares no code
and no layout with the package; `oracle.py` is its path-compressed kin for FULL alone.
Values are ids from 1, None a tombstone.
"""

from collections.abc import Hashable, Sequence
from itertools import batched

from oracle_nodes import FULL, RECURRENT, SWA, InsertResult, Key, Match, Node
from oracle_store import Store
from oracle_tree import REQUEST, TREE


class HybridOracle(Store):
    """The cache: what a key hits, and what an insert adopts."""

    def key(self, tokens: Sequence[int], namespace: Hashable = None) -> Key:
        """Cut tokens into whole pages, at most `max_prefix_pages`; a tail is left."""
        size = self.settings.page_size
        count = min(len(tokens) // size, self.settings.max_prefix_pages)
        pages: list = list(batched(tokens[: count * size], size))
        if pages:
            pages[0] = (namespace, pages[0])
        return Key(pages, len(tokens))

    # Match.

    def match(self, key: Key, full_only: bool = False) -> Match:
        """Find the longest prefix that every component can serve, and refresh it."""
        match = self.peek(key, full_only)
        self._refresh(match.path, (FULL,) if full_only else self.components)
        self._advance()
        return match

    def peek(self, key: Key, full_only: bool = False) -> Match:
        """Find what `match` would find; nothing changes."""
        run = self._walk(key)
        size = self.settings.page_size
        asked = (FULL,) if full_only else self.components
        depths = range(len(run), 0, -1)
        served = {
            c: next((d for d in depths if self._accepts(c, run[:d])), 0) for c in asked
        }
        joint = (d for d in depths if all(self._accepts(c, run[:d]) for c in asked))
        hit = run[: next(joint, 0)]
        branching, lost = [0, 0, 0], [0, 0, 0]
        for c, depth in served.items():
            grid = self.settings.grid if c == RECURRENT else size
            on_grid = len(run) * size // grid * grid
            branching[c] = on_grid if on_grid > depth * size else 0
            lost[c] = (len(run) - depth) * size
        slot = hit[-1].values[RECURRENT] if hit and RECURRENT in asked else None
        return Match(
            pages=[node.values[FULL] for node in hit],
            hit_length=len(hit) * size,
            full_length=len(run) * size,
            branching=tuple(branching),
            lost=tuple(lost),
            slot=slot or 0,
            path=hit,
            full_only=full_only,
        )

    def _walk(self, key: Key) -> list[Node]:
        node, path = self.root, []
        for page in key.pages:
            node = node.children.get(page)
            if node is None:
                break
            path.append(node)
        return path

    def _accepts(self, component: int, path: list[Node]) -> bool:
        """Whether a component can serve the boundary at the end of `path`."""
        if component == SWA:
            return all(n.values[SWA] for n in path[-self.settings.window_pages :])
        return path[-1].values[component] is not None

    # Recency. A stamp is (not low, tick): low ones come before all others.

    def _refresh(self, path: list[Node], components) -> None:
        """Stamp what a hit at the end of `path` uses."""
        for depth, node in enumerate(path, 1):
            for c in components:
                nearby = depth > len(path) - self.settings.window_pages - 1
                used = {FULL: True, SWA: nearby, RECURRENT: depth == len(path)}[c]
                if used and node.values[c]:
                    self._stamp(node, c)

    def _stamp(self, node: Node, component: int, is_low: bool = False) -> None:
        """Deeper is older, but for SWA, where the shallow pages of a key go first."""
        page = node.depth - 1
        deepest = self.settings.max_prefix_pages - 1
        tick = self.clock + (page if component == SWA else deepest - page)
        node.stamps[component] = (not is_low, tick)

    def _advance(self) -> None:
        self.clock += self.settings.max_prefix_pages + 1

    # Insert.

    def insert(
        self,
        key: Key,
        pages: Sequence[int],
        prev_prefix_len: int = 0,
        swa_pages: Sequence[int] = (),
        swa_evicted_seqlen: int = 0,
        slot: int = 0,
        slot_length: int = 0,
    ) -> InsertResult:
        """Adopt what the tree lacks of a key: pages, SWA pages, a snapshot.

        Args:
          key: whole pages, and the prompt's length.
          pages: a FULL page for each of them.
          prev_prefix_len: tokens that the request already shares with the tree.
          swa_pages: an SWA page for each, 0 for none.
          swa_evicted_seqlen: tokens whose SWA pages the request let go.
          slot: a recurrent slot, 0 for none.
          slot_length: tokens whose state the slot holds.

        Status:
          STALE_PREFIX: the tree holds less than `prev_prefix_len`; nothing went in.
          NOT_OWNED: an entry that no request owns or that came twice: a FULL one cuts
          the key there, another is left alone. BAD_LENGTH: a negative length is 0.
        """
        if len(pages) != len(key.pages):
            raise ValueError(f"{len(pages)} page ids; wanted {len(key.pages)}")
        size = self.settings.page_size
        if min(prev_prefix_len, swa_evicted_seqlen, slot_length) < 0:
            self.status.add("BAD_LENGTH")
        prev = max(prev_prefix_len, 0) // size
        path = self._walk(key)
        old = len(path)
        result = InsertResult(prefix_len=old * size)
        is_stale = old < min(prev, len(key.pages))
        if is_stale:
            self.status.add("STALE_PREFIX")
        else:
            path = self._grow(path, key, pages, result)
        result.inserted_len = len(path) * size
        result.page_table = [node.values[FULL] for node in path] + list(
            pages[len(path) :]
        )
        self._refresh(path, {FULL, SWA}.intersection(self.components))
        for i in range(prev, len(path)):
            if i < old and pages[i] > 0 and pages[i] != path[i].values[FULL]:
                result.duplicate[FULL].append(i)
        if SWA in self.components:
            is_open = not is_stale
            self._fill_windows(
                path, prev, swa_pages, swa_evicted_seqlen, is_open, result
            )
        if slot and path and key.length == slot_length == len(path) * size:
            self._commit(path, prev, slot, result)
        self._advance()
        return result

    def _grow(self, path, key: Key, pages, result: InsertResult) -> list[Node]:
        """Hang new nodes below `path`, up to the first page that no request owns."""
        path = list(path)
        for i in range(len(path), len(key.pages)):
            if not self._adopt(FULL, pages[i]):
                break
            node = Node(path[-1] if path else self.root, key.pages[i])
            node.values[FULL] = pages[i]
            path.append(node)
            result.adopted[FULL].append(i)
        return path

    def _adopt(self, component: int, entry: int) -> bool:
        """Make a request's page or slot the tree's."""
        pool = self.pools[component]
        if pool.owner_of(entry) != REQUEST:
            self.status.add("NOT_OWNED")
            return False
        pool.owner[entry] = TREE
        return True

    def _fill_windows(self, path, prev, entries, evicted, is_open, result) -> None:
        """Give SWA pages to tombstones and new nodes; a live page stays."""
        size = self.settings.page_size
        first_in_window = len(path) - self.settings.window_pages - 1
        for i, (node, entry) in enumerate(zip(path, entries, strict=False)):
            held = node.values[SWA]
            if held:
                if entry > 0 and entry != held and i >= prev:
                    result.duplicate[SWA].append(i)
            elif is_open and entry and i * size >= evicted and self._adopt(SWA, entry):
                node.values[SWA] = entry
                self._stamp(node, SWA, is_low=i < first_in_window)
                result.adopted[SWA].append(i)
        if self.settings.swa_inserts_are_recent:
            for node in path:
                if node.values[SWA]:
                    self._stamp(node, SWA)

    def _commit(self, path, prev: int, slot: int, result: InsertResult) -> None:
        """Put a snapshot on the last node; the one it replaces in its line is low."""
        node = path[-1]
        if node.values[RECURRENT]:
            result.recurrent_exist = True
            if node.values[RECURRENT] != slot and len(path) > prev:
                result.duplicate[RECURRENT].append(len(path) - 1)
        elif not self._adopt(RECURRENT, slot):
            return
        else:
            node.values[RECURRENT] = slot
            result.recurrent_committed = True
            result.adopted[RECURRENT].append(len(path) - 1)
            for above in reversed(path[:-1]):
                if len(above.children) > 1:
                    break
                if above.values[RECURRENT]:
                    self._stamp(above, RECURRENT, is_low=True)
                    break
        self._stamp(node, RECURRENT)
