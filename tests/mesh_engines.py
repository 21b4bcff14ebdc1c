"""Engines on meshes over models of two layers, and what is asked of them."""

import dataclasses
import functools

import jax
import numpy as np
from serving_harness import CHUNK, FAST, MAX_LENGTH, cache_config, model_config

from uhrc_fn.mesh import make_mesh
from uhrc_fn.serving import MeshEngine, ServeConfig, init_model, init_pools

OUTPUT = 6


def two_layers(family: str, **changes):
    """The last two layers of a family: of a hybrid, one of each kind."""
    config = dataclasses.replace(model_config(family), **changes)
    return dataclasses.replace(config, layers=config.layers[-2:])


def serve_config(family: str, use_cache: bool = True, **changes) -> ServeConfig:
    """Small lanes and pools of each rank; `changes` are of the cache."""
    return ServeConfig(
        cache=cache_config(family, 16, **changes),
        max_length=MAX_LENGTH,
        num_requests=4,
        decode_lanes=2,
        chunk_tokens=CHUNK,
        use_cache=use_cache,
    )


def pools_of(model_config, config: ServeConfig, num_ranks: int):
    pages, swa_pages, slots = config.pool_pages
    return init_pools(
        model_config,
        num_pages=pages,
        page_size=config.cache.page_size,
        num_swa_pages=swa_pages,
        num_slots=slots,
        num_ranks=num_ranks,
    )


def mesh_engine(
    family: str, shape, use_cache: bool = True, devices=None, **changes
) -> MeshEngine:
    """An engine of `shape` ranks and devices; `changes` are of the model."""
    model, config = two_layers(family, **changes), serve_config(family, use_cache)
    return MeshEngine(
        init_model(jax.random.key(0), model),
        config,
        functools.partial(pools_of, model, config, shape[0]),
        make_mesh(shape[0], shape[1], devices),
        compiler_options=FAST,
    )


def prompts_of(rank: int) -> list[np.ndarray]:
    """Prompts of a rank: they share beginnings with each other, some with a rank's."""
    shared, own = np.random.default_rng(1), np.random.default_rng(10 + rank)
    draw = lambda random, count: random.integers(1, 97, count).astype(np.int32)
    first = np.concatenate([draw(shared, 50), draw(own, 40 - 3 * rank)])
    cuts = (64, 33, 49)
    tails = [np.concatenate([first[:cut], draw(own, 7 + rank)]) for cut in cuts]
    return [first, *tails, first]


def serve(engine: MeshEngine) -> list[list[list[int]]]:
    """Outputs by rank and prompt; each rank serves its own one after another."""
    outputs = [[] for _ in engine.ranks]
    by_rank = [prompts_of(rank) for rank in range(len(engine.ranks))]
    for prompts in zip(*by_rank, strict=True):
        requests = [
            engine.submit(prompt, OUTPUT, rank=rank)
            for rank, prompt in enumerate(prompts)
        ]
        engine.run()
        for rank, request in enumerate(requests):
            outputs[rank].append(request.output)
    return outputs
