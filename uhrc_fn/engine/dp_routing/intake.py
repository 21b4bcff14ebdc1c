"""Intake on the host: once a tick, ranks for what has arrived and what was deferred."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .loads import RankLoads, as_loads, check_num_ranks
from .policies import (
    DEFAULT_AFFINITY,
    NO_RANK,
    Affinity,
    DpSchedulePolicy,
    resolve_policy,
)
from .probe import Probe, RouteRequest, estimate_tokens, probe_key
from .tick import RouteBatch, route_batch

_LOG = logging.getLogger(__name__)

Peek = Callable[[Probe], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """Settings of routing.

    Args:
      num_ranks: size of the data-parallel axis.
      max_running_requests: of one rank.
      policy: a `DpSchedulePolicy` or its name; None for `min_running_queue`.
      affinity: thresholds of `cache_aware`.
      page_size: tokens a page, for estimates.
      max_request_len: longest sequence that the engine serves; None for any.

    Raises:
      ValueError: a setting is out of range, or the policy unknown.
    """

    num_ranks: int
    max_running_requests: int
    policy: DpSchedulePolicy | str | None = None
    affinity: Affinity = DEFAULT_AFFINITY
    page_size: int = 1
    max_request_len: int | None = None

    def __post_init__(self):
        check_num_ranks(self.num_ranks)
        object.__setattr__(self, "policy", resolve_policy(self.policy))
        for name in ("max_running_requests", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; wanted at least 1.")
        if min(self.affinity) < 0 or self.affinity.holder_percent > 100:
            raise ValueError(
                f"{self.affinity}; wanted no negative threshold, and holder_percent at "
                "most 100."
            )


class Intake(NamedTuple):
    """What came of a tick; `loads` and `turn` go into the next one."""

    passed: list[tuple[Any, int | None]]
    """Messages in order with their ranks; None for what is no request."""
    deferred: list[RouteRequest]
    """Requests that no rank may get yet, in order."""
    loads: RankLoads
    turn: int


def assign_dp_ranks(
    deferred: Iterable[RouteRequest],
    arrivals: Iterable[Any],
    *,
    router: Router,
    loads: RankLoads,
    peek: Peek | None = None,
    is_full: Any = False,
    new_token_ratio: float = 1.0,
    turn: int = 0,
) -> Intake:
    """Give each request a rank, the deferred ones first.

    What is no `RouteRequest` is a message to the engine: it passes in its place.

    Args:
      deferred: what the tick before left.
      arrivals: messages in order.
      router: the settings.
      loads: of the ranks as they are now, see `count_loads`.
      peek: tokens that each rank would hit of a probe, as `peek_ranks` says;
        `cache_aware` needs it, and nothing else calls it.
      is_full: bool [] or [ranks], where the scheduler has found its batch full.
      new_token_ratio: see `estimate_tokens`.
      turn: of `round_robin`.

    Returns:
      An `Intake`.

    Raises:
      ValueError: `cache_aware` without `peek`, loads of another number of ranks, or a
        request that cannot be estimated.
    """
    messages = [*deferred, *arrivals]
    requests = [m for m in messages if isinstance(m, RouteRequest)]
    loads = as_loads(loads)
    if loads.num_ranks != router.num_ranks:
        raise ValueError(
            f"loads are of {loads.num_ranks} ranks, the router is for "
            f"{router.num_ranks}. Count them with num_ranks={router.num_ranks}."
        )
    batch = _rows(requests, router, peek, new_token_ratio)
    ranks, loads, turn_after = route_batch(
        loads,
        batch,
        router.max_running_requests,
        policy=resolve_policy(router.policy),
        is_full=is_full,
        turn=turn,
        affinity=router.affinity,
    )
    found = iter(np.asarray(ranks).tolist())
    passed, left = [], []
    for message in messages:
        if not isinstance(message, RouteRequest):
            passed.append((message, None))
        elif (rank := next(found)) == NO_RANK:
            left.append(message)
        else:
            passed.append((message, rank))
    return Intake(passed, left, loads, int(turn_after))


def _rows(requests, router: Router, peek: Peek | None, new_token_ratio) -> RouteBatch:
    """Rows for a power of two of requests, so that few programs are compiled."""
    size = 1 << max(len(requests) - 1, 0).bit_length()
    numbers = np.zeros((4, size), np.int32)
    matched = np.zeros((size, router.num_ranks), np.int32)
    for row, request in enumerate(requests):
        wanted = _wanted_rank(request, router)
        estimate = estimate_tokens(
            request,
            page_size=router.page_size,
            max_request_len=router.max_request_len,
            new_token_ratio=new_token_ratio,
        )
        prompt_len = 0
        if wanted == NO_RANK:
            prompt_len, matched[row] = _affinity(request, router, peek)
        numbers[:, row] = wanted, *estimate, prompt_len
    wanted, inputs, outputs, lengths = numbers
    is_real = np.arange(size) < len(requests)
    return RouteBatch(is_real, wanted, inputs, outputs, lengths, matched)


def _wanted_rank(request: RouteRequest, router: Router) -> int:
    if request.dp_rank is None or router.num_ranks == 1:
        return NO_RANK
    if 0 <= request.dp_rank < router.num_ranks:
        return request.dp_rank
    _LOG.warning(
        "dp_rank=%s is ignored; wanted a rank in [0, %d). The request is routed by %s.",
        request.dp_rank,
        router.num_ranks,
        router.policy,
    )
    return NO_RANK


def _affinity(request: RouteRequest, router: Router, peek: Peek | None):
    """Tokens that could be hit, and [ranks] tokens that each rank would hit."""
    nothing = 0, np.zeros(router.num_ranks, np.int32)
    if router.policy != DpSchedulePolicy.CACHE_AWARE or router.num_ranks == 1:
        return nothing
    if peek is None:
        raise ValueError(
            "cache_aware without peek; wanted a function that says what each rank "
            "would hit. Pass one that calls peek_ranks, or choose another policy."
        )
    if (probe := probe_key(request)) is None:
        return nothing
    matched = np.asarray(peek(probe))
    if matched.shape != (router.num_ranks,):
        raise ValueError(
            f"peek gave shape {list(matched.shape)}; wanted [{router.num_ranks}], the "
            "tokens that each rank would hit."
        )
    return len(probe.token_ids), matched
