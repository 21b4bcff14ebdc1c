"""Small models, their prompts and pages, and a way to serve them in pieces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.config import ModelConfig, small_config
from uhrc_fn.serving.models.model import forward, init_model, init_pools

LANES, LENGTH, WINDOW = 3, 24, 9
SHARED = {"num_pages": 80, "num_swa_pages": 80, "num_slots": 5}
step = jax.jit(forward, donate_argnums=1)
draw = jax.jit(init_model, static_argnums=1)


def config_of(family: str, **changes) -> ModelConfig:
    """Two layers, one of each kind of the family."""
    kinds = family.split("-") * 2
    window = {"sliding_window": WINDOW} if "swa" in kinds else {}
    layers = {"layers": tuple(kinds[:2]), "vocab_size": 97}
    return small_config(family, **layers, **window, **changes)


def tables(page_size: int, *, first: int = 1) -> np.ndarray:
    """A table of pages for each lane; no two hold the same, and none in order."""
    columns = -(-LENGTH // page_size)
    pages = np.arange(first, first + LANES * columns, dtype=np.int32)
    return np.random.default_rng(7).permutation(pages).reshape(LANES, columns)


def lanes_of(tokens, start, num_new, page_size: int, *, width: int = LENGTH, **changes):
    """Lanes that compute `tokens[lane][start : start + num_new]`, padded to `width`."""
    start, num_new = np.asarray(start, np.int32), np.asarray(num_new, np.int32)
    ids = np.zeros((LANES, width), np.int32)
    for lane, (begin, count) in enumerate(zip(start, num_new, strict=True)):
        ids[lane, :count] = tokens[lane][begin : begin + count]
    is_idle = num_new[:, None] == 0
    zeros = jnp.zeros(LANES, jnp.int32)
    lanes = Lanes(
        token_ids=jnp.asarray(ids),
        start=jnp.asarray(start),
        num_new=jnp.asarray(num_new),
        pages=jnp.asarray(np.where(is_idle, 0, tables(page_size))),
        swa_pages=jnp.asarray(np.where(is_idle, 0, tables(page_size, first=2))),
        slots=jnp.where(jnp.asarray(num_new) > 0, jnp.arange(1, LANES + 1), 0),
        track=TrackMetadata(zeros, zeros > 0),
    )
    return dataclasses.replace(lanes, **changes)


def prompts() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 97, (LANES, LENGTH)).astype(np.int32)


def serve(config, chunks, page_size: int, *, width: int = LENGTH, **changes):
    """Logits of each lane after the last of ``chunks``, and the pools.

    Args:
      config: of the model.
      chunks: of ``(start, num_new)``, one entry of each a lane.
      page_size: tokens a page.
      width: tokens of a forward.
      changes: fields of `Lanes` to set in every chunk.
    """
    model = draw(jax.random.key(1), config)
    pools = init_pools(config, page_size=page_size, **SHARED)
    logits = np.zeros((LANES, config.vocab_size), np.float32)
    for start, num_new in chunks:
        lanes = lanes_of(prompts(), start, num_new, page_size, width=width, **changes)
        pools, new = step(model, pools, lanes)
        logits = np.where(np.asarray(num_new)[:, None] > 0, np.asarray(new), logits)
    return logits, jax.device_get(pools)
