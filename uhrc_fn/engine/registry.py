"""Which cache serves a model, by its layers and the flags; who else may offer one.

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
from typing import Any

import jax

from ..components import REGISTRY, Component
from ..config import CacheConfig, ComponentType
from ..pools.sizing import NUM_TRACK_SLOTS
from .allocator import PageAllocator, SWAPageAllocator
from .base import BasePrefixCache
from .chunk_cache import ChunkCache, SWAChunkCache
from .flags import CacheFlags
from .radix_cache import RadixCache
from .request import RequestTable
from .swa_radix_cache import SWARadixCache
from .unified import UnifiedRadixCache


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
            # A lock that moves is held twice for a moment.
            max_live_receipts=max(1024, 2 * len(self.requests.full)),
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


def factory_of(name: str) -> Factory:
    """What makes the cache of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in _CACHES:
        raise ValueError(
            f"cache={name!r}; wanted one of {', '.join(_CACHES)}. Register it first."
        )
    return _CACHES[name]


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


def _pages_of_row(requests: RequestTable) -> int:
    return requests.full.shape[1] // requests.page_size
