"""Where a prefill is cut, so that each snapshot is the last state of a forward.

A recurrent state cannot be taken from the middle of a forward. With the extra buffer a
chunk therefore ends at each multiple of the track interval, and at a branching length
that a match has reported. Lengths are in tokens, counted from the start of the prompt.
"""

import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def resolve_track_interval(
    interval: int | None, *, page_size: int, chunked_prefill_size: int | None = None
) -> int:
    """Settle the tokens between snapshots: `CacheConfig.recurrent_track_interval`.

    Args:
      interval: what the user says; `None` for the default.
      page_size: tokens a page.
      chunked_prefill_size: tokens of a prefill chunk; `None`, 0 or less for whole
        prompts.

    Returns:
      the interval: by default the chunk, else the page.

    Warns:
      where the interval and the chunk differ: short prompts are never cached, or
      prefill runs in smaller chunks than it could.

    Raises:
      ValueError: not a positive multiple of the page; the message names the setting
        that is at fault.
    """
    chunk = max(chunked_prefill_size or 0, 0)
    name, value = "recurrent_track_interval", interval
    if interval is None:
        name, value = "chunked_prefill_size", chunk or page_size
    if not isinstance(value, int) or value <= 0 or value % page_size:
        raise ValueError(
            f"{name}={value!r} as the track interval with page_size={page_size}; "
            "wanted a positive multiple of page_size. Round it to whole pages"
            + (", or set recurrent_track_interval." if interval is None else ".")
        )
    if chunk and value > chunk:
        warnings.warn(
            f"recurrent_track_interval={value} exceeds the prefill chunk of {chunk}: "
            f"a prompt shorter than {value} tokens is not cached.",
            stacklevel=2,
        )
    if value < chunk:
        warnings.warn(
            f"recurrent_track_interval={value} is below the prefill chunk of {chunk}: "
            f"prefill runs in chunks of {value}, which may be slower and rounds "
            "otherwise.",
            stacklevel=2,
        )
    return value


def next_boundary(prefix_length, interval: int, branching_length: Any = 0):
    """First length past the prefix at which a prefill must stop.

    Args:
      prefix_length: tokens whose state there is.
      interval: track interval, static.
      branching_length: `recurrent_branching_seqlen` of the match, 0 for none.

    Returns:
      int32: the next multiple of the interval, or the branching length if that comes
      first.
    """
    prefix, branching = _int32(prefix_length, branching_length)
    regular = (prefix // interval + 1) * interval
    return jnp.where(branching > prefix, jnp.minimum(branching, regular), regular)


class PrefillCut(NamedTuple):
    """What of a prefill runs in the next forward."""

    num_tokens: Int32[Array, " *batch"]
    """Tokens to compute; 0 where less than a page of the budget is left."""
    is_final: Bool[Array, " *batch"]
    """Whether they end the prompt; else it goes on in a later forward."""


def cut_prefill(
    prefix_length,
    prompt_length,
    budget,
    *,
    interval: int,
    page_size: int,
    branching_length: Any = 0,
) -> PrefillCut:
    """Cut what is left of a prompt at the next boundary and at the token budget.

    A chunk ends on a boundary, or is not final, or is the rest of the prompt short of
    the next boundary; it never crosses one.

    Args:
      prefix_length: tokens whose KV and state there are.
      prompt_length: tokens to have, at least `prefix_length`.
      budget: tokens that this forward may still take; a chunk counts as whole pages.
      interval: track interval; 0 for no boundaries (no extra buffer). Static.
      page_size: tokens a page, static.
      branching_length: `recurrent_branching_seqlen` of the match, 0 for none.

    Returns:
      the cut. One that the budget shortens ends on a whole page, perhaps off a
      boundary, and is not final.
    """
    prefix, prompt, budget = _int32(prefix_length, prompt_length, budget)
    wanted = _up_to_boundary(prefix, prompt, interval, branching_length)
    fits = _whole_pages(wanted, page_size) <= budget
    tokens = jnp.where(fits, wanted, jnp.maximum(budget, 0) // page_size * page_size)
    return PrefillCut(tokens, prefix + tokens == prompt)


def cut_prefills(
    prefix_length,
    prompt_length,
    budget,
    *,
    interval: int,
    page_size: int,
    branching_length: Any = 0,
    max_unfinished: int = 1,
) -> PrefillCut:
    """Share one forward's token budget among prefills, first come, first served.

    Args:
      prefix_length: int32 [requests], as in `cut_prefill`.
      prompt_length: int32 [requests]; equal to the prefix for a row that is not used.
      budget: tokens for all of them, a scalar.
      interval: as in `cut_prefill`.
      page_size: as in `cut_prefill`.
      branching_length: int32 [requests], or 0.
      max_unfinished: requests that may be in the middle of their prompt afterwards; a
        request comes to its turn only while fewer are. With more than 1 a boundary
        that cuts one request leaves the rest of the budget to the next.

    Returns:
      the cuts, [requests]; a request that does not come to its turn gets 0 tokens.
    """
    prefix, prompt, budget = _int32(prefix_length, prompt_length, budget)
    wanted = _up_to_boundary(prefix, prompt, interval, branching_length)
    cost = _whole_pages(wanted, page_size)
    left = jnp.maximum(budget - (jnp.cumsum(cost, dtype=jnp.int32) - cost), 0)
    # The first that does not fit takes the whole pages that are left; for those after
    # it, `left` is 0.
    tokens = jnp.where(cost <= left, wanted, left // page_size * page_size)
    goes_on = prefix + tokens < prompt
    before = jnp.cumsum(goes_on, dtype=jnp.int32) - goes_on.astype(jnp.int32)
    tokens = jnp.where(before < max_unfinished, tokens, 0)
    return PrefillCut(tokens, prefix + tokens == prompt)


def _up_to_boundary(prefix, prompt, interval: int, branching_length):
    remaining = jnp.maximum(prompt - prefix, 0)
    if not interval:
        return remaining
    stop = next_boundary(prefix, interval, branching_length)
    return jnp.minimum(remaining, stop - prefix)


def _whole_pages(tokens, page_size: int):
    return (tokens + page_size - 1) // page_size * page_size


def _int32(*arrays):
    return tuple(jnp.asarray(a, jnp.int32) for a in arrays)
