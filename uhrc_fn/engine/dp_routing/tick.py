"""Routing of many requests, one after another, as one program."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...params import HostArray
from .loads import RankLoads, add_load, as_loads, eligible_ranks
from .policies import (
    DEFAULT_AFFINITY,
    NO_RANK,
    Affinity,
    DpSchedulePolicy,
    cache_aware,
    min_running_queue,
    resolve_policy,
    round_robin,
    shape_aware,
)


class RouteBatch(NamedTuple):
    """Requests in the order in which they are routed, one row each."""

    is_real: HostArray
    """bool [requests]; other rows are padding and get `NO_RANK`."""
    wanted_rank: HostArray
    """int32 [requests] rank that the request came with; `NO_RANK` for none."""
    input_tokens: HostArray
    output_tokens: HostArray
    prompt_len: HostArray
    """int32 [requests] tokens that could be hit, 0 for none."""
    matched: HostArray
    """int32 [requests, ranks] tokens that each rank would hit."""


@functools.partial(jax.jit, static_argnames="policy")
def route_batch(
    loads: RankLoads,
    batch: RouteBatch,
    max_running_requests,
    *,
    policy: DpSchedulePolicy | str,
    is_full=False,
    turn=0,
    affinity: Affinity = DEFAULT_AFFINITY,
):
    """Route requests in order; each counts in the load that the next one sees.

    A wanted rank that exists is kept whatever its load; another is ignored. With one
    rank all go there. A request that no rank may get waits: it keeps `NO_RANK`, and
    later requests are routed as if it were not there.

    Args:
      loads: of the ranks, at the start of the tick.
      batch: the requests.
      max_running_requests: int32 [] or [ranks], of a rank.
      policy: static.
      is_full: bool [] or [ranks].
      turn: int32 [] of `round_robin`.
      affinity: of `cache_aware`.

    Returns:
      ``(ranks, loads, turn)``: int32 [requests]; then what the next call takes.
    """
    policy, loads = resolve_policy(policy), as_loads(loads)
    turn = jnp.asarray(turn, jnp.int32)

    def route(carry, request):
        loads, turn = carry
        rank = _pick(
            policy, loads, request, max_running_requests, is_full, turn, affinity
        )
        wanted = request.wanted_rank
        is_kept = (wanted >= 0) & (wanted < loads.num_ranks)
        if loads.num_ranks == 1:
            rank, is_kept = jnp.zeros_like(rank), jnp.zeros_like(is_kept)
        rank = jnp.where(is_kept, wanted, rank)
        rank = jnp.where(request.is_real, rank, NO_RANK)
        turn = turn + (request.is_real & ~is_kept).astype(jnp.int32)
        loads = add_load(loads, rank, request.input_tokens, request.output_tokens)
        return (loads, turn), rank

    batch = RouteBatch(
        jnp.asarray(batch.is_real, bool),
        *(jnp.asarray(x, jnp.int32) for x in batch[1:]),
    )
    (loads, turn), ranks = jax.lax.scan(route, (loads, turn), batch)
    return ranks, loads, turn


def _pick(policy, loads, request, max_running_requests, is_full, turn, affinity):
    is_eligible = eligible_ranks(loads, max_running_requests, is_full)
    tokens = (request.input_tokens, request.output_tokens)
    match policy:
        case DpSchedulePolicy.ROUND_ROBIN:
            return round_robin(turn, loads.num_ranks)
        case DpSchedulePolicy.MIN_RUNNING_QUEUE:
            return min_running_queue(loads, is_eligible)
        case DpSchedulePolicy.SHAPE_AWARE:
            return shape_aware(loads, *tokens, is_eligible)
    matched, prompt_len = request.matched, request.prompt_len
    return cache_aware(loads, *tokens, is_eligible, matched, prompt_len, affinity)
