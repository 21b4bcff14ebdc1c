"""Full attention (MHA, GQA, MLA): every page from the root on is needed."""

import jax.numpy as jnp

from ..config import ComponentType
from ..tree_arrays import NULL
from .base import Component


class FullComponent(Component):
    """FULL: one page of the pool a node, never a tombstone on a live node."""

    type = ComponentType.FULL
    eviction_priority = 2
    removes_node = True
    has_tombstones = False
    entry_is_page = True

    def accepts(self, value):
        """A boundary stands where the page is there."""
        return value != NULL

    def refreshes(self, page, hit_pages, value):
        """Root to hit."""
        return (page < hit_pages) & (value != NULL)

    def locks(self, page, num_pages):
        """Root to anchor."""
        return page < num_pages

    def branching_seqlen(self, full_pages, accepted_pages):
        """FULL defines the run; it never falls short of it."""
        del accepted_pages
        return jnp.zeros_like(full_pages)
