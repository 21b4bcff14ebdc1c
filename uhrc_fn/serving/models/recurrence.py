"""Gated linear recurrences, token by token and chunk by chunk, in float32.

A head holds a state S of k_dim x v_dim. Token t decays it, corrects what its key
recalls towards its value (the delta rule) and is read by its query:

    S' = diag(exp(g_t)) S_{t-1}
    u_t = beta_t (v_t - S'^T k_t)           delta rule
    u_t = v_t                               plain gated linear attention
    S_t = S' + k_t u_t^T
    o_t = S_t^T q_t

with g_t <= 0 for each channel of the key (KDA, arXiv:2510.26692 section 3) or one for
all (Gated DeltaNet, arXiv:2412.06464 section 3; fixed per head in Lightning Attention,
arXiv:2405.17381). Within a chunk the corrections solve a unit lower triangular system
(the WY form of arXiv:2406.06484, section 3, with decay):

    (I + diag(beta) A) U = diag(beta) (V - K_ S),    A_ij = k_i . (exp(G_ij) k_j), j < i

where G_ij sums g over j < t <= i and K_ holds the keys decayed since the chunk began.
Both A and the inverse are built by halving: each half chunk first, then the corner
between them. Decay across a corner is that since the middle times that until the
middle: sums of non-positive numbers, never differences, so that no exponential
overflows and strong decay costs no precision.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

CHUNKS = 16, 64
"""Smallest and largest chunk that is chosen."""


def recur(
    q: Float[Array, " lanes tokens heads k_dim"],
    k: Float[Array, " lanes tokens heads k_dim"],
    v: Float[Array, " lanes tokens heads v_dim"],
    log_decay: Float[Array, " lanes tokens heads decays"],
    beta: Float[Array, " lanes tokens heads"] | None,
    state: Float[Array, " lanes heads k_dim v_dim"],
    is_new: Bool[Array, " lanes tokens"],
    *,
    chunk: int | None = None,
):
    """Run the recurrence over the new tokens of each lane.

    Args:
      q: queries, scaled.
      k: keys.
      v: values.
      log_decay: g, at most 0; `decays` is `k_dim`, or 1 for one decay a head.
      beta: how far the delta rule corrects; `None` for none of it.
      state: before the first token.
      is_new: tokens that count. Others leave the state as it is, bit for bit, and
        read zeros; they may hold anything.
      chunk: tokens computed at once, a power of two; `None` for `chunk_of`.

    Returns:
      ``(o, state)`` in float32: what each token reads, and the state after the last.
    """
    if q.shape[1] == 1:
        return recur_steps(q, k, v, log_decay, beta, state, is_new)
    return recur_chunks(q, k, v, log_decay, beta, state, is_new, chunk=chunk)


def chunk_of(k_dim: int) -> int:
    """A good chunk for keys of this width: a power of two.

    A token costs k_dim x v_dim with the state and chunk x (k_dim + v_dim) within the
    chunk: a chunk about as long as keys are wide keeps both alike. A longer one has
    fewer steps, but more levels to compile.
    """
    return min(max(1 << (k_dim - 1).bit_length(), CHUNKS[0]), CHUNKS[1])


def recur_steps(q, k, v, log_decay, beta, state, is_new):
    """`recur`, one token after the other."""
    inputs = _masked(q, k, v, log_decay, beta, is_new)
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, is_new))

    def step(state, token):
        inputs, is_new = token
        o, new = _step(state, *inputs)
        return jnp.where(is_new[:, None, None, None], new, state), o

    state, o = jax.lax.scan(step, state.astype(jnp.float32), by_token)
    return jnp.moveaxis(o, 0, 1), state


def recur_chunks(q, k, v, log_decay, beta, state, is_new, *, chunk=None):
    """`recur`, a chunk of tokens at once."""
    tokens = q.shape[1]
    chunk = min(chunk or chunk_of(q.shape[-1]), 1 << (tokens - 1).bit_length())
    inputs = _masked(q, k, v, log_decay, beta, is_new)
    inputs = jax.tree.map(lambda x: _chunked(jnp.moveaxis(x, 1, 2), chunk, 2), inputs)
    has_new = _chunked(is_new, chunk, 1).any(-1)

    def step(state, part):
        inputs, has_new = part
        o, new = _chunk(state, *inputs)
        return jnp.where(has_new[:, None, None, None], new, state), o

    state, o = jax.lax.scan(step, state.astype(jnp.float32), (inputs, has_new))
    o = jnp.moveaxis(o, 0, 2)  # lanes, heads, chunks, chunk, v_dim
    o = o.reshape(*o.shape[:2], -1, o.shape[-1])[:, :, :tokens]
    return jnp.moveaxis(o, 2, 1), state


def _masked(q, k, v, log_decay, beta, is_new):
    """The inputs in float32, with zeros where a token does not count."""

    def mask(x):
        keep = is_new.reshape(is_new.shape + (1,) * (x.ndim - 2))
        return jnp.where(keep, x.astype(jnp.float32), jnp.zeros((), jnp.float32))

    return jax.tree.map(mask, (q, k, v, log_decay, beta))


def _chunked(x, chunk: int, axis: int):
    """Cut an axis into chunks, the last padded with zeros; chunks come first."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % chunk)
    x = jnp.pad(x, pad)
    x = x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _step(state, q, k, v, log_decay, beta):
    """One token of every lane and head."""
    state = jnp.exp(log_decay)[..., None] * state
    u = v
    if beta is not None:
        u = beta[..., None] * (v - _matmul(k[..., None, :], state)[..., 0, :])
    state = state + k[..., None] * u[..., None, :]
    return _matmul(q[..., None, :], state)[..., 0, :], state


def _chunk(state, q, k, v, log_decay, beta):
    """One chunk of every lane and head: the WY form of this module's head."""
    rows = jnp.stack([q] if beta is None else [q, k], axis=2)
    cols, log_decay = k[:, :, None], log_decay[:, :, None]
    scores, inverse, since, until = _halve(rows, cols, log_decay, beta)
    past = _matmul(rows * jnp.exp(since), state[:, :, None])
    u = v
    if inverse is not None and beta is not None:
        u = _matmul(inverse, beta[..., None] * (v - past[:, :, 1]))
    o = past[:, :, 0] + _matmul(scores, u)
    kept = jnp.exp(since[:, :, 0, -1, :, None]) * state
    written = jnp.swapaxes(cols * jnp.exp(until), -1, -2)[:, :, 0]
    return o, kept + _matmul(written, u)


def _halve(rows, cols, log_decay, beta):
    """Build what a chunk needs from single tokens up, doubling the blocks.

    Args:
      rows: [lanes, heads, 1 or 2, chunk, k_dim], queries and (delta rule) keys.
      cols: [lanes, heads, 1, chunk, k_dim], keys.
      log_decay: [lanes, heads, 1, chunk, decays].
      beta: [lanes, heads, chunk], or `None`.

    Returns:
      ``(scores, inverse, since, until)``: decayed products of queries and keys, lower
      triangular; inverse of I + diag(beta) A, `None` without beta; log decay from the
      start of the chunk through a token, and from after it to the end.
    """
    blocks = lambda x: x[..., None, :]  # blocks of one token
    rows, cols, since = blocks(rows), blocks(cols), blocks(log_decay)
    until = jnp.zeros_like(since)
    scores = jnp.sum(rows[:, :, 0] * cols[:, :, 0], axis=-1, keepdims=True)
    delta = None if beta is None else beta[..., None, None]
    inverse = None if delta is None else jnp.ones_like(delta)
    while scores.shape[-1] < rows.shape[-3] * rows.shape[-2]:
        (_, late), (early, _) = _pairs(rows), _pairs(cols)
        (since_1, since_2), (until_1, until_2) = _pairs(since), _pairs(until)
        early = jnp.swapaxes(early * jnp.exp(until_1), -1, -2)
        corner = _matmul(late * jnp.exp(since_2), early)
        scores = _corner(scores, corner[:, :, 0])
        if delta is not None and inverse is not None:
            (first, second), (_, beta_2) = _pairs(inverse), _pairs(delta)
            solved = _matmul(_matmul(second, beta_2 * corner[:, :, 1]), first)
            inverse = _corner(inverse, -solved)
            delta = _joined(delta)
        through, total = since_1[..., -1:, :], since_2[..., -1:, :]
        since = jnp.concatenate([since_1, since_2 + through], axis=-2)
        until = jnp.concatenate([until_1 + total, until_2], axis=-2)
        rows, cols = _joined(rows), _joined(cols)
    if inverse is not None:
        inverse = inverse[..., 0, :, :]
    return scores[..., 0, :, :], inverse, since[..., 0, :, :], until[..., 0, :, :]


def _pairs(x):
    """First and second of each two blocks: [..., blocks, size, width] twice."""
    x = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    return x[..., 0, :, :], x[..., 1, :, :]


def _joined(x):
    """Each two blocks as one of twice the size."""
    return x.reshape(*x.shape[:-3], -1, 2 * x.shape[-2], x.shape[-1])


def _corner(blocks, corner):
    """Lower triangular blocks of twice the size, from theirs and the corner between."""
    first, second = _pairs(blocks)
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _matmul(a, b):
    """Product in float32, also where the hardware's default is fewer bits."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
