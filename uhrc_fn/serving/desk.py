"""`Desk`: what the host knows of the requests of one rank.

It takes prompts, hands their rows to the device as arrivals, and gives each request
the tokens that a record brings. It calls no program.
"""

import collections
import dataclasses

import numpy as np

from ..keys import namespace
from ..params import NO_NAMESPACE
from ..pools.layout import require
from .config import ServeConfig
from .requests import MAX_STOP_TOKENS, Arrivals, empty_arrivals
from .step import StepRecord

_ARRIVALS = 8


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


class Desk:
    """The host's side of one rank."""

    def __init__(self, config: ServeConfig, vocab_size: int):
        self.config = config
        self.stats = Stats()
        self._vocab_size = vocab_size
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
        size = self._vocab_size
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

    @property
    def has_arrivals(self) -> bool:
        """Whether a request waits that there is a row for."""
        return bool(self._waiting) and len(self._by_row) < self.config.num_requests

    def arrivals(self) -> Arrivals:
        """Give rows to the next requests; none of them where none is due."""
        free = sorted(set(range(1, self.config.num_requests + 1)) - set(self._by_row))
        arrivals = empty_arrivals(self.config, _ARRIVALS)
        for lane in range(min(_ARRIVALS, len(free), len(self._waiting))):
            request = self._waiting.popleft()
            request.row = free.pop(0)
            self._by_row[request.row] = request
            self.stats.prompt_tokens += request.prompt.size
            _write(arrivals, lane, request)
        return arrivals

    def drop(self, request: Request) -> int:
        """Forget a request; returns the row that it has on the device, 0 for none."""
        if request.is_finished:
            return 0
        request.is_finished = request.is_cancelled = True
        if request in self._waiting:
            self._waiting.remove(request)
            return 0
        del self._by_row[request.row]
        return request.row

    def read(self, record: StepRecord) -> list[tuple[Request, list[int]]]:
        """Take the tokens of some steps: requests that got any, with those."""
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
