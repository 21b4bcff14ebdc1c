"""Feeding engines: requests side by side, one at a time, or two engines in turn."""

import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from ..engine import Engine, Request
from .workload import ANSWER_TOKENS, Turn


@dataclasses.dataclass(frozen=True)
class Served:
    """A request that is done."""

    prompt: np.ndarray
    output: list[int]
    hit_length: int


@dataclasses.dataclass(frozen=True)
class Timed(Served):
    """One that was alone on the engine."""

    ttft_s: float
    """From its submission until the host had its first token."""


def serve_together(
    engine: Engine,
    turns: Iterable[Turn],
    width: int,
    on_step: Callable[[list[Served]], None] = lambda served: None,
) -> list[Served]:
    """Serve requests side by side; each that ends makes room for another.

    Args:
      engine: an idle one.
      turns: requests in order. A conversation's next turn goes before them.
      width: requests at once.
      on_step: told after each call what has ended with it.

    Returns:
      the requests in the order in which they were submitted.
    """
    turns = iter(turns)
    live: dict[int, tuple[Turn, Request]] = {}
    done: dict[int, Served] = {}

    def submit(turn: Turn | None) -> None:
        if turn is not None:
            request = engine.submit(turn.prompt, ANSWER_TOKENS)
            live[request.id] = turn, request

    for _ in range(width):
        submit(next(turns, None))
    while live:
        news = engine.step()
        ended = [request for request, _ in news if request.is_finished]
        for request in ended:
            turn, _ = live.pop(request.id)
            done[request.id] = _served(request)
            submit(turn.after(request.output) or next(turns, None))
        on_step([done[request.id] for request in ended])
    return [done[number] for number in sorted(done)]


def serve_alone(engine: Engine, prompt: np.ndarray) -> Timed:
    """Serve one request on an idle engine, and time its first token."""
    start = time.perf_counter()
    request = engine.submit(prompt, ANSWER_TOKENS)
    while not request.output:
        engine.step()
    ttft_s = time.perf_counter() - start
    engine.run()
    served = _served(request)
    return Timed(served.prompt, served.output, served.hit_length, ttft_s)


def serve_in_turn(
    engines: tuple[Engine, ...], prompts: list[np.ndarray]
) -> list[tuple[list[Served], float]]:
    """Serve the same requests on several engines, which take turns call by call.

    What else the machine does then slows all of them alike.

    Returns:
      for each engine its requests, and the seconds that its own calls took.
    """
    requests = [[e.submit(p, ANSWER_TOKENS) for p in prompts] for e in engines]
    seconds, order = [0.0] * len(engines), list(range(len(engines)))
    while not all(engine.is_idle for engine in engines):
        for i in order:
            if not engines[i].is_idle:
                start = time.perf_counter()
                engines[i].step()
                seconds[i] += time.perf_counter() - start
        order.reverse()
    served = [list(map(_served, side)) for side in requests]
    return list(zip(served, seconds, strict=True))


def _served(request: Request) -> Served:
    return Served(request.prompt, request.output, request.hit_length)
