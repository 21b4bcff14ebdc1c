"""States of recurrent layers that tell after which tokens they stand.

In place of what a forward would compute, a state is a mark of exactly those tokens, so
that one in the wrong slot, or of the wrong length, shows.
"""

import zlib

import jax
import numpy as np

import uhrc_fn as u


def state_config(config: u.CacheConfig) -> u.RecurrentConfig:
    """Two layers, neither the first nor adjacent, with a few numbers each."""
    return u.RecurrentConfig(
        num_slots=config.num_recurrent_slots,
        layers=(1, 3),
        num_v_heads=1,
        v_head_dim=2,
        k_head_dim=1,
        conv_kernel_size=2,
    )


def marks(states, tokens):
    """The state after `tokens`: ``(temporal, conv)`` of each layer."""
    if states is None:
        return None
    tokens = np.ascontiguousarray(tokens, np.int32)
    found = []
    for layer in states.config.layers:
        word = zlib.crc32(tokens.tobytes(), layer)
        # Exact in float32 and in bfloat16.
        temporal = np.array([word >> 16, word & 0xFFFF], np.float32)
        conv = np.array([word >> shift & 0xFF for shift in (24, 16, 8, 0)])
        conv = conv.astype(states.conv[0].dtype)
        shapes = states.config.temporal_shape[1:], states.config.conv_shape[1:]
        found.append((temporal.reshape(shapes[0]), conv.reshape(shapes[1])))
    return found


def same_state(states, slot: int, tokens) -> bool:
    """Whether a slot holds the state after `tokens`, in every layer."""
    wanted = marks(states, tokens)
    held = zip(states.temporal, states.conv, strict=True)
    return all(
        np.array_equal(temporal[slot], a) and np.array_equal(conv[slot], b)
        for (temporal, conv), (a, b) in zip(held, wanted, strict=True)
    )


def check_clone(before, after, source: int, slot: int, tokens) -> None:
    """Buffers are as before but for the clone's row, a copy of the source bit for bit.

    Without a source nothing is copied: there was no hit.
    """
    assert (source > 0) == (len(tokens) > 0)
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        wanted = old.copy()
        wanted[slot] = old[source or slot]
        assert new.tobytes() == wanted.tobytes()
    assert not source or same_state(after, slot, tokens)
