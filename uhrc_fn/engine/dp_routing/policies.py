"""The policies: each picks a rank for one request from the loads of all ranks.

They are written on arrays without branches. A rank is an int32 scalar, or `NO_RANK`
where every rank is full and the request has to wait; ties go to the lowest rank.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .loads import RankLoads, as_loads, as_tokens, check_num_ranks

NO_RANK = -1
_MOST = np.int32(2**31 - 1)


class DpSchedulePolicy(enum.StrEnum):
    """How requests are spread over the data-parallel ranks."""

    ROUND_ROBIN = "round_robin"
    MIN_RUNNING_QUEUE = "min_running_queue"
    CACHE_AWARE = "cache_aware"
    SHAPE_AWARE = "shape_aware"


DEFAULT_POLICY = DpSchedulePolicy.MIN_RUNNING_QUEUE


def resolve_policy(name: str | None = None) -> DpSchedulePolicy:
    """Read a policy's name; None is the default, `min_running_queue`.

    Raises:
      ValueError: there is no such policy.
    """
    if name is None:
        return DEFAULT_POLICY
    try:
        return DpSchedulePolicy(name)
    except ValueError:
        known = ", ".join(DpSchedulePolicy)
        raise ValueError(
            f"dp_schedule_policy={name!r}; wanted one of {known}. Leave it unset for "
            f"{DEFAULT_POLICY}."
        ) from None


class Affinity(NamedTuple):
    """When `cache_aware` prefers the cache to balance. May be traced."""

    max_skew: int = 32
    """Requests that the fullest rank may have more than the emptiest."""
    max_skew_percent: int = 110
    """Both limits have to be passed: what the fullest may have, in percent of the
    emptiest."""
    holder_percent: int = 50
    """A rank holds a prompt if it would hit more than that part of it."""


DEFAULT_AFFINITY = Affinity()


def round_robin(turn, num_ranks: int) -> jax.Array:
    """Take the ranks in turn, whatever their loads; never `NO_RANK`.

    Args:
      turn: int32 [] requests routed so.
      num_ranks: static.
    """
    check_num_ranks(num_ranks)
    return jnp.asarray(turn, jnp.int32) % num_ranks


def min_running_queue(loads: RankLoads, is_eligible) -> jax.Array:
    """Pick the rank with the fewest requests, then the fewest tokens.

    Args:
      loads: waiting requests and those routed in the same tick included.
      is_eligible: bool [ranks], see `eligible_ranks`.
    """
    loads, is_eligible = _checked(loads, is_eligible=is_eligible)
    return _least_loaded(loads, is_eligible)


def shape_aware(
    loads: RankLoads, input_tokens, output_tokens, is_eligible
) -> jax.Array:
    """Pick the rank whose larger sum, of prompts or answers, stays lowest.

    Long prompts so go where long answers are written, and the other way round. Then
    the fewest tokens in all count.

    Args:
      loads: as in `min_running_queue`.
      input_tokens: int32 [] of the request.
      output_tokens: int32 [] that it is expected to write.
      is_eligible: bool [ranks].
    """
    loads, is_eligible = _checked(loads, is_eligible=is_eligible)
    return _lowest_peak(loads, input_tokens, output_tokens, is_eligible)


def cache_aware(
    loads: RankLoads,
    input_tokens,
    output_tokens,
    is_eligible,
    matched,
    prompt_len,
    affinity: Affinity = DEFAULT_AFFINITY,
) -> jax.Array:
    """Pick the least loaded of the ranks that hold the prompt.

    | case, the first that holds | rank |
    |---|---|
    | the eligible ranks' requests differ by more than `affinity` allows | least loaded |
    | some rank would hit more than `holder_percent` of the prompt | least loaded of those, not the longest hit |
    | else | as `shape_aware` |

    Args:
      loads: as in `min_running_queue`.
      input_tokens: int32 [] of the request.
      output_tokens: int32 [] that it is expected to write.
      is_eligible: bool [ranks].
      matched: int32 [ranks] tokens that each rank would hit, see `peek_ranks`; those
        of other ranks than eligible ones do not matter.
      prompt_len: int32 [] tokens that could be hit, see `probe_key`; 0 for none.
      affinity: the thresholds.
    """  # noqa: E501
    loads, is_eligible, matched = _checked(
        loads, is_eligible=is_eligible, matched=matched
    )
    most = jnp.max(jnp.where(is_eligible, loads.requests, 0))
    least = jnp.min(jnp.where(is_eligible, loads.requests, _MOST))
    is_skewed = (most - least > affinity.max_skew) & (
        most > _percent_of(least, affinity.max_skew_percent)
    )
    holds = matched > _percent_of(prompt_len, affinity.holder_percent)
    holds = holds & is_eligible & (jnp.asarray(prompt_len) > 0)
    by_load = _least_loaded(loads, jnp.where(is_skewed, is_eligible, holds))
    by_shape = _lowest_peak(loads, input_tokens, output_tokens, is_eligible)
    return jnp.where(is_skewed | jnp.any(holds), by_load, by_shape)


def _least_loaded(loads: RankLoads, among) -> jax.Array:
    tokens = loads.input_tokens + loads.output_tokens
    return _first_lowest(among, loads.requests, tokens)


def _lowest_peak(loads: RankLoads, input_tokens, output_tokens, among) -> jax.Array:
    prompts = loads.input_tokens + as_tokens(input_tokens)
    answers = loads.output_tokens + as_tokens(output_tokens)
    return _first_lowest(among, jnp.maximum(prompts, answers), prompts + answers)


def _first_lowest(among, *keys) -> jax.Array:
    """First rank of the lowest tuple of keys, or `NO_RANK` of none."""
    for key in keys:
        among = among & (key == jnp.min(jnp.where(among, key, _MOST)))
    return jnp.where(jnp.any(among), jnp.argmax(among), NO_RANK).astype(jnp.int32)


def _percent_of(count, percent) -> jax.Array:
    """Floor of that part of a count, without a product that could overflow."""
    count = jnp.asarray(count, jnp.int32)
    return count // 100 * percent + count % 100 * percent // 100


def _checked(loads: RankLoads, **vectors):
    loads = as_loads(loads)
    for name, vector in vectors.items():
        if np.shape(vector) != (loads.num_ranks,):
            raise ValueError(
                f"{name} has shape {list(np.shape(vector))}; wanted "
                f"[{loads.num_ranks}], an entry for each rank of the loads."
            )
    return loads, *(jnp.asarray(vector) for vector in vectors.values())
