"""Random operations on ranks, as one program: a scan over turns, each rank its own.

A rank has a few hands, each with a request's key, match, receipt and what it holds of
every pool. In a turn a hand does one operation, another one on each rank.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from harness import stack
from op_cases import zeros

import uhrc_fn as u
from uhrc_fn.config import ComponentType
from uhrc_fn.state import CacheState

HANDS, PAGES = 4, 7
OPERATIONS = (
    *("match", "lock", "alloc", "insert", "unlock", "free"),  # as a request does them
    *("evict", "release_window", "compact_clock"),
)
_OTHER = {
    "FULL": {},
    "FULL,SWA": {"num_swa_pages": 14, "sliding_window_size": 5},
    "FULL,RECURRENT": {"num_recurrent_slots": 4, "enable_recurrent_extra_buffer": True},
}


def config_of(components: str) -> u.CacheConfig:
    """Pools that a few hands exhaust, and evict from."""
    return u.CacheConfig(
        components=components,
        page_size=2,
        num_pages=20,
        max_prefix_pages=PAGES,
        max_live_receipts=6,
        **_OTHER[components],
    )


class Turn(NamedTuple):
    """What a rank does: arrays of a leading axis of turns."""

    operation: jax.Array
    hand: jax.Array
    key: u.RadixKey
    counts: jax.Array
    """[3] entries to allocate or evict, by component."""


class Rank(eqx.Module):
    """A cache, and what the requests of its hands know and hold."""

    cache: CacheState
    key: u.RadixKey
    match: u.MatchResult
    receipt: u.IncLockRefResult
    held: jax.Array
    """[hands, 3, pages] ids, 0-padded."""


def init_rank(config: u.CacheConfig) -> Rank:
    """Nothing in the cache, nothing in any hand."""
    cache = u.init(config)
    key = u.radix_key([], config, num_pages=PAGES)
    match = zeros(jax.eval_shape(u.peek_prefix_len, cache, key))
    receipt = zeros(jax.eval_shape(u.inc_lock_ref, cache, match)[1])
    each = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * HANDS), tree)
    held = jnp.zeros((HANDS, 3, PAGES), jnp.int32)
    return Rank(cache, each(key), each(match), each(receipt), held)


def turns_of(config: u.CacheConfig, named) -> Turn:
    """Turns from ``(operation, hand, tokens, counts)``."""
    names = OPERATIONS
    turns = [
        Turn(
            np.int32(names.index(name)),
            np.int32(hand),
            u.radix_key(tokens, config, num_pages=PAGES),
            np.asarray(counts, np.int32),
        )
        for name, hand, tokens, counts in named
    ]
    return stack(turns)


def draw_turns(config: u.CacheConfig, seed: int, count: int) -> Turn:
    """Turns of one rank; keys come again, and share beginnings of any length."""
    rng = np.random.default_rng(seed)
    lines = rng.integers(0, 3, (3, PAGES * config.page_size))
    done = np.zeros(HANDS, np.int32)
    turns = []
    for _ in range(count):
        length = rng.integers(2, PAGES * config.page_size + 1)
        tokens = lines[rng.choice(3, p=[0.6, 0.3, 0.1])][:length]
        tokens = np.where(rng.random(length) < 0.02, 3, tokens)
        name = "lora" if rng.random() < 0.1 else None
        hand = rng.integers(HANDS)
        operation = rng.integers(len(OPERATIONS))
        if rng.random() < 0.8:  # else it may be out of turn
            operation = done[hand] % 6
            done[hand] += 1
        turns.append(
            Turn(
                np.int32(operation),
                np.int32(hand),
                u.radix_key(tokens, config, num_pages=PAGES, extra_key=name),
                rng.integers(0, [PAGES + 1, PAGES + 1, 2]).astype(np.int32),
            )
        )
    return stack(turns)


def play(rank: Rank, turns: Turn):
    """Take the turns: ``(rank, seen)``, with hit length and status after each."""
    acts = [functools.partial(_act, name) for name in OPERATIONS]

    def take(rank: Rank, turn: Turn):
        rank = jax.lax.switch(turn.operation, acts, rank, turn)
        seen = rank.match.hit_length[turn.hand], rank.cache.status, rank.cache.evictable
        return rank, seen

    return jax.lax.scan(take, rank, turns)


def _act(name: str, rank: Rank, turn: Turn) -> Rank:
    hands = [rank.key, rank.match, rank.receipt, rank.held]
    mine = [jax.tree.map(lambda x: x[turn.hand], part) for part in hands]
    cache, *new = _ACTS[name](rank.cache, *mine, turn=turn)
    put = lambda old, new: old.at[turn.hand].set(new)
    key, match, receipt, held = jax.tree.map(put, hands, new)
    return Rank(cache, key, match, receipt, held)


def _match(cache, key, match, receipt, held, turn):
    cache, match = u.match_prefix(cache, u.MatchPrefixParams(key=turn.key))
    return cache, turn.key, match, receipt, held


def _lock(cache, key, match, receipt, held, turn):
    cache, new = u.inc_lock_ref(cache, match)
    # A hand that holds a lock keeps its receipt, or none could give that lock back.
    cache, _ = u.dec_lock_ref(cache, receipt)
    return cache, key, match, new, held


def _alloc(cache, key, match, receipt, held, turn):
    has = np.array([c in cache.config.components for c in ComponentType])
    wanted = turn.counts.at[2].set(1)  # a request has one slot
    counts = jnp.where(jnp.any(held > 0) | ~has, 0, wanted)
    cache, given = u.alloc_request(
        cache, *counts, max_pages=PAGES, max_swa_pages=PAGES, max_slots=1
    )
    wide = lambda ids: jnp.pad(ids, (0, PAGES - ids.shape[0]))
    ids = jnp.stack([wide(part.ids) for part in given])
    return cache, key, match, receipt, jnp.where(ids > 0, ids, held)


def _insert(cache, key, match, receipt, held, turn):
    config = cache.config
    start = match.hit_length // config.page_size
    page = jnp.arange(PAGES, dtype=jnp.int32)
    own = jnp.where(page >= start, held[:, jnp.maximum(page - start, 0)], 0)
    value = jnp.where(page < start, match.device_indices, own[0])
    more = {}
    if config.has_swa:
        more = {"swa_value": own[1], "swa_evicted_seqlen": turn.counts[0] // 2 * 2}
    if config.has_recurrent:
        length = key.length // config.page_size * config.page_size
        more = {"recurrent_value": held[2, 0], "recurrent_length": length}
    params = u.InsertParams(
        key=key, value=value, prev_prefix_len=match.hit_length, **more
    )
    cache, result = u.insert(cache, params)
    taken = jnp.where(result.adopted().T, jnp.stack([value, own[1], own[2]]), 0)
    slot = jnp.where(result.recurrent_committed, held[2, 0], 0)
    taken = taken.at[2].set(0).at[2, 0].set(slot)
    is_gone = jnp.any(held[..., None] == taken[:, None], axis=-1)
    return cache, key, match, receipt, jnp.where(is_gone, 0, held)


def _unlock(cache, key, match, receipt, held, turn):
    cache, _ = u.dec_lock_ref(cache, receipt)
    return cache, key, match, receipt, held


def _free(cache, key, match, receipt, held, turn):
    cache = u.free_pages(cache, held[0])
    if cache.config.has_swa:
        cache = u.free_swa_pages(cache, held[1])
    if cache.config.has_recurrent:
        cache = u.free_slots(cache, held[2])
    return cache, key, match, receipt, jnp.zeros_like(held)


def _evict(cache, key, match, receipt, held, turn):
    tokens = turn.counts // 3 * cache.config.page_size
    wanted = u.EvictParams(
        num_tokens=tokens[0],
        swa_num_tokens=tokens[1] if cache.config.has_swa else 0,
        recurrent_num=turn.counts[2] if cache.config.has_recurrent else 0,
    )
    cache, _ = u.evict(cache, wanted, max_victims=PAGES)
    return cache, key, match, receipt, held


def _release_window(cache, key, match, receipt, held, turn):
    cache, receipt = u.release_window(cache, receipt)
    return cache, key, match, receipt, held


def _compact_clock(cache, key, match, receipt, held, turn):
    return u.compact_clock(cache), key, match, receipt, held


_ACTS = {
    "match": _match,
    "lock": _lock,
    "alloc": _alloc,
    "insert": _insert,
    "unlock": _unlock,
    "free": _free,
    "evict": _evict,
    "release_window": _release_window,
    "compact_clock": _compact_clock,
}
