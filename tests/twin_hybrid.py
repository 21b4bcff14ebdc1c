"""The jitted core and the hybrid oracle, side by side.

Every method runs one operation on both and compares what they report; `compare` then
holds the two states against each other, node by node.
"""

import numpy as np
from harness import node_keys, pad
from harness_hybrid import HybridHarness, parts
from oracle_hybrid import HybridOracle
from oracle_nodes import FULL, RECURRENT, SWA, Settings
from twin import NAMES

from uhrc_fn import CacheConfig, namespace
from uhrc_fn.tree_arrays import NULL

_DIGESTS = {tuple(namespace(name).tolist()): name for name in NAMES}


def settings(config: CacheConfig) -> Settings:
    """What the oracle must know of a config."""
    return Settings(
        components=tuple(int(c) for c in config.components),
        page_size=config.page_size,
        capacity=config.capacities,
        max_prefix_pages=config.max_prefix_pages,
        max_live_receipts=config.max_live_receipts,
        window_pages=-(-config.sliding_window_size // config.page_size),
        swa_inserts_are_recent=config.swa_inserts_are_recent,
        grid=config.recurrent_track_interval or config.page_size,
    )


class HybridTwin:
    """A cache and its oracle, with the matches and receipts that both gave out."""

    def __init__(self, config: CacheConfig):
        self.config = config
        self.components = tuple(int(c) for c in config.components)
        self.core = HybridHarness(config, is_checked=False)
        self.oracle = HybridOracle(settings(config))
        self.matches: list[tuple] = []
        self.receipts: list[tuple] = []

    @property
    def bound(self) -> int:
        return self.config.max_prefix_pages

    def _key(self, prompt):
        tokens, name = prompt
        return self.oracle.key(tokens, name)

    # What both must agree on.

    def compare(self, is_thorough: bool = True) -> None:
        """Compare the two states; where thorough, check every invariant too."""
        oracle = self.oracle
        names = {bit.name for bit in self.core.take_status()}
        seen = oracle.take_status()
        assert names == seen, (names, seen)
        host = self.core.snapshot()
        value, locks = host.tree.value, host.tree.lock_ref
        for c in self.components:
            assert self.core.ring(c) == list(oracle.pools[c].free)
            counts = int(host.evictable[c]), int(host.protected[c])
            assert counts == oracle.count(c)
            unlocked = np.flatnonzero((value[c] != NULL) & (locks[c] == 0))
            stamps = host.tree.last_access[c][unlocked]
            order = value[c][unlocked[np.argsort(stamps)]].tolist()
            assert order == oracle.victim_order(c)
        rows = [
            (
                _DIGESTS[key[0]],
                tuple(t for page in key[1:] for t in page),
                tuple(value[:, node].tolist()),
                tuple(locks[:, node].tolist()),
            )
            for node, key in node_keys(host).items()
        ]
        assert sorted(rows, key=lambda r: (repr(r[0]), r[1])) == oracle.rows()
        if is_thorough:
            self.core.check_now()
            oracle.check()

    # One request.

    def peek(self, prompt) -> None:
        tokens, name = prompt
        result = self.core.peek(tokens, extra_key=name)
        self._same_match(result, self.oracle.peek(self._key(prompt)))

    def match(self, prompt, full_only: bool = False) -> None:
        tokens, name = prompt
        result = self.core.match(tokens, full_only, extra_key=name)
        seen = self.oracle.match(self._key(prompt), full_only)
        self._same_match(result, seen, has_slot=True)
        self.matches.append((result, seen))

    def _same_match(self, result, seen, has_slot: bool = False) -> None:
        assert int(result.hit_length) == seen.hit_length
        assert int(result.full_kv_hit_length) == seen.full_length
        assert result.device_indices.tolist() == pad(seen.pages, self.bound).tolist()
        branching = result.swa_branching_seqlen, result.recurrent_branching_seqlen
        assert (0, *map(int, branching)) == seen.branching
        assert tuple(result.lost_tokens.tolist()) == seen.lost
        if has_slot:
            assert int(result.cow_src_slot) == seen.slot

    def lock(self, which: int) -> None:
        """Lock one of the matches, possibly long stale."""
        result, seen = self.matches[which % len(self.matches)]
        self._same_lock(self.core.lock(result), seen)

    def _same_lock(self, receipt, match) -> None:
        before = self.oracle.count(FULL)[1]
        wanted = self.oracle.lock(match)
        assert int(receipt.serial) == (wanted.serial if wanted else 0)
        delta = (before - self.oracle.count(FULL)[1]) * self.config.page_size
        assert int(receipt.delta) == delta
        self.receipts.append((receipt, wanted))

    def unlock(self, which: int) -> None:
        """Give one of the receipts back, possibly again."""
        receipt, seen = self.receipts[which % len(self.receipts)]
        self._same_unlock(self.core.unlock(receipt), seen)

    def _same_unlock(self, result, seen) -> None:
        before = self.oracle.count(FULL)[1]
        assert bool(result.is_released) == self.oracle.unlock(seen)
        delta = (before - self.oracle.count(FULL)[1]) * self.config.page_size
        assert int(result.delta) == delta

    def release_window(self, which: int) -> None:
        """Renew one of the receipts, possibly a dead one; the old one is kept."""
        receipt, seen = self.receipts[which % len(self.receipts)]
        self._same_release(self.core.release_window(receipt), seen)

    def _same_release(self, new, seen) -> None:
        renewed = self.oracle.release_window(seen)
        assert int(new.serial) == (renewed.serial if renewed else 0)
        if renewed is not None:
            self.receipts.append((new, renewed))

    def alloc(self, component: int, count: int, partial: bool = False) -> list[int]:
        bound = self.core.alloc_bound(component)
        if count > bound:
            self.oracle.status.add("BAD_LENGTH")
        result = self.core.alloc_of(component, count, partial)
        ids = self.oracle.alloc(component, min(count, bound), partial)
        assert result.ids.tolist() == pad(ids, bound).tolist()
        assert int(result.count) == len(ids)
        assert bool(result.ok) == (len(ids) == min(max(count, 0), bound))
        return ids

    def alloc_request(self, counts) -> None:
        counts = [n if c in self.components else 0 for c, n in enumerate(counts)]
        result = self.core.alloc_request(*counts)
        bounds = [max(self.core.alloc_bound(c), 1) for c in range(3)]
        if any(n > b for n, b in zip(counts, bounds, strict=True)):
            self.oracle.status.add("BAD_LENGTH")
        clipped = [min(n, b) for n, b in zip(counts, bounds, strict=True)]
        given = self.oracle.alloc_request(*clipped)
        for c, part in enumerate(parts(result)):
            ids = given.get(c, [])
            assert part.ids[part.ids > 0].tolist() == ids
            assert int(part.count) == len(ids)

    def insert(self, prompt, pages, prev=0, swa=(), evicted=0, slot=0, length=None):
        tokens, name = prompt
        entries = self._fit(prompt, pages, prev, swa, evicted, slot, length)
        result = self.core.insert(
            tokens,
            entries["pages"],
            prev,
            swa=entries["swa_pages"],
            evicted=entries["swa_evicted_seqlen"],
            slot=entries["slot"],
            slot_length=entries["slot_length"],
            extra_key=name,
        )
        return self._same_insert(result, prompt, entries)

    def _fit(self, prompt, pages, prev, swa, evicted, slot, length) -> dict:
        """An insert's entries as the oracle takes them: those of the key's pages."""
        count = len(self._key(prompt).pages)
        fit = lambda ids: pad(list(ids)[:count], count).tolist()
        has_swa, has_slots = SWA in self.components, RECURRENT in self.components
        length = len(prompt[0]) if length is None else length
        return {
            "pages": fit(pages),
            "prev_prefix_len": prev,
            "swa_pages": fit(swa) if has_swa else [],
            "swa_evicted_seqlen": evicted if has_swa else 0,
            "slot": slot if has_slots else 0,
            "slot_length": length if has_slots else 0,
        }

    def _same_insert(self, result, prompt, entries):
        key = self._key(prompt)
        seen = self.oracle.insert(key, **entries)
        assert int(result.prefix_len) == seen.prefix_len
        assert int(result.inserted_len) == seen.inserted_len
        assert result.page_table[: len(key.pages)].tolist() == seen.page_table
        for c in range(3):
            adopted = np.flatnonzero(result.adopted()[:, c]).tolist()
            assert adopted == seen.adopted[c]
            duplicate = np.flatnonzero(result.duplicate()[:, c]).tolist()
            assert duplicate == seen.duplicate[c]
        assert bool(result.recurrent_exist) == seen.recurrent_exist
        assert bool(result.recurrent_committed) == seen.recurrent_committed
        return seen

    def evict(self, full=0, swa=0, recurrent=0, max_victims: int | None = None):
        """Evict; `max_victims` bounds the entries of each component."""
        wanted = [full, swa, recurrent]
        counts = self.core.evict_all_of(*wanted, max_victims=max_victims)
        freed = self.oracle.evict(*wanted, max_victims=max_victims)
        size = self.config.page_size
        for c in self.components:
            victims = freed[c]
            assert counts[c] == len(victims) * (1 if c == RECURRENT else size)
            ring = self.core.ring(c)
            given = ring[len(ring) - len(victims) :]
            assert sorted(given) == sorted(victims)
            if (max_victims or self.config.num_nodes) <= self.config.plan_size:
                continue  # `compare` asks for the order too
            free = self.oracle.pools[c].free
            for _ in victims:
                free.pop()
            free.extend(given)

    def free(self, component: int, ids) -> None:
        self.core.free_of(component, ids)
        self.oracle.free(component, ids)

    def compact_clock(self) -> None:
        self.core.compact_clock()

    def reset(self) -> None:
        self.core.reset()
        old, self.oracle = self.oracle, HybridOracle(settings(self.config))
        # Matches and receipts of before stay what they were: stale.
        for node in old.nodes():
            node.is_alive = False
        self.oracle.next_serial = old.next_serial
        self.oracle.status = old.status
        self.matches = [m for m in self.matches if m[1].path]

    def serve(self, prompt, evicted: int = 0) -> None:
        """A whole request: match, lock, allocate what there is, insert, unlock."""
        self.match(prompt)
        self.lock(-1)
        seen = self.matches[-1][1]
        wanted = len(self._key(prompt).pages) - len(seen.pages)
        mine = {c: [] for c in range(3)}
        mine[FULL] = self.alloc(FULL, wanted, partial=True)
        swa, slot = [], 0
        if SWA in self.components:
            mine[SWA] = self.alloc(SWA, wanted, partial=True)
            first = len(seen.pages) + wanted - len(mine[SWA])
            swa = [0] * first + mine[SWA]  # what there is goes to the end
            evicted = max(evicted, first * self.config.page_size)
        if RECURRENT in self.components:
            mine[RECURRENT] = self.alloc(RECURRENT, 1, partial=True)
            slot = next(iter(mine[RECURRENT]), 0)
        pages = [*seen.pages, *mine[FULL]]
        self.insert(prompt, pages, seen.hit_length, swa, evicted, slot)
        self.unlock(-1)
        for c in self.components:
            self.free(c, [e for e in mine[c] if e in self.core.owned[c]])

    def resume(self, prompt, prev: int = 0, evicted: int = 0) -> None:
        """A running request publishes: it brings the tree's own entries along.

        Its lock is of FULL and the window, tombstones too, and stays.
        """
        self.match(prompt, full_only=True)
        self.lock(-1)
        path, count = self.matches[-1][1].path, len(self._key(prompt).pages)
        mine = {c: [] for c in range(3)}
        for c, wanted in ((FULL, count - len(path)), (SWA, count), (RECURRENT, 1)):
            if c in self.components:
                mine[c] = self.alloc(c, wanted, partial=True)
        swa, slots = iter(mine[SWA]), mine[RECURRENT]
        path = [node for node in path if node.is_alive]
        held = [node.values[SWA] or next(swa, 0) for node in path]
        at_end = path[-1].values[RECURRENT] if path and len(path) == count else None
        pages = [node.values[FULL] for node in path] + mine[FULL]
        slot = at_end or next(iter(slots), 0)
        self.insert(prompt, pages, prev, [*held, *swa], evicted, slot)
        for c in self.components:
            self.free(c, [e for e in mine[c] if e in self.core.owned[c]])
