"""`Engine`: the thin host side of a serving loop.

It hands over arrivals, calls a number of steps, reads one record and gives each
request its tokens. All decisions are made on the device.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..jitted import compact_clock
from ..keys import namespace
from ..params import NO_NAMESPACE
from ..pools.layout import require
from ..status import raise_if_bad
from .config import ServeConfig
from .lanes import Pools
from .memory import give_back
from .requests import MAX_STOP_TOKENS, Arrivals, Phase, empty_arrivals, enqueue
from .state import ServeState, init_serving
from .step import StepRecord, serve_steps

_ARRIVALS = 8
_COMPACT_AT = 1 << 29


@dataclasses.dataclass
class Request:
    """What the host knows of a request."""

    id: int
    prompt: np.ndarray
    limit: int
    namespace: np.ndarray
    temperature: float
    seed: int
    stop_tokens: tuple[int, ...]
    row: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    hit_length: int = 0
    """Prompt tokens that were not computed."""
    first_step: int | None = None
    """Step that gave its first token."""
    is_finished: bool = False
    is_cancelled: bool = False


@dataclasses.dataclass
class Stats:
    """Sums over an engine's life; tokens but for the first three."""

    steps: int = 0
    finished: int = 0
    retractions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were not computed."""
        return self.hit_tokens / max(self.prompt_tokens, 1)


class Engine:
    """Serves one model; one at a time may use it."""

    def __init__(
        self,
        model,
        config: ServeConfig,
        pools: Pools,
        *,
        steps_per_call: int = 1,
        compiler_options: dict | None = None,
    ):
        """Take a model, and pools of `config.pool_pages`, which it donates.

        Args:
          model: of `init_model`.
          config: settings of the step.
          pools: of `init_pools`.
          steps_per_call: steps that run without the host in between.
          compiler_options: for XLA, as `jax.jit` takes them.

        Raises:
          ValueError: `steps_per_call` is not positive.
        """
        require(
            steps_per_call >= 1,
            f"steps_per_call={steps_per_call}",
            "at least 1",
            "More of them save calls, and let the host see tokens later.",
        )
        self.config = config
        self.model = model
        self.state = init_serving(config, pools)
        self.stats = Stats()
        self.steps_per_call = steps_per_call
        self._programs = _programs(tuple(sorted((compiler_options or {}).items())))
        self._waiting: collections.deque[Request] = collections.deque()
        self._by_row: dict[int, Request] = {}
        self._next_id = 0

    def submit(
        self,
        prompt,
        max_tokens: int,
        *,
        extra_key=None,
        cache_salt=None,
        temperature: float = 0.0,
        seed: int = 0,
        stop_tokens: tuple[int, ...] = (),
    ) -> Request:
        """Hand over a request; it starts with one of the next steps.

        Args:
          prompt: token ids, at least one.
          max_tokens: tokens to generate at most.
          extra_key: keeps its prefixes apart, see `namespace`.
          cache_salt: likewise.
          temperature: 0 is greedy.
          seed: of the draws; equal requests with equal seeds give equal tokens.
          stop_tokens: tokens that end it, at most 4; they are part of the output.

        Returns:
          the request, whose `output` grows.

        Raises:
          ValueError: it does not fit, or is no prompt.
        """
        ids = np.asarray(prompt)
        size = self.model.config.vocab_size
        require(
            ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer),
            f"prompt is {ids.dtype}{list(ids.shape)}",
            "a flat sequence of at least one token id",
            "Pass one prompt at a time.",
        )
        require(
            bool((ids >= 0).all() and (ids < size).all()),
            f"prompt has ids from {ids.min()} to {ids.max()}",
            f"ids in [0, {size})",
            "Check the tokenizer's output.",
        )
        require(
            max_tokens >= 1 and ids.size + max_tokens <= self.config.max_length,
            f"{ids.size} prompt tokens and max_tokens={max_tokens}",
            f"at least 1, and {self.config.max_length} together",
            "Cut the prompt, or raise ServeConfig.max_length.",
        )
        require(
            len(stop_tokens) <= MAX_STOP_TOKENS,
            f"{len(stop_tokens)} stop_tokens",
            f"at most {MAX_STOP_TOKENS}",
            "Check longer sequences on the host and `cancel`.",
        )
        apart = NO_NAMESPACE
        if extra_key is not None or cache_salt is not None:
            apart = namespace(extra_key, cache_salt)
        request = Request(
            id=self._next_id,
            prompt=ids.astype(np.int32),
            limit=ids.size + max_tokens,
            namespace=apart,
            temperature=temperature,
            seed=seed,
            stop_tokens=tuple(stop_tokens),
        )
        self._next_id += 1
        self._waiting.append(request)
        return request

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self._waiting and not self._by_row

    def step(self) -> list[tuple[Request, list[int]]]:
        """Run `steps_per_call` steps.

        Returns:
          the requests that got tokens, with those tokens.
        """
        self._hand_over()
        self.state, record = self._programs.steps(
            self.model, self.state, self.steps_per_call
        )
        record = jax.device_get(record)
        news = self._read(record)
        cache = self.state.cache
        if cache is not None and record.clock[-1] > _COMPACT_AT:
            self.state = dataclasses.replace(self.state, cache=compact_clock(cache))
        return news

    def run(self) -> None:
        """Step until nobody waits or runs."""
        while not self.is_idle:
            self.step()

    def generate(self, prompts, max_tokens: int, **options) -> list[list[int]]:
        """Serve prompts together and return their outputs; options as of `submit`."""
        requests = [self.submit(prompt, max_tokens, **options) for prompt in prompts]
        self.run()
        return [request.output for request in requests]

    def stream(self, prompt, max_tokens: int, **options) -> Iterator[int]:
        """Yield a request's tokens as they come; options as of `submit`."""
        request = self.submit(prompt, max_tokens, **options)
        given = 0
        while not request.is_finished:
            self.step()
            yield from request.output[given:]
            given = len(request.output)

    def cancel(self, request: Request) -> None:
        """Drop a request; what it has published stays, everything else is free."""
        if request.is_finished:
            return
        request.is_finished = request.is_cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
            return
        del self._by_row[request.row]
        self.state = self._programs.cancel(self.state, np.int32(request.row))

    def check(self) -> None:
        """Raise if the cache met trouble that it could not mend; see `Status`."""
        if self.state.cache is not None:
            raise_if_bad(self.state.cache)

    def _hand_over(self) -> None:
        free = sorted(set(range(1, self.config.num_requests + 1)) - set(self._by_row))
        while self._waiting and free:
            arrivals = empty_arrivals(self.config, _ARRIVALS)
            for lane in range(min(_ARRIVALS, len(free), len(self._waiting))):
                request = self._waiting.popleft()
                request.row = free.pop(0)
                self._by_row[request.row] = request
                self.stats.prompt_tokens += request.prompt.size
                _write(arrivals, lane, request)
            self.state = self._programs.enqueue(self.state, arrivals)

    def _read(self, record: StepRecord) -> list[tuple[Request, list[int]]]:
        news: dict[int, tuple[Request, list[int]]] = {}
        for step in range(record.token.shape[0]):
            self.stats.steps += 1
            for row in np.flatnonzero(record.token[step] >= 0):
                request = self._by_row[int(row)]
                token = int(record.token[step, row])
                if request.first_step is None:
                    request.first_step = self.stats.steps
                    request.hit_length = int(record.hit_length[step, row])
                    self.stats.hit_tokens += request.hit_length
                request.output.append(token)
                news.setdefault(request.id, (request, []))[1].append(token)
                self.stats.output_tokens += 1
            for row in np.flatnonzero(record.is_finished[step]):
                self._by_row.pop(int(row)).is_finished = True
                self.stats.finished += 1
        self.stats.prefilled_tokens += int(record.num_prefilled.sum())
        self.stats.retractions = int(record.num_retracted[-1])
        return list(news.values())


def _write(arrivals: Arrivals, lane: int, request: Request) -> None:
    size = request.prompt.size
    arrivals.row[lane] = request.row
    arrivals.arrival[lane] = request.id
    arrivals.token_ids[lane, :size] = request.prompt
    arrivals.length[lane] = size
    arrivals.limit[lane] = request.limit
    arrivals.stop_tokens[lane, : len(request.stop_tokens)] = request.stop_tokens
    arrivals.temperature[lane] = request.temperature
    arrivals.seed[lane] = request.seed
    arrivals.namespace[lane] = request.namespace


class _Programs(NamedTuple):
    """What an engine calls, jitted, the state donated."""

    steps: Callable
    enqueue: Callable
    cancel: Callable


@functools.cache
def _programs(options: tuple) -> _Programs:
    """Jitted once for all engines, so that those of equal shapes share programs."""
    jit = functools.partial(jax.jit, compiler_options=dict(options))
    return _Programs(
        steps=jit(serve_steps, static_argnums=2, donate_argnums=1),
        enqueue=jit(_enqueue, donate_argnums=0),
        cancel=jit(_cancel, donate_argnums=0),
    )


def _enqueue(state: ServeState, arrivals: Arrivals) -> ServeState:
    requests = enqueue(state.requests, arrivals)
    return dataclasses.replace(state, requests=requests)


def _cancel(state: ServeState, row) -> ServeState:
    if state.config.use_cache:
        runs = state.requests.phase[row] == int(Phase.RUNNING)
        state = give_back(state, jnp.where(runs, row, 0), Phase.IDLE)
    requests = state.requests.put(row, phase=int(Phase.IDLE))
    return dataclasses.replace(state, requests=requests)
