"""`build_kv_cache`: which cache serves a model, by its layers and the flags.

| layers | radix cache disabled | flags | cache |
|---|---|---|---|
| sliding windows | yes | | `SWAChunkCache` |
| sliding windows | no | | `SWARadixCache` |
| any other | yes, prefill in chunks | | `ChunkCache` |
| any other | yes, whole prompts | | `RadixCache`, disabled |
| recurrent | no | unified tree | `UnifiedRadixCache` (FULL, RECURRENT) |
| full attention | no | unified tree | `UnifiedRadixCache` (FULL,) |
| full attention | no | | `RadixCache` |

By name ("unified") the unified tree serves sliding windows too: (FULL, SWA). Sliding
windows with recurrent layers, (FULL, SWA, RECURRENT), are refused.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from ..components import REGISTRY, Component
from ..config import CacheConfig, ComponentType
from ..pools.limits import check_slots, default_max_running, limit_running
from ..pools.sizing import (
    NUM_TRACK_SLOTS,
    request_owned_slots,
    reserved_slots_per_request,
)
from .allocator import PageAllocator, SWAPageAllocator
from .base import BasePrefixCache
from .chunk_cache import ChunkCache, SWAChunkCache
from .flags import CacheFlags, check_model
from .radix_cache import RadixCache
from .request import RequestTable
from .swa_radix_cache import SWARadixCache
from .unified import UnifiedRadixCache


class Layers(Protocol):
    """What of a model decides its cache; `ModelTraits` is one."""

    @property
    def components(self) -> tuple[Any, ...]:
        """Names or members of `ComponentType`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildContext:
    """All that a factory may look at; counts are those of one rank.

    Args:
      flags: of the engine.
      components: of the model.
      requests: the request table.
      num_pages: FULL pages.
      num_swa_pages: SWA pages; 0 without sliding windows.
      sliding_window_size: in tokens; 0 without.
      num_recurrent_slots: slots; 0 without recurrent layers.
      num_track_slots: of each request, with the extra buffer.
      settings: further settings of `CacheConfig`.
    """

    flags: CacheFlags
    components: tuple[ComponentType, ...]
    requests: RequestTable
    num_pages: int
    num_swa_pages: int = 0
    sliding_window_size: int = 0
    num_recurrent_slots: int = 0
    num_track_slots: int = NUM_TRACK_SLOTS
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_swa(self) -> bool:
        """Whether the model has sliding windows."""
        return ComponentType.SWA in self.components

    @property
    def has_recurrent(self) -> bool:
        """Whether the model has recurrent layers."""
        return ComponentType.RECURRENT in self.components

    def allocator(self) -> PageAllocator:
        """Free lists of the legacy caches."""
        size, ranks = self.flags.page_size, self.flags.dp_size
        return PageAllocator(self.num_pages, size, ranks)

    def swa_allocator(self) -> SWAPageAllocator:
        """The same for both pools of a model with sliding windows."""
        size, ranks = self.flags.page_size, self.flags.dp_size
        return SWAPageAllocator(self.num_pages, self.num_swa_pages, size, ranks)

    def config(self) -> CacheConfig:
        """Settings of the unified cache."""
        flags = self.flags
        settings: dict[str, Any] = dict(
            components=self.components,
            page_size=flags.page_size,
            num_pages=self.num_pages,
            max_prefix_pages=min(self.num_pages, _pages_of_row(self.requests)),
        )
        if self.has_swa:
            settings["num_swa_pages"] = self.num_swa_pages
            settings["sliding_window_size"] = self.sliding_window_size
        if self.has_recurrent:
            settings["num_recurrent_slots"] = self.num_recurrent_slots
            settings["enable_recurrent_extra_buffer"] = (
                flags.enable_recurrent_extra_buffer
            )
            settings["recurrent_track_interval"] = flags.recurrent_track_interval
        return CacheConfig(**{**settings, **self.settings})


Factory = Callable[[BuildContext], BasePrefixCache]


def _radix(ctx: BuildContext) -> BasePrefixCache:
    disable = ctx.flags.disable_radix_cache
    slots = ctx.num_recurrent_slots
    allocator = ctx.allocator()
    return RadixCache(
        ctx.requests, allocator, disable=disable, num_recurrent_slots=slots
    )


def _swa_radix(ctx: BuildContext) -> BasePrefixCache:
    return SWARadixCache(
        ctx.requests,
        ctx.swa_allocator(),
        sliding_window_size=ctx.sliding_window_size,
        disable=ctx.flags.disable_radix_cache,
    )


def _chunk(ctx: BuildContext) -> BasePrefixCache:
    slots = ctx.num_recurrent_slots
    return ChunkCache(ctx.requests, ctx.allocator(), num_recurrent_slots=slots)


def _swa_chunk(ctx: BuildContext) -> BasePrefixCache:
    return SWAChunkCache(
        ctx.requests,
        ctx.swa_allocator(),
        sliding_window_size=ctx.sliding_window_size,
    )


def _unified(ctx: BuildContext) -> BasePrefixCache:
    return UnifiedRadixCache(
        ctx.requests,
        ctx.config(),
        dp_size=ctx.flags.dp_size,
        num_track_slots=ctx.num_track_slots,
        disable=ctx.flags.disable_radix_cache,
    )


_CACHES: dict[str, Factory] = {
    "radix": _radix,
    "swa_radix": _swa_radix,
    "chunk": _chunk,
    "swa_chunk": _swa_chunk,
    "unified": _unified,
}


def register_cache(name: str, factory: Factory) -> None:
    """Let `build_kv_cache` build a cache by a name of its own.

    Args:
      name: what to call it; a name that is taken is replaced.
      factory: makes a `BasePrefixCache` of a `BuildContext`.

    Raises:
      ValueError: the name is empty, or the factory cannot be called.
    """
    if not name or not callable(factory):
        raise ValueError(
            f"register_cache got {name!r} and {factory!r}; wanted a name and a "
            "function that makes a cache of a BuildContext."
        )
    _CACHES[name] = factory


def register_component(name: str, component: type[Component]) -> None:
    """Put a component's rules in one of the three slots of a node.

    Args:
      name: "FULL", "SWA" or "RECURRENT": nodes have three slots and no more.
      component: its rules; a subclass of `Component` whose `type` is that slot.

    Programs that were compiled with the rules before are dropped. Register before a
    cache is built: one that is in use would go on under other rules.

    Raises:
      ValueError: there is no such slot, or the class is not for it.
    """
    slots = ", ".join(ComponentType.__members__)
    kind = ComponentType.__members__.get(name.upper())
    if kind is None:
        raise ValueError(
            f"component {name!r}; wanted one of {slots}. A node has these slots only: "
            "give the new rules to the slot that they replace."
        )
    is_component = isinstance(component, type) and issubclass(component, Component)
    if not is_component or component.type is not kind:
        raise ValueError(
            f"{component!r} for {kind.name}; wanted a subclass of Component with "
            f"type = ComponentType.{kind.name}."
        )
    REGISTRY[kind] = component
    jax.clear_caches()


def choose_cache(flags: CacheFlags, components: tuple[ComponentType, ...]) -> str:
    """Name of the cache for a model's components; see the table of this module."""
    if ComponentType.SWA in components:
        return "swa_chunk" if flags.disable_radix_cache else "swa_radix"
    if flags.disable_radix_cache:
        return "radix" if flags.effective_chunk is None else "chunk"
    return "unified" if flags.enable_unified_radix_tree else "radix"


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
    if name not in _CACHES:
        raise ValueError(
            f"cache={name!r}; wanted one of {', '.join(_CACHES)}. Register it first."
        )
    return _CACHES[name](context)


def _component(name: Any) -> ComponentType:
    return ComponentType[name.upper()] if isinstance(name, str) else ComponentType(name)


def _pages_of_row(requests: RequestTable) -> int:
    return requests.full.shape[1] // requests.page_size


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
