"""The comparison: the same requests, with the cache and without it.

"Without" is a step of its own, compiled without any operation of the cache. Both sides
are compiled and warm before a clock starts.
"""

import time
from collections.abc import Callable

import numpy as np

from ...config import ComponentType
from ...jitted import peek_prefix_len
from ...keys import radix_key
from ..engine import Engine
from .audit import leaks
from .driving import Served, serve_alone, serve_in_turn, serve_together
from .figures import Figures
from .setting import Setting
from .table import Board
from .workload import ANSWER_TOKENS, Turn, unshared_prompts

_UNSHARED_ROUNDS = 7
_UNSHARED_PROMPTS = 1


def compare(
    setting: Setting, turns: list[Turn], family: str, board: Board
) -> tuple[Figures, Engine]:
    """Run everything.

    Args:
      setting: of the engines.
      turns: first turns of conversations, or requests.
      family: what the figures call the model.
      board: shows how it goes.

    Returns:
      the figures, and the engine that held the conversations.
    """
    figures = Figures(family, sum(turn.num_requests for turn in turns))
    board.figures = figures
    warm_up(setting, board)
    engine, records = converse(setting, turns, figures, board)
    engines = [
        engine,
        one_at_a_time(setting, records, figures, board),
        without_sharing(setting, records, figures, board),
    ]
    for each in engines:
        each.check()
        pages, slots = leaks(each)
        figures.leaked_pages += pages
        figures.leaked_slots += slots
        figures.retractions += each.stats.retractions
    return figures, engine


def warm_up(setting: Setting, board: Board) -> None:
    """Compile both steps, and what else is called."""
    prompt = np.arange(2 * setting.config.chunk_tokens, dtype=np.int32) % 256
    prompt = prompt[: setting.config.max_length - ANSWER_TOKENS]
    for use_cache, name in ((True, "with"), (False, "without")):
        with board.phase(f"compiling the step {name} the cache"):
            engine = setting.engine(use_cache=use_cache)
            serve_alone(engine, prompt)
            if use_cache:
                peek(engine, prompt)


def converse(
    setting: Setting, turns: list[Turn], figures: Figures, board: Board
) -> tuple[Engine, list[Served]]:
    """Hold the conversations side by side, then feed the control the same prompts."""
    engine, width = setting.engine(use_cache=True), setting.config.num_requests
    with board.phase("conversations, with the cache", engine):
        records, figures.tokens_per_s = _throughput(engine, turns, width, board.step)
    figures.hit_ratio = engine.stats.hit_ratio
    control = setting.engine(use_cache=False)
    with board.phase("the same prompts, without the cache"):
        same = [Turn(served.prompt) for served in records]
        controls, rate = _throughput(control, same, width, board.step)
    figures.tokens_per_s_no_cache = rate
    figures.num_differing += num_differing(records, controls)
    return engine, records


def one_at_a_time(
    setting: Setting, records: list[Served], figures: Figures, board: Board
) -> Engine:
    """Time the first token of each request, alone on the engine; the sides in turn."""
    engine, control = (setting.engine(use_cache=use) for use in (True, False))
    served = np.zeros(len(ComponentType), np.int64)
    with board.phase("one at a time, first with and then without", engine):
        for i, record in enumerate(records):
            served += peek(engine, record.prompt)
            sides = [(engine, figures.alone), (control, figures.alone_no_cache)]
            for side, timed in sides if i % 2 else reversed(sides):
                timed.append(serve_alone(side, record.prompt))
            board.step([figures.alone[-1]])
    total = sum(record.prompt.size for record in records)
    kinds = setting.config.cache.components
    figures.served_ratio = {kind.name: float(served[kind]) / total for kind in kinds}
    figures.hit_ratio_alone = engine.stats.hit_ratio
    figures.num_differing += num_differing(figures.alone, figures.alone_no_cache)
    return engine


def without_sharing(
    setting: Setting, records: list[Served], figures: Figures, board: Board
) -> Engine:
    """Serve prompts that no cache can help, in rounds; the sides take turns."""
    engine, control = (setting.engine(use_cache=use) for use in (True, False))
    length = max(record.prompt.size for record in records)
    with board.phase("prompts that share nothing, in turn", engine):
        for number in range(_UNSHARED_ROUNDS):
            prompts = unshared_prompts(_UNSHARED_PROMPTS, length, number)
            with_cache, without = serve_in_turn((engine, control), prompts)
            figures.unshared.append((_rate(*with_cache), _rate(*without)))
            figures.num_differing += num_differing(with_cache[0], without[0])
            board.step([])
    return engine


def peek(engine: Engine, prompt: np.ndarray) -> np.ndarray:
    """[3] tokens of a prompt that each component could serve by itself."""
    cache = engine.state.cache
    assert cache is not None
    key = radix_key(prompt[:-1], cache.config, num_pages=cache.config.max_prefix_pages)
    match = peek_prefix_len(cache, key)
    return np.asarray(match.full_kv_hit_length - match.lost_tokens)


def num_differing(records: list, controls: list) -> int:
    """Requests whose outputs differ."""
    pairs = zip(records, controls, strict=True)
    return sum(a.output != b.output for a, b in pairs)


def _throughput(
    engine: Engine, turns: list[Turn], width: int, on_step: Callable
) -> tuple[list[Served], float]:
    """Serve, and say how many tokens of prompts and outputs that was a second."""
    start = time.perf_counter()
    records = serve_together(engine, turns, width, on_step)
    return records, _rate(records, time.perf_counter() - start)


def _rate(records: list[Served], seconds: float) -> float:
    tokens = sum(served.prompt.size + len(served.output) for served in records)
    return tokens / seconds
