"""Component rules; `component_rules` gives those of a cache, in slot order."""

from ..config import CacheConfig, ComponentType
from .base import Component as Component
from .full import FullComponent as FullComponent

REGISTRY: dict[ComponentType, type[Component]] = {
    ComponentType.FULL: FullComponent,
}


def component_rules(config: CacheConfig) -> tuple[Component, ...]:
    """The rules of each component of `config`, in the order of `ComponentType`.

    Raises:
      NotImplementedError: a component has no rules yet.
    """
    missing = [c.name for c in config.components if c not in REGISTRY]
    if missing:
        raise NotImplementedError(
            f"{', '.join(missing)} has no rules in this version; "
            "build the cache with components=('FULL',)."
        )
    return tuple(REGISTRY[c](config) for c in config.components)
