"""Recall of a small trained hybrid, served with and without the prefix cache.

    python examples/trained_recall.py --family kda-mla

A hybrid is trained, here and now, to remember pairs: after `k1 v1 k2 v2 ...` and a key
it answers with that key's value. Attention comes first, where a token has not met its
neighbour, so that what is remembered lies in the recurrent layers. Snapshots are taken
between a key and its value: what binds the two is then in the convolution's inputs, and
a clone that forgets them must forget the pair.

Three engines answer the same questions: without a cache, with it, and with a clone that
leaves the convolution's inputs out on purpose.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
import types
from typing import NamedTuple
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import uhrc_fn
from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving import (
    Engine,
    Lanes,
    Model,
    ModelConfig,
    ServeConfig,
    admission,
    init_model,
    init_pools,
    serve_steps,
    small_config,
)
from uhrc_fn.serving.models.norm import rms_norm

FAMILIES = ("kda-mla", "gdn-gqa")
SYMBOLS, PAIRS, PAGE = 16, 8, 16
CHANCE = 1 / SYMBOLS
START = 0
PREFIX = 2 * PAIRS
"""Tokens that prompts share: all pairs but the last value, which comes after."""


def model_config(family: str) -> ModelConfig:
    """A layer of attention, then one with a state."""
    recurrent, attention = family.split("-")
    return small_config(
        family,
        layers=(attention, recurrent),
        vocab_size=1 + 2 * SYMBOLS,
        recurrent_k_dim=16,
    )


@functools.partial(jax.jit, static_argnums=1)
def init(key, config: ModelConfig) -> Model:
    """Random weights, from which recall is soon learned.

    Queries and keys begin alike, so that what is asked for looks like what was stored;
    keys begin with a look at the token before, queries and values at their own. From
    random taps it takes thousands of steps until a key meets its value.
    """
    model = init_model(key, config)
    (layer,) = config.recurrent_layers
    mixer = model.blocks[layer].mixer
    width = mixer.heads.k_width
    qkv = mixer.qkv.at[:, width : 2 * width].set(mixer.qkv[:, :width])
    conv = mixer.conv.at[:, -1].add(1.0)
    conv = conv.at[width : 2 * width, -2:].add(jnp.array([1.0, -1.0])[None])
    parts = lambda model: (
        model.blocks[layer].mixer.qkv,
        model.blocks[layer].mixer.conv,
    )
    return eqx.tree_at(parts, model, (qkv, conv))


# The task.


class Batch(NamedTuple):
    """Sequences to learn from."""

    token_ids: jax.Array
    """[batch, tokens]: a start, then keys and values by turns."""
    is_asked: jax.Array
    """[batch, pairs]: whether the pair's key was there before."""


def draw(key, batch: int, num_pairs: int = 2 * PAIRS - 1) -> Batch:
    """Pairs of 2 to `PAIRS` keys, each of them once, then again at random.

    Few keys are easy to tell apart: from them the model learns what is asked of it.
    """
    of_keys, of_values, of_count, of_asked = jax.random.split(key, 4)
    rows = jnp.broadcast_to(jnp.arange(SYMBOLS), (batch, SYMBOLS))
    keys = jax.random.permutation(of_keys, rows, axis=1, independent=True)
    values = jax.random.randint(of_values, (batch, SYMBOLS), 0, SYMBOLS)
    count = jax.random.randint(of_count, (batch, 1), 2, PAIRS + 1)
    again = jax.random.randint(of_asked, (batch, num_pairs), 0, count)
    turn = jnp.broadcast_to(jnp.arange(num_pairs), again.shape)
    is_asked = turn >= count
    which = jnp.where(is_asked, again, turn)
    pick = lambda x: jnp.take_along_axis(x, which, axis=1)
    pairs = jnp.stack([1 + pick(keys), 1 + SYMBOLS + pick(values)], axis=2)
    ids = jnp.pad(pairs.reshape(batch, -1), ((0, 0), (1, 0)), constant_values=START)
    return Batch(ids.astype(jnp.int32), is_asked)


def questions(seed: int, documents: int, asked: int):
    """Prompts that ask for a value, some of whose beginnings they share.

    Returns:
      ``(prompts, answers, is_cut)``: `asked` prompts of each document, one after the
      other. Half of the questions are about the last pair, between whose key and value
      the shared prefix ends; its value is drawn anew for each.
    """
    dice = np.random.default_rng(seed)
    prompts, answers, is_cut = [], [], []
    for _ in range(documents):
        keys = dice.permutation(SYMBOLS)[:PAIRS]
        shared = dice.integers(SYMBOLS, size=PAIRS)
        for number in range(asked):
            values = np.append(shared[:-1], dice.integers(SYMBOLS))
            which = PAIRS - 1 if number % 2 else dice.integers(PAIRS - 1)
            pairs = np.stack([1 + keys, 1 + SYMBOLS + values], axis=1).reshape(-1)
            prompts.append(np.concatenate([[START], pairs, [1 + keys[which]]]))
            answers.append(1 + SYMBOLS + values[which])
            is_cut.append(which == PAIRS - 1)
    return prompts, np.array(answers), np.array(is_cut)


# Training.


class OnePass:
    """Stands for the pools of a forward that begins at 0 and keeps nothing.

    Reading returns what was written, so that gradients flow; the pools themselves are
    written by kernels in place, which have none.
    """

    def __init__(self, model: Model, shape: tuple[int, int]):
        """For `shape` sequences and tokens."""
        config = model.config
        self.config = types.SimpleNamespace(
            page_size=shape[1], dtype=config.dtype, state_dtype=config.dtype
        )
        self.shape = shape
        states = init_pools(config, num_pages=1, page_size=1, num_slots=1).states
        assert states is not None
        none = jnp.zeros(shape[0], jnp.int32)
        self.gather_state = lambda layer, slots, fresh: states.gather_state(
            layer, none, none == 0
        )

    def put_state(self, layer, slots, temporal, conv, track):
        """Nobody reads it."""
        return self

    def set_kv_buffer(self, layer, location, *rows):
        """Keep the rows: a page is a whole sequence."""
        lanes, tokens = self.shape
        self.rows = [row.reshape(lanes, 1, tokens, *row.shape[1:]) for row in rows]
        return self

    def read_pages(self, layer, pages):
        """The rows that this layer has just written."""
        return self.rows


def whole(token_ids) -> Lanes:
    """Sequences as lanes of one forward, each with a page and a slot of its own."""
    num_lanes, tokens = token_ids.shape
    lane = 1 + jnp.arange(num_lanes, dtype=jnp.int32)
    none = jnp.zeros_like(lane)
    return Lanes(
        token_ids=token_ids,
        start=none,
        num_new=none + tokens,
        pages=lane[:, None],
        swa_pages=jnp.zeros((num_lanes, 0), jnp.int32),
        slots=lane,
        track=TrackMetadata(none, none > 0),
    )


def logits_of(model: Model, token_ids):
    """Logits after each token: `forward` without its pools, and with every position."""
    assert model.head is not None
    config, lanes = model.config, whole(token_ids)
    pools = OnePass(model, token_ids.shape)
    x = model.embedding[token_ids]
    for layer, block in enumerate(model.blocks):
        inner = rms_norm(x, block.mixer_norm, config.norm_eps)
        x = x + block.mixer(inner, pools, layer, lanes)[0]
        x = x + block.mlp(rms_norm(x, block.mlp_norm, config.norm_eps))
    return rms_norm(x, model.norm, config.norm_eps) @ model.head


def loss_of(model: Model, batch: Batch):
    """Mean of -log p(value) over the keys that were there before, and the recall."""
    logits = logits_of(model, batch.token_ids)[:, 1::2]
    wanted = batch.token_ids[:, 2::2]
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=2)
    asked = batch.is_asked.astype(jnp.float32)
    mean = lambda x: jnp.sum(asked * x) / jnp.sum(asked)
    is_right = jnp.argmax(logits, axis=-1) == wanted
    return -mean(log_p[..., 0]), mean(is_right.astype(jnp.float32))


class Adam(NamedTuple):
    """Training in progress: https://arxiv.org/abs/1412.6980."""

    model: Model
    mean: Model
    square: Model
    step: jax.Array


def adam_step(state: Adam, gradient: Model, rate: float, warm_up: int = 20) -> Adam:
    """Step against the gradient, each weight by its own scale."""
    first, second = 0.9, 0.98
    step = state.step + 1
    ema = lambda old, new, keep: keep * old + (1 - keep) * new
    mean = jax.tree.map(lambda m, g: ema(m, g, first), state.mean, gradient)
    square = jax.tree.map(lambda s, g: ema(s, g * g, second), state.square, gradient)
    unbiased = jnp.sqrt(1 - second**step) / (1 - first**step)
    scale = rate * jnp.minimum(step / warm_up, 1) * unbiased
    move = lambda w, m, s: w - scale * m / (jnp.sqrt(s) + 1e-8)
    return Adam(jax.tree.map(move, state.model, mean, square), mean, square, step)


@functools.partial(jax.jit, static_argnames=("count", "batch", "rate"))
def train_some(state: Adam, key, *, count: int, batch: int, rate: float):
    """Take `count` steps, each on a new batch; the mean recall of the last ten too."""

    def step(state, key):
        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        (loss, recall), gradient = gradient_of(state.model, draw(key, batch))
        return adam_step(state, gradient, rate), (loss, recall)

    state, (loss, recall) = jax.lax.scan(step, state, jax.random.split(key, count))
    return state, (loss[-10:].mean(), recall[-10:].mean())


def train(
    family: str,
    *,
    steps: int = 2000,
    batch: int = 32,
    rate: float = 5e-3,
    enough: float = 0.99,
    on_progress=lambda step, loss, recall: None,
) -> tuple[Model, float]:
    """Train a model from scratch until its recall is `enough`, or for `steps`.

    Returns:
      ``(model, recall)``: the recall while training.
    """
    model = init(jax.random.key(0), model_config(family))
    zeros = jax.tree.map(jnp.zeros_like, model)
    state, recall, count = Adam(model, zeros, zeros, jnp.float32(0)), 0.0, 25
    for number in range(-(-steps // count)):
        key = jax.random.fold_in(jax.random.key(1), number)
        state, news = train_some(state, key, count=count, batch=batch, rate=rate)
        loss, recall = map(float, news)
        on_progress((number + 1) * count, loss, recall)
        if recall >= enough:
            break
    return state.model, recall


# Serving.


def make_engine(model: Model, *, use_cache: bool, compiler_options=None) -> Engine:
    """An engine whose snapshots are taken every page, in the middle of a pair."""
    length, lanes = PREFIX + PAGE, 4
    cache = uhrc_fn.CacheConfig(
        components=model.config.components,
        page_size=PAGE,
        num_pages=64,
        num_recurrent_slots=64,
        enable_recurrent_extra_buffer=True,
        recurrent_track_interval=PAGE,
        max_prefix_pages=length // PAGE,
        max_live_receipts=2 * lanes,
    )
    config = ServeConfig(
        cache=cache,
        max_length=length,
        num_requests=lanes,
        decode_lanes=lanes,
        chunk_tokens=PAGE,
        use_cache=use_cache,
    )
    pages, _, slots = config.pool_pages
    pools = init_pools(model.config, num_pages=pages, page_size=PAGE, num_slots=slots)
    return Engine(model, config, pools, compiler_options=compiler_options)


@contextlib.contextmanager
def forgetful_clone(engine: Engine, compiler_options=None):
    """Let a hit copy the temporal state, but not the convolution's inputs."""
    clone = admission.cow_clone

    def temporal_only(cache, states, match):
        cache, copied, result = clone(cache, states, match)
        return cache, dataclasses.replace(copied, conv=states.conv), result

    # A function of its own, so that it is traced anew.
    steps = lambda model, state, count: serve_steps(model, state, count)
    steps = jax.jit(
        steps, static_argnums=2, donate_argnums=1, compiler_options=compiler_options
    )
    engine._programs = engine._programs._replace(steps=steps)
    with mock.patch.object(admission, "cow_clone", temporal_only):
        yield engine


def answer(engine: Engine, prompts) -> np.ndarray:
    """The token after each prompt, served one after another."""
    return np.array([engine.generate([prompt], 1)[0][0] for prompt in prompts])


class Recall(NamedTuple):
    """Right answers of an engine, and what it did not compute."""

    tokens: np.ndarray
    right: np.ndarray
    hit_ratio: float


def recall_of(engine: Engine, prompts, answers) -> Recall:
    """Ask all questions."""
    tokens = answer(engine, prompts)
    return Recall(tokens, tokens == answers, engine.stats.hit_ratio)


def compare(model: Model, documents: int, asked: int, compiler_options=None):
    """Ask the same of three engines: no cache, a cache, and a forgetful one.

    Returns:
      ``(recalls, is_cut)``: by engine, and which questions are about the pair that the
      snapshot cuts.
    """
    prompts, answers, is_cut = questions(2, documents, asked)
    make = functools.partial(make_engine, model, compiler_options=compiler_options)
    recalls = {
        "without": recall_of(make(use_cache=False), prompts, answers),
        "with": recall_of(make(use_cache=True), prompts, answers),
    }
    with forgetful_clone(make(use_cache=True), compiler_options) as engine:
        recalls["forgetful"] = recall_of(engine, prompts, answers)
    return recalls, is_cut


def main(argv: list[str] | None = None) -> int:
    """Run the example; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--documents", type=int, default=8)
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    say = lambda step, loss, recall: print(
        f"step {step:5}  loss {loss:.3f}  recall {recall:.3f}  "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    model, _ = train(arguments.family, on_progress=say)
    recalls, is_cut = compare(model, arguments.documents, 9)
    print(f"\n{is_cut.size} questions, chance {CHANCE:.3f}")
    print(f"{'cache':12}{'hit ratio':>10}{'recall':>8}{'of cut pairs':>14}")
    for name, each in recalls.items():
        cut = each.right[is_cut].mean()
        print(f"{name:12}{each.hit_ratio:10.2f}{each.right.mean():8.3f}{cut:14.3f}")
    is_equal = np.array_equal(recalls["with"].tokens, recalls["without"].tokens)
    verdict = "equal" if is_equal else "NOT equal"
    print(f"answers with and without the cache are {verdict}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
