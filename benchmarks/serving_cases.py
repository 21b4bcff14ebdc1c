"""Models, engines and workloads of `serving.py`, sized for a CPU."""

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import uhrc_fn
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.engine import Engine
from uhrc_fn.serving.models.config import ModelConfig
from uhrc_fn.serving.models.model import Model, init_model, init_pools

PAGE_SIZE = 16
VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and the shapes of the step that serves it."""

    model: Model
    config: ServeConfig

    def pools(self, config: ServeConfig) -> Any:
        """Empty pools of a config's size."""
        pages, swa_pages, slots = config.pool_pages
        return init_pools(
            self.model.config,
            num_pages=pages,
            page_size=config.cache.page_size,
            num_swa_pages=swa_pages,
            num_slots=slots,
        )

    def engine(self, *, use_cache: bool = True, steps: int = 1) -> Engine:
        """A fused engine with empty pools."""
        config = dataclasses.replace(self.config, use_cache=use_cache)
        return Engine(self.model, config, self.pools(config), steps_per_call=steps)


def setting_of(
    model: ModelConfig, *, lanes: int, max_length: int, chunk: int, tree_tokens: int
) -> Setting:
    """Size cache and pools.

    Args:
      model: its shapes.
      lanes: requests at once.
      max_length: tokens of the longest.
      chunk: tokens of a prompt in one step; the track interval of a hybrid too.
      tree_tokens: what the tree holds beside what runs.
    """
    pages = (lanes * max_length + tree_tokens) // PAGE_SIZE
    more: dict = {}
    if model.recurrent_layers:
        more = {
            "num_recurrent_slots": 3 * lanes + -(-pages * PAGE_SIZE // chunk),
            "enable_recurrent_extra_buffer": True,
            "recurrent_track_interval": chunk,
        }
    cache = uhrc_fn.CacheConfig(
        components=model.components,
        page_size=PAGE_SIZE,
        num_pages=pages,
        max_prefix_pages=-(-max_length // PAGE_SIZE),
        max_live_receipts=2 * lanes + 2,
        **more,
    )
    config = ServeConfig(
        cache=cache,
        max_length=max_length,
        num_requests=lanes,
        decode_lanes=lanes,
        chunk_tokens=chunk,
    )
    return Setting(init_model(jax.random.key(0), model), config)


def grouped_prompts(
    groups: int, each: int, system: int, question: int, turn: int = 0
) -> list[np.ndarray]:
    """Prompts that share a system prompt by group, the groups mixed.

    Every `turn` asks other questions under the same system prompts.
    """
    systems = unshared_prompts(groups, system, seed=0)
    dice = np.random.default_rng((1, turn))
    draw = lambda: dice.integers(1, VOCABULARY, question).astype(np.int32)
    prompts = [np.concatenate([head, draw()]) for head in systems for _ in range(each)]
    return [prompts[i] for i in dice.permutation(len(prompts))]


def unshared_prompts(count: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Random prompts: no two begin alike."""
    dice = np.random.default_rng(seed)
    return [dice.integers(1, VOCABULARY, tokens).astype(np.int32) for _ in range(count)]


@dataclasses.dataclass
class Run:
    """What serving a workload gave."""

    wall_s: float
    outputs: list[list[int]]
    ttft_s: list[float]
    hit_tokens: int
    prompt_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the wall time."""
        return sum(map(len, self.outputs)) / self.wall_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens over the wall time."""
        return (self.prompt_tokens + sum(map(len, self.outputs))) / self.wall_s


def serve(engine: Any, prompts: Iterable[np.ndarray], output: int, width: int) -> Run:
    """Serve prompts, `width` of them at a time; each that ends lets another in."""
    todo, requests, asked, first = list(prompts)[::-1], [], {}, {}
    start = time.perf_counter()

    def submit() -> None:
        request = engine.submit(todo.pop(), output)
        requests.append(request)
        asked[id(request)] = time.perf_counter()

    for _ in range(min(width, len(todo))):
        submit()
    while not engine.is_idle:
        for request, _ in engine.step():
            first.setdefault(id(request), time.perf_counter())
            if request.is_finished and todo:
                submit()
    return Run(
        wall_s=time.perf_counter() - start,
        outputs=[request.output for request in requests],
        ttft_s=[first[id(request)] - asked[id(request)] for request in requests],
        hit_tokens=sum(request.hit_length for request in requests),
        prompt_tokens=sum(request.prompt.size for request in requests),
    )
