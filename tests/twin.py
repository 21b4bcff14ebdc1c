"""The jitted core and the plain-Python oracle, side by side.

Every method runs one operation on both and compares what they report; `compare` then
holds the two states against each other, page by page.
"""

import numpy as np
from harness import EVERYTHING, Harness, node_keys, pad, ring_ids, row, stack
from oracle import Oracle

from uhrc_fn import CacheConfig, namespace
from uhrc_fn.state import Ring
from uhrc_fn.tree_arrays import NULL

NAMES = (None, "x")
"""The namespaces in use, as `extra_key`."""

_DIGESTS = {tuple(namespace(name).tolist()): name for name in NAMES}


class Twin:
    """A cache and its oracle, with the matches and receipts that both gave out."""

    def __init__(self, config: CacheConfig):
        self.config = config
        self.core = Harness(config, is_checked=False)
        self.oracle = self._new_oracle()
        self.oracle.clock = 1
        self.matches: list[tuple] = []
        self.receipts: list[tuple] = []

    def _new_oracle(self) -> Oracle:
        return Oracle(
            self.config.page_size,
            self.config.num_pages,
            self.config.max_prefix_pages,
            self.config.max_live_receipts,
        )

    @property
    def bound(self) -> int:
        return self.config.max_prefix_pages

    def _key(self, prompt):
        tokens, name = prompt
        return self.oracle.key(tokens, name)

    # What both must agree on.

    def compare(self, is_thorough: bool = True) -> None:
        """Compare the two states; where thorough, check every invariant too."""
        core, seen = self.core, self.oracle.snapshot()
        names = {bit.name for bit in core.take_status()}
        assert names == self.oracle.take_status()
        host = core.snapshot()
        size = self.config.page_size
        assert ring_ids(host, Ring.FULL) == seen["free"]
        assert host.evictable[0] * size == seen["evictable"]
        assert host.protected[0] * size == seen["protected"]
        value, locks = host.tree.value[0], host.tree.lock_ref[0]
        rows = [
            (
                _DIGESTS[key[0]],
                tuple(t for page in key[1:] for t in page),
                int(value[node]),
                int(locks[node]),
            )
            for node, key in node_keys(host).items()
        ]
        assert sorted(rows, key=lambda r: (repr(r[0]), r[1])) == seen["pages"]
        stamps = host.tree.last_access[0]
        unlocked = np.flatnonzero((value != NULL) & (locks == 0))
        order = value[unlocked[np.argsort(stamps[unlocked])]].tolist()
        assert order == self.oracle.victim_order()
        if is_thorough:
            core.check_now()

    # One request.

    def peek(self, prompt) -> None:
        tokens, name = prompt
        result = self.core.peek(tokens, extra_key=name)
        self._same_match(result, self.oracle.peek(self._key(prompt)))

    def match(self, prompt) -> None:
        tokens, name = prompt
        result = self.core.match(tokens, extra_key=name)
        seen = self.oracle.match(self._key(prompt), self.bound)
        self._same_match(result, seen)
        self.matches.append((result, seen))

    def _same_match(self, result, seen) -> None:
        assert int(result.hit_length) == seen.hit_length
        assert int(result.full_kv_hit_length) == seen.hit_length
        assert result.device_indices.tolist() == pad(seen.pages, self.bound).tolist()

    def lock(self, which: int) -> None:
        """Lock one of the matches, possibly long stale."""
        result, seen = self.matches[which % len(self.matches)]
        self.receipts.append(self._lock(self.core.lock, result, seen))

    def _lock(self, lock, result, seen):
        before = self.oracle.protected
        receipt, wanted = lock(result), self.oracle.lock(seen)
        self._same_receipt(receipt, wanted, before - self.oracle.protected)
        return receipt, wanted

    def _same_receipt(self, receipt, wanted, delta) -> None:
        assert int(receipt.serial) == (wanted.serial if wanted else 0)
        assert int(receipt.delta) == delta

    def unlock(self, which: int) -> None:
        """Give one of the receipts back, possibly again."""
        receipt, seen = self.receipts[which % len(self.receipts)]
        before = self.oracle.protected
        result = self.core.unlock(receipt)
        assert bool(result.is_released) == self.oracle.unlock(seen)
        assert int(result.delta) == before - self.oracle.protected

    def alloc(self, count: int, partial: bool = False) -> list[int]:
        result = self.core.alloc(count, partial)
        return self._alloc_one(result, count, partial)

    def _alloc_one(self, result, count: int, partial: bool) -> list[int]:
        if count > self.bound:  # the static length of the result
            self.oracle.status.add("BAD_LENGTH")
        pages = self.oracle.alloc(min(count, self.bound), partial)
        assert result.ids.tolist() == pad(pages, self.bound).tolist()
        assert int(result.count) == len(pages)
        assert bool(result.ok) == (len(pages) == min(max(count, 0), self.bound))
        return pages

    def insert(self, prompt, pages, prev: int = 0):
        tokens, name = prompt
        result = self.core.insert(tokens, pages, prev, extra_key=name)
        self._same_insert(result, prompt, pages, prev)
        return result

    def _same_insert(self, result, prompt, pages, prev) -> None:
        key = self._key(prompt)
        pages = [int(p) for p in pages[: len(key)]]
        pages += [0] * (len(key) - len(pages))
        seen = self.oracle.insert(key, pages, prev, self.bound)
        assert int(result.prefix_len) == seen.prefix_len
        assert int(result.inserted_len) == seen.inserted_len
        table = result.page_table[: len(key)].tolist()
        assert table == seen.page_table
        mine = np.asarray(pages, np.int32)
        assert mine[result.adopted()[: len(key), 0]].tolist() == seen.adopted
        duplicates = [page for page in seen.duplicates if page > 0]
        assert mine[result.duplicate()[: len(key), 0]].tolist() == duplicates
        assert not result.page_flags[len(key) :].any()

    def evict(self, num_tokens=EVERYTHING, max_victims: int | None = None) -> None:
        """Evict; `max_victims` bounds the pages."""
        freed = self.core.evict(num_tokens, max_victims)
        if max_victims is not None:
            num_tokens = min(num_tokens, max_victims * self.config.page_size)
        victims = self.oracle.evict(int(num_tokens))
        assert freed == len(victims) * self.config.page_size
        given = self.core.free[len(self.core.free) - len(victims) :]
        if (max_victims or self.config.num_nodes) <= self.config.plan_size:
            assert given == victims
        else:  # the same pages, in an order that follows the nodes
            assert sorted(given) == sorted(victims)
            for _ in victims:
                self.oracle.pool.free.pop()
            self.oracle.pool.free.extend(given)

    def free_pages(self, ids) -> None:
        self.core.free_pages(ids)
        self.oracle.free(ids)

    def compact_clock(self) -> None:
        self.core.compact_clock()

    def reset(self) -> None:
        self.core.reset()
        old, self.oracle = self.oracle, self._new_oracle()
        # Matches and receipts of before stay what they were: stale.
        self.oracle.clock = old.clock
        self.oracle._next_serial = old._next_serial
        self.oracle.status = old.status
        self.matches = [m for m in self.matches if m[1].pages]

    def serve(self, prompt) -> None:
        """A whole request: match, lock, allocate what there is, insert, unlock."""
        self.match(prompt)
        self.lock(-1)
        hit = self.matches[-1][1].pages
        pages = self.alloc(len(self._key(prompt)) - len(hit), partial=True)
        prev = len(hit) * self.config.page_size
        self.insert(prompt, [*hit, *pages], prev)
        self.unlock(-1)
        self.free_pages([p for p in pages if p in self.core.held])

    # Batches: the same requests, one after another, on the oracle's side.

    def peek_batch(self, prompts) -> None:
        results = self.core.peek_batch(self._named(prompts))
        for i, prompt in enumerate(prompts):
            self._same_match(row(results, i), self.oracle.peek(self._key(prompt)))

    def match_batch(self, prompts) -> None:
        results = self.core.match_batch(self._named(prompts))
        for i, prompt in enumerate(prompts):
            seen = self.oracle.match(self._key(prompt), self.bound)
            self._same_match(row(results, i), seen)
            self.matches.append((row(results, i), seen))

    def _named(self, prompts):
        return [(tokens, {"extra_key": name}) for tokens, name in prompts]

    def lock_batch(self, which) -> None:
        chosen = [self.matches[i % len(self.matches)] for i in which]
        receipts = self.core.lock_batch(stack([result for result, _ in chosen]))
        for i, (_, seen) in enumerate(chosen):
            pair = self._lock(lambda _, i=i: row(receipts, i), None, seen)
            self.receipts.append(pair)

    def unlock_batch(self, which) -> None:
        chosen = [self.receipts[i % len(self.receipts)] for i in which]
        results = self.core.unlock_batch(stack([receipt for receipt, _ in chosen]))
        for i, (_, seen) in enumerate(chosen):
            before = self.oracle.protected
            result = row(results, i)
            assert bool(result.is_released) == self.oracle.unlock(seen)
            assert int(result.delta) == before - self.oracle.protected

    def alloc_batch(self, counts, partial: bool = False) -> None:
        results = self.core.alloc_batch(counts, partial)
        for i, count in enumerate(counts):
            self._alloc_one(row(results, i), count, partial)

    def insert_batch(self, prompts, tables, prevs) -> None:
        results = self.core.insert_batch(self._named(prompts), tables, prevs)
        for i, request in enumerate(zip(prompts, tables, prevs, strict=True)):
            self._same_insert(row(results, i), *request)
