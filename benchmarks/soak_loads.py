"""The two loads of a soak: an engine that serves, and a tree that is replayed on."""

import dataclasses
import itertools
import time
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
from serving_cases import VOCABULARY, setting_of

import uhrc_fn
from uhrc_fn import jitted
from uhrc_fn.config import CLOCK_LIMIT
from uhrc_fn.params import NO_NAMESPACE
from uhrc_fn.replay.engine import _replay_chunk
from uhrc_fn.replay.request import Requests
from uhrc_fn.serving.demo.audit import leaks
from uhrc_fn.serving.engine import Request
from uhrc_fn.serving.models.config import small_config
from uhrc_fn.status import Status


class ServingLoad:
    """Conversations on a KDA hybrid, more of them than its pools have room for."""

    LANES, LONGEST, ANSWER, TALKS = 4, 256, 24, 12

    def __init__(self, seed: int):
        model = small_config("kda-mla", vocab_size=VOCABULARY)
        # Half of what the lanes would hold at their longest: some must give way.
        setting = setting_of(
            model, lanes=self.LANES, max_length=self.LONGEST, chunk=32, tree_tokens=-512
        )
        self._engine = setting.engine(steps=4)
        self._control = setting.engine(use_cache=False, steps=4)
        self._dice = np.random.default_rng(seed)
        self._talks = [self._new_talk() for _ in range(self.TALKS)]
        self._live: dict[int, int] = {}
        self._to_compare: deque[Request] = deque(maxlen=2)
        self.num_served = self.num_compared = 0
        self.hit_ratio = 0.0

    def warm_up(self) -> None:
        """Compile both steps."""
        for engine in (self._engine, self._control):
            engine.generate([self._talks[0]], 4)

    def run(self, seconds: float) -> int:
        """Serve for so long; returns the tokens of prompts and outputs."""
        stats = dataclasses.replace(self._engine.stats)
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._submit()
            self._step()
        now = self._engine.stats
        prompts = now.prompt_tokens - stats.prompt_tokens
        self.hit_ratio = (now.hit_tokens - stats.hit_tokens) / max(prompts, 1)
        return prompts + now.output_tokens - stats.output_tokens

    def check(self) -> None:
        """Every invariant, no leak, no trouble, and the right tokens.

        Raises:
          AssertionError, RuntimeError: what went wrong.
        """
        self._engine.check()
        state = self._engine.state
        assert state.cache is not None
        uhrc_fn.check_invariants(state.cache, state.tables.owned())
        assert leaks(self._engine) == (0, 0), f"leaked {leaks(self._engine)}"
        while self._to_compare:
            request = self._to_compare.popleft()
            wanted = self._control.generate([request.prompt], self.ANSWER)[0]
            assert request.output == wanted, f"{request.output}; wanted {wanted}"
            self.num_compared += 1

    def drain(self) -> None:
        """Let all end: then nothing is held or locked."""
        while not self._engine.is_idle:
            self._step()
        self.check()
        cache = self._engine.state.cache
        assert cache is not None and not np.asarray(cache.protected).any()

    @property
    def live_nodes(self) -> int:
        """Nodes in the tree."""
        return _live_nodes(self._engine.state.cache)

    @property
    def retractions(self) -> int:
        """Since the start."""
        return self._engine.stats.retractions

    def _new_talk(self) -> np.ndarray:
        system = np.arange(40) * (1 + int(self._dice.integers(3))) % VOCABULARY
        return np.concatenate([system, self._dice.integers(1, VOCABULARY, 20)])

    def _submit(self) -> None:
        """Keep a conversation more in the queue than there are lanes."""
        idle = [i for i in range(self.TALKS) if i not in self._live.values()]
        while len(self._live) <= self.LANES and idle:
            talk = idle.pop(int(self._dice.integers(len(idle))))
            request = self._engine.submit(self._talks[talk], self.ANSWER)
            self._live[request.id] = talk

    def _step(self) -> None:
        for request, _ in self._engine.step():
            if not request.is_finished:
                continue
            talk = self._live.pop(request.id)
            self.num_served += 1
            if self.num_served % 8 == 0:
                self._to_compare.append(request)
            said = self._dice.integers(1, VOCABULARY, 16)
            longer = np.concatenate([request.prompt, request.output, said])
            fits = longer.size + self.ANSWER <= self.LONGEST
            self._talks[talk] = longer if fits else self._new_talk()


class ReplayLoad:
    """Growing conversations, block ids at page 1, on a tree that is always full."""

    PAGES, WIDE, BATCH, TALKS = 4096, 64, 512, 256
    WIDTHS = (16, WIDE)

    def __init__(self, seed: int):
        config = uhrc_fn.CacheConfig(
            num_pages=self.PAGES, max_prefix_pages=self.WIDE, max_live_receipts=1
        )
        self._cache = uhrc_fn.init(config)
        self._dice = np.random.default_rng(seed)
        # The conversation that each place holds now, and its blocks so far.
        self._talk = np.arange(self.TALKS)
        self._length = np.zeros(self.TALKS, np.int32)
        self._next = itertools.count(self.TALKS)
        self.num_replayed = 0

    def warm_up(self) -> None:
        """Compile, and fill the tree."""
        while self.num_replayed < 4 * self.PAGES:
            self._chunk()

    def run(self, seconds: float) -> int:
        """Replay for so long; returns the requests."""
        before, started = self.num_replayed, time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._chunk()
        return self.num_replayed - before

    def check(self) -> None:
        """Every invariant; no trouble but a full bucket, which a replay may meet."""
        status = Status(int(self._cache.status)) & ~Status.TABLE_FULL
        assert not status, f"status {status!r}"
        uhrc_fn.check_invariants(self._cache)

    @property
    def live_nodes(self) -> int:
        """Nodes in the tree."""
        return _live_nodes(self._cache)

    def _chunk(self) -> None:
        if int(self._cache.clock) + self.BATCH * 4 * (self.WIDE + 1) >= CLOCK_LIMIT:
            self._cache = jitted.compact_clock(self._cache)
        tokens, requests = self._requests()
        self._cache, _ = _replay_chunk(
            self._cache, tokens, requests, widths=self.WIDTHS
        )
        self.num_replayed += self.BATCH
        jax.block_until_ready(self._cache)

    def _requests(self):
        """The next requests; popular places come often, and talks end at `WIDE`."""
        size = self.BATCH * self.WIDE
        tokens = np.zeros(size + self.WIDE, np.int32)
        start = np.arange(self.BATCH, dtype=np.int32) * self.WIDE
        lengths = np.zeros(self.BATCH, np.int32)
        popular = (self._dice.random(self.BATCH) ** 2 * self.TALKS).astype(int)
        grows = self._dice.integers(1, 9, self.BATCH)
        for row, (place, more) in enumerate(zip(popular, grows, strict=True)):
            if self._length[place] + more > self.WIDE:
                self._talk[place], self._length[place] = next(self._next), 0
            self._length[place] += more
            lengths[row] = self._length[place]
            # Ids may come round after 2^24 talks, when the first are long gone.
            first = self._talk[place] % 2**24 * self.WIDE
            ids = first + np.arange(lengths[row])
            tokens[start[row] : start[row] + lengths[row]] = ids
        names = np.broadcast_to(NO_NAMESPACE, (self.BATCH, 4))
        return jnp.asarray(tokens), Requests(start, lengths, names, lengths)


def _live_nodes(cache) -> int:
    return int((cache.evictable + cache.protected)[0])
