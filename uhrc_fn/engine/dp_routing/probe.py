"""What routing has to know of a request: its probe key and its expected tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.match import peek_prefix_len
from ...params import RadixKey
from ...state import CacheState

# An answer of unknown length is taken for this long: where no limit is given, and at
# most, whatever the limit.
DEFAULT_MAX_NEW_TOKENS = 128
MAX_ESTIMATED_TOKENS = 4096


@dataclasses.dataclass(kw_only=True, eq=False)
class RouteRequest:
    """A request as far as routing looks at it; an engine may subclass it."""

    input_ids: Any
    """Token ids, flat. Where they are something else (a batch, embeddings) or nothing,
    the request is routed by load alone."""
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    """None: as many as the engine allows."""
    ignore_eos: bool = False
    extra_key: str | None = None
    lora_id: str | None = None
    cache_salt: Any = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    """First prompt token that needs a log-probability; -1 or None for the last."""
    dp_rank: int | None = None
    """A rank that the request insists on."""

    @property
    def input_len(self) -> int:
        """Tokens of the prompt; 0 where it has no tokens."""
        return len(self.input_ids) if is_flat_ids(self.input_ids) else 0


class Probe(NamedTuple):
    """What to peek for: the arguments of `radix_key`."""

    token_ids: Sequence[int] | np.ndarray
    extra_key: str | None
    cache_salt: Any


def probe_key(request: RouteRequest) -> Probe | None:
    """Cut a prompt to what a hit could serve of it.

    One token at least is left to compute, and each token whose log-probability is asked
    for. A LoRA id is appended to `extra_key`, as sglang-jax's requests do; at worst two
    prompts are so taken for one, which concerns a guess of routing only.

    Args:
      request: its `input_ids` are looked at, not changed.

    Returns:
      A `Probe`, or None where nothing could be hit.

    Raises:
      ValueError: `lora_id` beside an `extra_key` that is no string.
    """
    if not is_flat_ids(request.input_ids):
        return None
    length = request.input_len - 1
    start = request.logprob_start_len
    if request.return_logprob and start is not None and start != -1:
        length = min(length, start)
    if length <= 0:
        return None
    extra_key = request.extra_key
    if request.lora_id is not None:
        if not isinstance(extra_key, str | None):
            raise ValueError(
                f"extra_key={extra_key!r} beside lora_id={request.lora_id!r}; wanted a "
                "string or None. Put the LoRA id into extra_key and leave lora_id out."
            )
        extra_key = (extra_key or "") + request.lora_id
    return Probe(request.input_ids[:length], extra_key, request.cache_salt)


def is_flat_ids(ids) -> bool:
    """Whether this is one prompt of token ids, and not an empty one."""
    if isinstance(ids, np.ndarray):
        return ids.ndim == 1 and ids.size > 0 and np.issubdtype(ids.dtype, np.integer)
    is_list = isinstance(ids, list | tuple) and bool(ids)
    return is_list and isinstance(next(iter(ids)), int | np.integer)


def peek_ranks(caches: CacheState | Sequence[CacheState], key: RadixKey) -> jax.Array:
    """Tokens that each rank would hit; no cache is touched. May be jitted.

    Args:
      caches: one state with a leading rank axis, or a state for each rank.
      key: one key.

    Returns:
      int32 [ranks].
    """
    if isinstance(caches, CacheState):
        peek = jax.vmap(peek_prefix_len, in_axes=(0, None))
        return peek(caches, key).hit_length
    return jnp.stack([peek_prefix_len(cache, key).hit_length for cache in caches])


def estimate_tokens(
    request: RouteRequest,
    *,
    page_size: int = 1,
    max_request_len: int | None = None,
    new_token_ratio: float = 1.0,
) -> tuple[int, int]:
    """Estimate what a request adds to the load of its rank.

    Args:
      request: gives prompt and limits.
      page_size: tokens a page; an answer that ignores the end is whole pages and one.
      max_request_len: longest sequence that the engine serves; None for any.
      new_token_ratio: part of its limit that an answer is expected to use, as the
        scheduler last saw it.

    Returns:
      ``(tokens of the prompt, expected tokens of the answer)``.

    Raises:
      ValueError: `max_new_tokens` is negative.
    """
    most = request.max_new_tokens
    if most is not None and most < 0:
        raise ValueError(
            f"max_new_tokens={most}; wanted a count of at least 0, or None for no "
            "limit of its own."
        )
    most = min(MAX_ESTIMATED_TOKENS if most is None else most, MAX_ESTIMATED_TOKENS)
    if max_request_len is not None:
        most = min(most, max(0, max_request_len - request.input_len - 1))
    if request.ignore_eos:
        return request.input_len, -(-most // page_size) * page_size + 1
    return request.input_len, int(most * new_token_ratio)
