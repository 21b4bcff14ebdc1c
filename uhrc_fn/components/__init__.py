"""Component rules; `component_rules` gives those of a cache, in slot order."""

from ..config import CacheConfig, ComponentType
from .base import Component as Component
from .full import FullComponent as FullComponent
from .recurrent import RecurrentComponent as RecurrentComponent
from .swa import SWAComponent as SWAComponent

REGISTRY: dict[ComponentType, type[Component]] = {
    ComponentType.FULL: FullComponent,
    ComponentType.SWA: SWAComponent,
    ComponentType.RECURRENT: RecurrentComponent,
}


def component_rules(config: CacheConfig) -> tuple[Component, ...]:
    """The rules of each component of `config`, in the order of `ComponentType`."""
    return tuple(REGISTRY[c](config) for c in config.components)
