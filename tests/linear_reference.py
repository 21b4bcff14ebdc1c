"""Linear-recurrent layers in NumPy float64, token by token, from published equations.

No code is shared with the package. Each function takes a layer (its parameters) and x
[tokens, hidden], starts from nothing, and returns y and the final temporal state.
"""

import types
from typing import Any

import numpy as np


def recurrence(q, k, v, decay, beta=None, state=None):
    """S = diag(decay) S; S += k (beta (v - S^T k))^T; o = S^T q, for one head.

    q, k: [tokens, k_dim]; v: [tokens, v_dim]; decay: [tokens, k_dim or 1], a factor.
    """
    state = np.zeros((k.shape[1], v.shape[1])) if state is None else state
    out = []
    for t in range(len(q)):
        state = decay[t][:, None] * state
        value = v[t] if beta is None else beta[t] * (v[t] - state.T @ k[t])
        state = state + np.outer(k[t], value)
        out.append(state.T @ q[t])
    return np.array(out), state


def kda(layer, x):
    p, x = _float64(layer), np.float64(x)
    heads = layer.heads.num_v_heads
    q, k, v = _convolved(p, x, layer.heads)
    step = _softplus(x @ p.decay_down @ p.decay_up + p.dt_bias)
    decay = np.exp(-np.exp(p.a_log)[:, None] * step.reshape(len(x), heads, -1))
    beta = _sigmoid(x @ p.beta)
    gate = _sigmoid(x @ p.gate_down @ p.gate_up).reshape(len(x), heads, -1)
    return _heads(p, layer, q, k, v, decay, beta, gate)


def gdn(layer, x):
    p, x = _float64(layer), np.float64(x)
    heads = layer.heads.num_v_heads
    q, k, v = _convolved(p, x, layer.heads)
    of_key = np.arange(heads) // (heads // layer.heads.num_k_heads)
    decay = np.exp(-np.exp(p.a_log) * _softplus(x @ p.decay + p.dt_bias))[..., None]
    gate = (x @ p.gate).reshape(len(x), heads, -1)
    gate = gate * _sigmoid(gate)
    beta = _sigmoid(x @ p.beta)
    return _heads(p, layer, q[:, of_key], k[:, of_key], v, decay, beta, gate)


def gla(layer, x):
    p, x = _float64(layer), np.float64(x)
    heads, tokens = layer.heads.num_v_heads, len(x)
    width = layer.heads.k_width
    q, k, v = np.split(x @ p.qkv, [width, 2 * width], axis=1)
    q, k, v = (y.reshape(tokens, heads, -1) for y in (q, k, v))
    q = _rotated(layer, _rms(q, p.q_norm, layer.norm_eps)) / np.sqrt(q.shape[-1])
    k = _rotated(layer, _rms(k, p.k_norm, layer.norm_eps))
    slope = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)  # heads: a power of two
    slope *= 1 - (layer.layer_index - 1) / (layer.num_layers - 1) + 1e-5
    by_head = [
        recurrence(q[:, h], k[:, h], v[:, h], np.full((tokens, 1), np.exp(-slope[h])))
        for h in range(heads)
    ]
    o = np.stack([o for o, _ in by_head], axis=1).reshape(tokens, layer.norm_groups, -1)
    o = _rms(o, 1.0, layer.norm_eps).reshape(tokens, -1) * p.norm
    y = (o * _sigmoid(x @ p.gate)) @ p.out
    return y, np.stack([state for _, state in by_head])


def _float64(layer) -> Any:
    """The layer's arrays in float64, by name."""
    arrays = {k: v for k, v in vars(layer).items() if hasattr(v, "dtype")}
    wide = {k: np.asarray(v).astype(np.float64) for k, v in arrays.items()}
    return types.SimpleNamespace(**wide)


def _heads(p, layer, q, k, v, decay, beta, gate):
    """Recurrence of each head, normed, gated and mapped back."""
    by_head = [
        recurrence(q[:, h], k[:, h], v[:, h], decay[:, h], beta[:, h])
        for h in range(layer.heads.num_v_heads)
    ]
    o = np.stack([o for o, _ in by_head], axis=1)
    o = _rms(o, p.norm, layer.norm_eps) * gate
    return o.reshape(len(o), -1) @ p.out, np.stack([state for _, state in by_head])


def _convolved(p, x, heads):
    """q, k, v: [tokens, heads, dim], convolved, SiLU, q and k of length 1, q scaled."""
    inputs = x @ p.qkv
    taps = p.conv.shape[1]
    y = np.zeros_like(inputs)
    for t in range(len(x)):
        for back in range(min(taps, t + 1)):
            y[t] += p.conv[:, taps - 1 - back] * inputs[t - back]
    y = y * _sigmoid(y)
    width = heads.num_k_heads * heads.k_head_dim
    q, k, v = np.split(y, [width, 2 * width], axis=1)
    q = q.reshape(len(x), heads.num_k_heads, -1)
    k = k.reshape(len(x), heads.num_k_heads, -1)
    length = lambda y: y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)
    q = length(q) / np.sqrt(heads.k_head_dim)
    return q, length(k), v.reshape(len(x), heads.num_v_heads, -1)


def _rotated(layer, y):
    """Channel i and i + half of the turning ones, by position / theta^(2 i / dim)."""
    dim, y = layer.rotary_dim, y.copy()
    for position in range(len(y)):
        for i in range(dim // 2):
            angle = position / layer.rope_theta ** (2 * i / dim)
            a, b = y[position, :, i].copy(), y[position, :, i + dim // 2].copy()
            y[position, :, i] = a * np.cos(angle) - b * np.sin(angle)
            y[position, :, i + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
    return y


def _rms(y, weight, eps):
    return y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) * weight


def _sigmoid(y):
    return 1 / (1 + np.exp(-y))


def _softplus(y):
    return np.log1p(np.exp(y))
