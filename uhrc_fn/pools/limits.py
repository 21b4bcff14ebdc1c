"""How many requests the pools carry; pools that cannot run one are refused.

A request that no pool could ever hold would wait for ever: better no server than one
that hangs. Host arithmetic in Python ints.
"""

import warnings

from ..config import CacheConfig
from .sizing import NUM_TRACK_SLOTS, per_rank, request_owned_slots, snapshot_headroom


def default_max_running(num_tokens: int, context_length: int) -> int:
    """Running requests to aim at where the user does not say: 2048 to 4096."""
    return min(max(int(num_tokens / context_length * 512), 2048), 4096)


def limit_running(
    wanted: int,
    *,
    num_slots: int,
    owned: int,
    reserved: int,
    is_user_sized: bool,
    dp_size: int = 1,
) -> int:
    """Cut the running requests to what the recurrent pool can carry.

    Args:
      wanted: running requests of all ranks, as asked or by default.
      num_slots: usable slots of all ranks.
      owned: `request_owned_slots`.
      reserved: `reserved_slots_per_request`.
      is_user_sized: the user chose `num_slots`: keep `reserved` a request, and warn
        where snapshots are left nothing. Else keep `snapshot_headroom`.
      dp_size: data-parallel ranks.

    Returns:
      running requests of all ranks; divide by `dp_size` for one.

    Raises:
      ValueError: a rank could not run one request, and would wait for ever.
    """
    slots = per_rank(num_slots, dp_size)
    check_slots(slots, owned)
    if wanted < dp_size:
        raise ValueError(
            f"wanted={wanted} running requests for dp_size={dp_size}; wanted one a "
            "rank at least. Raise it, or use fewer ranks."
        )
    if not is_user_sized:
        running = max(1, (slots - snapshot_headroom(slots)) // owned)
        return min(wanted, running * dp_size)
    cap = num_slots // reserved // dp_size * dp_size
    if cap < dp_size:
        raise ValueError(
            f"num_slots={num_slots} with {reserved} reserved for each request and "
            f"dp_size={dp_size} leave a rank without a request; wanted at least "
            f"{reserved * dp_size} slots. Raise num_slots, or use fewer ranks."
        )
    limit = min(wanted, cap)
    if num_slots - limit * owned < dp_size:
        warnings.warn(
            f"{limit} running requests of {owned} slots leave {num_slots} slots "
            "without room for snapshots: prefixes will hardly ever hit. Raise "
            "num_slots or lower the running requests.",
            stacklevel=2,
        )
    return limit


def check_slots(slots_per_rank: int, owned: int) -> None:
    """Refuse a recurrent pool that cannot run one request.

    Raises:
      ValueError: fewer slots than one request owns.
    """
    if slots_per_rank < owned:
        raise ValueError(
            f"{slots_per_rank} recurrent slots a rank; wanted at least {owned}, what "
            "one request owns: else it would wait for ever. Raise the number of slots, "
            "or the memory for them."
        )


def check_pools(
    config: CacheConfig,
    *,
    request_tokens: int = 0,
    chunk_tokens: int = 0,
    num_track_slots: int = NUM_TRACK_SLOTS,
) -> None:
    """Refuse pools that cannot run one request, before they are built.

    Args:
      config: the cache's settings.
      request_tokens: tokens of the longest request, prompt and output; 0 for unknown.
      chunk_tokens: tokens of the longest prefill chunk; 0 for unknown.
      num_track_slots: as in `request_owned_slots`.

    Raises:
      ValueError: a pool is smaller than one request needs; the message says by how
        much and what to raise.
    """
    pages = lambda tokens: -(-tokens // config.page_size)
    needs = [("num_pages", config.num_pages, pages(request_tokens))]
    if config.has_swa:
        live = config.window_pages + 1 + pages(chunk_tokens)
        needs.append(("num_swa_pages", config.num_swa_pages, live))
    for name, has, needed in needs:
        if has < needed:
            raise ValueError(
                f"{name}={has}; wanted at least {needed}, what one request needs: else "
                f"it would wait for ever. Raise {name}, or serve shorter requests."
            )
    if config.has_recurrent:
        owned = request_owned_slots(
            extra_buffer=config.enable_recurrent_extra_buffer,
            num_track_slots=num_track_slots,
        )
        check_slots(config.num_recurrent_slots, owned)
