"""Batched operations of the core against the oracle's, one request after another."""

from harness import row, stack
from twin_hybrid import HybridTwin


class HybridBatchTwin(HybridTwin):
    """A batch is `which` of several matches or receipts, or several prompts."""

    def peek_batch(self, prompts) -> None:
        results = self.core.peek_batch(_named(prompts))
        for i, prompt in enumerate(prompts):
            self._same_match(row(results, i), self.oracle.peek(self._key(prompt)))

    def match_batch(self, prompts) -> None:
        results = self.core.match_batch(_named(prompts))
        for i, prompt in enumerate(prompts):
            seen = self.oracle.match(self._key(prompt))
            self._same_match(row(results, i), seen)
            self.matches.append((row(results, i), seen))

    def lock_batch(self, which) -> None:
        chosen = [self.matches[i % len(self.matches)] for i in which]
        receipts = self.core.lock_batch(stack([result for result, _ in chosen]))
        for i, (_, seen) in enumerate(chosen):
            self._same_lock(row(receipts, i), seen)

    def unlock_batch(self, which) -> None:
        chosen = [self.receipts[i % len(self.receipts)] for i in which]
        results = self.core.unlock_batch(stack([receipt for receipt, _ in chosen]))
        for i, (_, seen) in enumerate(chosen):
            self._same_unlock(row(results, i), seen)

    def release_window_batch(self, which) -> None:
        chosen = [self.receipts[i % len(self.receipts)] for i in which]
        receipts = stack([receipt for receipt, _ in chosen])
        new = self.core.release_window_batch(receipts)
        for i, (_, seen) in enumerate(chosen):
            self._same_release(row(new, i), seen)

    def insert_batch(self, offers) -> None:
        """Insert a batch; an offer is the arguments of `insert`."""
        entries = [self._fit(*offer) for offer in offers]
        requests = [
            ((prompt[0], *fitted.values()), {"extra_key": prompt[1]})
            for (prompt, *_), fitted in zip(offers, entries, strict=True)
        ]
        results = self.core.insert_many(requests)
        for i, (prompt, *_) in enumerate(offers):
            self._same_insert(row(results, i), prompt, entries[i])


def _named(prompts):
    return [(tokens, {"extra_key": name}) for tokens, name in prompts]
