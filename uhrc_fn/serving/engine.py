"""`Engine`: the thin host side of a serving loop.

It hands over arrivals, calls a number of steps, reads one record and gives each
request its tokens. All decisions are made on the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..jitted import compact_clock
from ..pools.layout import require
from ..status import raise_if_bad
from .config import ServeConfig
from .desk import Desk, Request
from .lanes import Pools
from .memory import give_back
from .requests import Arrivals, Phase, enqueue
from .state import ServeState, init_serving
from .step import serve_steps

COMPACT_AT = 1 << 29


class Engine(Desk):
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
        require_steps(steps_per_call)
        super().__init__(config, model.config.vocab_size)
        self.model = model
        self.state = init_serving(config, pools)
        self.steps_per_call = steps_per_call
        self._programs = _programs(tuple(sorted((compiler_options or {}).items())))

    def step(self) -> list[tuple[Request, list[int]]]:
        """Run `steps_per_call` steps.

        Returns:
          the requests that got tokens, with those tokens.
        """
        while self.has_arrivals:
            self.state = self._programs.enqueue(self.state, self.arrivals())
        self.state, record = self._programs.steps(
            self.model, self.state, self.steps_per_call
        )
        record = jax.device_get(record)
        news = self.read(record)
        cache = self.state.cache
        if cache is not None and record.clock[-1] > COMPACT_AT:
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
        row = self.drop(request)
        if row:
            self.state = self._programs.cancel(self.state, np.int32(row))

    def check(self) -> None:
        """Raise if the cache met trouble that it could not mend; see `Status`."""
        if self.state.cache is not None:
            raise_if_bad(self.state.cache)


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
        enqueue=jit(take_arrivals, donate_argnums=0),
        cancel=jit(cancel_row, donate_argnums=0),
    )


def take_arrivals(state: ServeState, arrivals: Arrivals) -> ServeState:
    """Let new requests wait in the rows that the host chose."""
    requests = enqueue(state.requests, arrivals)
    return dataclasses.replace(state, requests=requests)


def cancel_row(state: ServeState, row) -> ServeState:
    """Empty a row, and give back what it holds; row 0 is nobody's."""
    if state.config.use_cache:
        runs = state.requests.phase[row] == int(Phase.RUNNING)
        state = give_back(state, jnp.where(runs, row, 0), Phase.IDLE)
    requests = state.requests.put(row, phase=int(Phase.IDLE))
    return dataclasses.replace(state, requests=requests)


def require_steps(steps_per_call: int) -> None:
    """Refuse a call of no steps, with a sentence."""
    require(
        steps_per_call >= 1,
        f"steps_per_call={steps_per_call}",
        "at least 1",
        "More of them save calls, and let the host see tokens later.",
    )
