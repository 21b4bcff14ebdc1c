"""What hits while requests come one at a time: what a replay of the same keys finds."""

import numpy as np
import pytest
from serving_harness import CHUNK, VOCABULARY, check_idle, make_engine

PAGE = 16


class Replay:
    """Which prefixes the tree holds, as sets of token tuples; nothing is evicted."""

    def __init__(self, is_recurrent: bool):
        self.pages, self.snapshots = {()}, {()}
        self.is_recurrent = is_recurrent

    def hit(self, prompt) -> int:
        """Tokens that a new request need not compute; one is left at least."""
        run = 0
        while run + PAGE < len(prompt) and tuple(prompt[: run + PAGE]) in self.pages:
            run += PAGE
        if not self.is_recurrent:
            return run
        return max(n for n in range(run + 1) if tuple(prompt[:n]) in self.snapshots)

    def serve(self, prompt, output) -> None:
        """Publish prompt and output but for the last token."""
        known = [*prompt, *output][:-1]
        start = self.hit(prompt)
        end = len(known) // PAGE * PAGE
        if self.is_recurrent:
            # Each boundary of the prefill is published; of decode the last one is.
            boundaries = [n for n in range(CHUNK, len(known) + 1, CHUNK) if n > start]
            prefill = [n for n in boundaries if n <= len(prompt)]
            kept = prefill + boundaries[len(prefill) :][-1:]
            self.snapshots |= {tuple(known[:n]) for n in kept}
            end = max(kept, default=0)
        self.pages |= {tuple(known[:n]) for n in range(PAGE, end + 1, PAGE)}


@pytest.mark.parametrize("family", ["gqa", "kda-mla"])
def test_one_at_a_time_hits_equal_a_replay_of_the_same_keys(family):
    """Conversations in turns: each prompt is the last one, its answer and more."""
    random = np.random.default_rng(11)
    engine = make_engine(family)
    replay = Replay(is_recurrent=family != "gqa")
    system = random.integers(1, VOCABULARY, 37).tolist()
    talks = [system + random.integers(1, VOCABULARY, 5).tolist() for _ in range(3)]
    hits, expected = [], []
    for _ in range(3):
        for talk in talks:
            request = engine.submit(talk, 7)
            engine.run()
            hits.append(request.hit_length)
            expected.append(replay.hit(talk))
            replay.serve(talk, request.output)
            talk += request.output + random.integers(1, VOCABULARY, 12).tolist()
    check_idle(engine)
    assert hits == expected
    assert sum(hits) > 0 and len(set(hits)) > 2
