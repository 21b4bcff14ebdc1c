"""What each rank has to do: requests, and tokens of prompts and of answers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...params import HostArray

# Sums of tokens stop here, so that four of them still fit 32 bits.
TOKENS_LIMIT = 2**29 - 1


class RankLoads(NamedTuple):
    """Load by rank; every field is int32 [ranks]."""

    requests: HostArray
    input_tokens: HostArray
    output_tokens: HostArray
    """Expected, see `estimate_tokens`."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks, static."""
        return np.shape(self.requests)[-1]


def count_loads(ranks, input_tokens, output_tokens, num_ranks: int) -> RankLoads:
    """Count what the ranks have, from one row for each request that is there.

    A waiting request counts as much as a running one, and one in mid-prefill is one
    request: a table of the requests that have a rank is the right argument, whatever
    they are doing.

    Args:
      ranks: int32 [requests]; a row outside [0, `num_ranks`) is not counted, so an
        empty row may hold -1.
      input_tokens: int32 [requests] of the prompt.
      output_tokens: int32 [requests] expected.
      num_ranks: static.

    Returns:
      `RankLoads`.

    Raises:
      ValueError: `num_ranks` is no positive number.
    """
    check_num_ranks(num_ranks)
    ranks = jnp.asarray(ranks, jnp.int32)
    is_on = ranks[None, :] == jnp.arange(num_ranks, dtype=jnp.int32)[:, None]

    def by_rank(tokens):
        tokens = jnp.clip(jnp.asarray(tokens, jnp.int32), 0, TOKENS_LIMIT)
        # A plain sum could wrap; each rank's sum stops at the limit instead.
        low = jnp.sum(jnp.where(is_on, tokens % 1024, 0), -1, dtype=jnp.int32)
        high = jnp.sum(jnp.where(is_on, tokens // 1024, 0), -1, dtype=jnp.int32)
        high = high + low // 1024
        total = jnp.minimum(high, TOKENS_LIMIT // 1024) * 1024 + low % 1024
        return jnp.where(high > TOKENS_LIMIT // 1024, TOKENS_LIMIT, total)

    requests = jnp.sum(is_on, -1, dtype=jnp.int32)
    return RankLoads(requests, by_rank(input_tokens), by_rank(output_tokens))


def add_load(loads: RankLoads, rank, input_tokens, output_tokens) -> RankLoads:
    """Add one request to its rank; a rank outside the range (`NO_RANK`) adds nothing.

    Args:
      loads: as so far.
      rank: int32 [].
      input_tokens: int32 [] of the prompt.
      output_tokens: int32 [] expected.
    """
    loads = as_loads(loads)
    is_its = jnp.arange(loads.num_ranks, dtype=jnp.int32) == rank
    new = [jnp.where(is_its, as_tokens(t), 0) for t in (input_tokens, output_tokens)]
    return RankLoads(
        loads.requests + is_its.astype(jnp.int32),
        jnp.minimum(loads.input_tokens + new[0], TOKENS_LIMIT),
        jnp.minimum(loads.output_tokens + new[1], TOKENS_LIMIT),
    )


def eligible_ranks(loads: RankLoads, max_running_requests, is_full=False) -> jax.Array:
    """Ranks that may get another request.

    Args:
      loads: waiting requests included, so what waits on a rank keeps others away.
      max_running_requests: int32 [] or [ranks], of a rank.
      is_full: bool [] or [ranks], where the scheduler has found its batch full.

    Returns:
      bool [ranks].
    """
    requests = as_loads(loads).requests
    return (requests < max_running_requests) & ~jnp.broadcast_to(
        jnp.asarray(is_full, bool), requests.shape
    )


def as_tokens(tokens) -> jax.Array:
    """Clip a count of tokens to what sums can hold."""
    return jnp.clip(jnp.asarray(tokens, jnp.int32), 0, TOKENS_LIMIT)


def as_loads(loads: RankLoads) -> RankLoads:
    """Make arrays of lists.

    Raises:
      ValueError: the fields are no vectors of one length.
    """
    arrays = RankLoads(*(jnp.asarray(field, jnp.int32) for field in loads))
    shapes = [list(field.shape) for field in arrays]
    if shapes != [[arrays.num_ranks]] * 3:
        raise ValueError(
            f"loads have shapes {shapes}; wanted three vectors, an entry a rank. "
            "count_loads makes them."
        )
    return arrays


def check_num_ranks(num_ranks: int) -> None:
    """Refuse a number of ranks that is none."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
        raise ValueError(
            f"num_ranks={num_ranks!r}; wanted an integer of at least 1, the size of "
            "the data-parallel axis."
        )
