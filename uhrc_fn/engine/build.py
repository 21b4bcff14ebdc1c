"""`build_kv_cache`: the cache for a model, with its pools and request table."""

import dataclasses
from typing import Any, Protocol

from ..config import ComponentType
from ..pools.limits import check_slots, default_max_running, limit_running
from ..pools.sizing import (
    NUM_TRACK_SLOTS,
    request_owned_slots,
    reserved_slots_per_request,
)
from .base import BasePrefixCache
from .flags import CacheFlags, check_model
from .registry import BuildContext, choose_cache, factory_of
from .request import RequestTable


class Layers(Protocol):
    """What of a model decides its cache; `ModelTraits` is one."""

    @property
    def components(self) -> tuple[Any, ...]:
        """Names or members of `ComponentType`."""
        ...


def build_kv_cache(
    flags: CacheFlags,
    model: Layers,
    *,
    max_request_tokens: int,
    sliding_window_size: int = 0,
    num_pages: int | None = None,
    num_swa_pages: int | None = None,
    num_recurrent_slots: int | None = None,
    num_track_slots: int = NUM_TRACK_SLOTS,
    cache: str | None = None,
    **settings: Any,
) -> BasePrefixCache:
    """Build the cache for a model, with its pools' free lists and request table.

    Args:
      flags: of the engine.
      model: says its components, as `traits_from_hf_config` does.
      max_request_tokens: tokens of the longest request, prompt and output.
      sliding_window_size: window in tokens, for a model with sliding windows.
      num_pages: FULL pages of a rank; `None` for `flags.max_total_tokens`.
      num_swa_pages: SWA pages of a rank; `None` for the ratio of the flags.
      num_recurrent_slots: slots of a rank; `None` for that of the flags.
      num_track_slots: of each request, with the extra buffer.
      cache: name of a registered cache; `None` lets `choose_cache` choose.
      settings: further settings of `CacheConfig`, for the unified cache.

    Raises:
      ValueError: the flags do not suit the model, a pool's size is not known or too
        small, or there is no such cache.
    """
    components = tuple(sorted(_component(c) for c in model.components))
    has_swa = ComponentType.SWA in components
    has_recurrent = ComponentType.RECURRENT in components
    by_name = cache == "unified" and not flags.enable_unified_radix_tree
    asked = dataclasses.replace(flags, enable_unified_radix_tree=True)
    check_model(
        asked if by_name else flags, has_swa=has_swa, has_recurrent=has_recurrent
    )
    pages = _sized("num_pages", num_pages, _tokens_to_pages(flags), "max_total_tokens")
    swa_pages = slots = 0
    if has_swa:
        by_ratio = int(pages * flags.swa_full_tokens_ratio)
        swa_pages = by_ratio if num_swa_pages is None else num_swa_pages
    if has_recurrent:
        total = flags.max_recurrent_state_size
        slots = _sized(
            "num_recurrent_slots",
            num_recurrent_slots,
            total and total // flags.dp_size,
            "max_recurrent_state_size",
        )
    running = _running(flags, pages, max_request_tokens, slots, num_track_slots)
    context = BuildContext(
        flags=flags,
        components=components,
        requests=RequestTable(running, max_request_tokens, flags.page_size, has_swa),
        num_pages=pages,
        num_swa_pages=swa_pages,
        sliding_window_size=sliding_window_size,
        num_recurrent_slots=slots,
        num_track_slots=num_track_slots,
        settings=settings,
    )
    name = choose_cache(flags, components) if cache is None else cache
    return factory_of(name)(context)


def _component(name: Any) -> ComponentType:
    return ComponentType[name.upper()] if isinstance(name, str) else ComponentType(name)


def _tokens_to_pages(flags: CacheFlags) -> int | None:
    tokens = flags.max_total_tokens
    return None if tokens is None else tokens // flags.dp_size // flags.page_size


def _sized(name: str, given: int | None, by_flag: int | None, flag: str) -> int:
    count = by_flag if given is None else given
    if not count or count < 1:
        raise ValueError(
            f"{name}={count}; wanted a positive count for each rank. Pass it, or set "
            f"--{flag.replace('_', '-')}: uhrc_fn.pools.sizing has both from a memory "
            "budget."
        )
    return count


def _running(flags: CacheFlags, pages, request_tokens, slots, num_track_slots) -> int:
    """Requests that can run at once, on all ranks; refuses slots for less than one."""
    tokens = pages * flags.page_size * flags.dp_size
    wanted = flags.max_running_requests
    if wanted is None:
        wanted = default_max_running(tokens, request_tokens)
    if not slots:
        return wanted
    has_tree = not flags.disable_radix_cache
    extra = flags.enable_recurrent_extra_buffer
    owned = request_owned_slots(
        extra_buffer=extra, has_prefix_cache=has_tree, num_track_slots=num_track_slots
    )
    check_slots(slots, owned)
    return limit_running(
        wanted,
        num_slots=slots * flags.dp_size,
        owned=owned,
        reserved=reserved_slots_per_request(
            extra_buffer=extra, has_prefix_cache=has_tree
        ),
        is_user_sized=flags.max_recurrent_state_size is not None,
        dp_size=flags.dp_size,
    )
