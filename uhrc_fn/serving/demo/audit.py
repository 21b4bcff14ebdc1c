"""Who has each page and slot, and whether one is lost."""

from typing import NamedTuple

import jax
import numpy as np

from ...config import ComponentType
from ..engine import Engine


class Holding(NamedTuple):
    """Entries of one pool by who has them."""

    name: str
    capacity: int
    free: int
    tree: int
    requests: int

    @property
    def leaked(self) -> int:
        """Entries that nobody has."""
        return self.capacity - self.free - self.tree - self.requests


def holdings(engine: Engine) -> list[Holding]:
    """Count the pools of an engine with a cache; reads the device once."""
    cache = engine.state.cache
    assert cache is not None
    free, evictable, protected, owned = jax.device_get(
        (cache.num_free, cache.evictable, cache.protected, engine.state.tables.owned())
    )
    return [
        Holding(
            name=kind.name,
            capacity=cache.config.capacities[kind],
            free=int(free[kind]),
            tree=int(evictable[kind] + protected[kind]),
            requests=int(np.count_nonzero(owned[kind])),
        )
        for kind in cache.config.components
    ]


def leaks(engine: Engine) -> tuple[int, int]:
    """Pages and slots that are neither free, nor the tree's, nor a request's."""
    lost = {holding.name: abs(holding.leaked) for holding in holdings(engine)}
    slots = lost.pop(ComponentType.RECURRENT.name, 0)
    return sum(lost.values()), slots
