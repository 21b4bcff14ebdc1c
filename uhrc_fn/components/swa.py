"""Sliding-window attention: a boundary needs the pages that cover the window."""

import jax.numpy as jnp

from ..config import ComponentType
from ..tree_arrays import NULL
from .base import LOW_STAMP, Component


class SWAComponent(Component):
    """SWA: one page of its own pool a node, or a tombstone once out of the window."""

    type = ComponentType.SWA
    eviction_priority = 1
    removes_node = False
    has_tombstones = True
    entry_is_page = True

    def accepts(self, value):
        """The unbroken run of live pages covers the window, or reaches the root."""
        window = self.config.window_pages
        dead = jnp.cumsum(value == NULL, axis=-1, dtype=jnp.int32)
        length = value.shape[-1]
        before = dead[..., : max(length - window, 0)]
        outside = [(0, 0)] * (value.ndim - 1) + [(min(window, length), 0)]
        return dead == jnp.pad(before, outside)

    def refreshes(self, page, hit_pages, value):
        """The window before the hit and one page more."""
        first = hit_pages - self.config.window_pages - 1
        return (page >= first) & (page < hit_pages) & (value != NULL)

    def locks(self, page, num_pages):
        """The window before the anchor, tombstones too."""
        first = num_pages - self.config.window_pages
        return (page >= first) & (page < num_pages)

    def stamps(self, clock, num_pages: int):
        """Shallow pages are older: the window leaves them first."""
        return clock + jnp.arange(num_pages, dtype=jnp.int32)[None]

    def adopts(self, page, value, offered, is_new, evicted_seqlen):
        """New pages and tombstones, where the request has not let go of the page."""
        del is_new
        whole = page * self.config.page_size >= evicted_seqlen
        return (value == NULL) & (offered != 0) & whole

    def stamps_insert(self, page, cut, taken, value, stamp):
        """The last window as a hit would; what came in before it is low."""
        live = taken | (value != NULL)
        if self.config.swa_inserts_are_recent:
            return live & (page < cut), stamp
        inside = self.refreshes(page, cut, jnp.where(live, 0, NULL))
        low = taken & ~inside
        return inside | low, jnp.where(low, stamp - LOW_STAMP, stamp)
