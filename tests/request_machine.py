"""A random machine over request tables: whatever happens, nothing is lost.

Run it long, at low priority, one component set and page size after another:

    JAX_PLATFORMS=cpu python tests/request_machine.py --steps 200000
"""

import argparse
import collections
import functools
import time
from unittest import mock

import jax
import numpy as np
from request_harness import FULL, RECURRENT, SWA, Request, RequestHarness

from uhrc_fn import CacheConfig, ComponentType
from uhrc_fn.debug import tree_invariants
from uhrc_fn.ops.hashing import chain_hashes

_MOST_PAGES = 6
_COMMON = {"num_pages": 14, "max_prefix_pages": _MOST_PAGES, "victim_plan_size": 8}
_NUM_REQUESTS = 4


def config_of(component: ComponentType, page_size: int) -> CacheConfig:
    """A cache too small for what runs, of FULL and perhaps another component."""
    more = {}
    if component == SWA:
        window = {1: 2, 4: 6, 128: 200}[page_size]
        more = {"num_swa_pages": 9, "sliding_window_size": window}
    if component == RECURRENT:
        # A request takes 1, with the extra buffer 3: then there may be none to publish
        # against (12 for four requests), or to come in (11).
        more = {
            "num_recurrent_slots": {1: 6, 4: 12, 128: 11}[page_size],
            "enable_recurrent_extra_buffer": page_size > 1,
            "recurrent_track_interval": {1: 1, 4: 8, 128: 128}[page_size],
        }
    return CacheConfig(
        components=sorted({FULL, component}),
        page_size=page_size,
        max_live_receipts=_NUM_REQUESTS,
        **_COMMON,
        **more,
    )


def requests_of(component: ComponentType, page_size: int) -> RequestHarness:
    """Request tables over such a cache, of 14 pages."""
    return RequestHarness(config_of(component, page_size))


CASES = [(c, size) for c in (FULL, SWA, RECURRENT) for size in (1, 4, 128)]


class RequestMachine:
    """Takes random steps; the harness checks after each of them."""

    def __init__(self, config: CacheConfig, seed: int):
        self.random = np.random.default_rng(seed)
        self.harness = RequestHarness(config, _NUM_REQUESTS)
        self.size = config.page_size
        self.retracted: list[Request] = []
        self.done = collections.Counter()

    def step(self) -> None:
        """One move, counted by name and by what came of it."""
        live = list(self.harness.live.values())
        has_row = len(live) < _NUM_REQUESTS
        # Weights: mostly work, sometimes an end, seldom an eviction from outside.
        moves = {
            "admit": 1.5 * has_row,
            "twin": 0.7 * (has_row and bool(live)),
            "readmit": 1.5 * (has_row and bool(self.retracted)),
            "work": 4 * len(live),
            "finish": 0.4 * len(live),
            "abort": 0.1 * len(live),
            "retract": 0.15 * len(live),
            "evict": 0.5,
        }
        weights = np.array(list(moves.values()), float)
        name = list(moves)[self.random.choice(len(moves), p=weights / weights.sum())]
        request = live[self.random.integers(len(live))] if live else None
        outcome = getattr(self, f"_{name}")(request)
        self.done[f"{name} {outcome}" if outcome else name] += 1

    @property
    def steps(self) -> int:
        return sum(self.done.values())

    def _admit(self, _) -> str:
        pages = self.random.integers(1, _MOST_PAGES + 1)
        tokens = self._tokens(pages)
        length = len(tokens) - self.random.integers(self.size)
        return self._enter(tokens[:length], self.random.integers(1, length + 1))

    def _tokens(self, pages: int):
        """Pages of few kinds, so that prompts share pages and part inside them."""
        kind = 1 + (self.random.random((2, pages)) < 0.2).astype(np.int32)
        tokens = np.repeat(kind[0], self.size)
        tokens[self.size - 1 :: self.size] = kind[1]
        return tokens

    def _twin(self, request: Request) -> str:
        """The same prompt as one that runs: whoever ends second is a duplicate."""
        return self._enter(request.tokens, request.prompt)

    def _readmit(self, _) -> str:
        request = self.retracted.pop()
        return self._enter(request.tokens, request.prompt)

    def _enter(self, tokens, prompt: int) -> str:
        request = self.harness.admit(tokens, int(prompt))
        if request is None:
            return "refused"
        return "hit" if request.hit else "missed"

    def _work(self, request: Request) -> str:
        """The next chunk or decode step; published after a chunk, or now and then."""
        is_prefill = request.written < request.prompt
        if is_prefill:
            budget = self.size * int(self.random.integers(1, 4))
            count = self.harness.chunk(request, budget)
        elif request.written == len(request.tokens):
            self.harness.finish(request)
            return "finish"
        else:
            count = self._decoded(request)
        if not self.harness.extend(request, count):
            return "starved"
        if is_prefill or self.random.random() < 0.1:
            self._publish(request)
        if self.harness.config.has_swa and self.random.random() < 0.5:
            self._let_go(request)
        return "chunk" if is_prefill else "decode"

    def _publish(self, request: Request) -> None:
        before = request.snapshot
        self.harness.publish(request)
        is_kept = before and request.snapshot
        self.done["publish skipped" if is_kept else "publish"] += 1

    def _let_go(self, request: Request) -> None:
        """Of own pages before the window, and of the tree's where it moved past."""
        window = self.harness.config.sliding_window_size
        is_past = request.written >= request.shared + window
        if is_past and request.has_window:
            self.harness.release_window(request)
            self.done["release window"] += 1
        self.harness.slide(request)
        self.done["slide"] += 1

    def _decoded(self, request: Request) -> int:
        """One token; of a large page all up to one before its end or past it."""
        left = self.size - request.written % self.size
        jump = left - 1 if left > 2 and self.size > 4 else 1
        return min(jump, len(request.tokens) - request.written)

    def _finish(self, request: Request) -> None:
        self.harness.finish(request)

    def _abort(self, request: Request) -> None:
        self.harness.abort(request)

    def _retract(self, request: Request) -> None:
        """It comes back later with all its tokens as its prompt."""
        self.harness.abort(request)
        request.prompt = max(request.prompt, request.written)
        self.retracted = [*self.retracted[-3:], request]

    def _evict(self, _) -> str:
        component = self.random.choice(self.harness.config.components)
        count = [0, 0, 0]
        count[component] = int(self.random.integers(1, 4))
        self.harness.evict(*count)
        return ComponentType(component).name


def run(component: ComponentType, page_size: int, steps: int, seed: int):
    """Run a fresh machine for so many steps; returns what it did."""
    machine = RequestMachine(config_of(component, page_size), seed)
    with mock.patch.object(tree_invariants, "chain_hashes", _hashes_of_one_shape):
        while machine.steps < steps:
            machine.step()
    return machine.done


def _hashes_of_one_shape(keys, namespace, config):
    """`chain_hashes` as one program, where the checks would compile many small ones."""
    lanes, pages = keys.shape[:2]
    padding = [(0, 16 - lanes), (0, 8 - pages), (0, 0)]
    hashes = _hashes(np.pad(keys, padding), np.pad(namespace, padding[::2]), config)
    return [np.asarray(h)[:lanes, :pages] for h in hashes]


_hashes = functools.partial(jax.jit, static_argnums=2)(chain_hashes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    total, began = 0, time.perf_counter()
    for component, page_size in CASES:
        steps = -(-args.steps // len(CASES))
        done = run(component, page_size, steps, args.seed)
        total += sum(done.values())
        seconds = time.perf_counter() - began
        rate = f"{total} steps in {seconds:.0f} s"
        print(f"{component.name} page {page_size}: {dict(done)}; {rate}", flush=True)


if __name__ == "__main__":
    main()
