"""The contract of a component: what the core asks, as pure array functions.

A component sees a key's path as arrays over pages (page i ends the boundary of i + 1
pages) and never a pool. The core names no component: adding one is one file and one
row in `REGISTRY`.
"""

import abc

import jax
import jax.numpy as jnp

from ..config import CacheConfig, ComponentType
from ..tree_arrays import LAST_ACCESS, LOCK_REF, NULL, VALUE

# What was stamped low goes before everything else of its component: its stamp is this
# much lower, so below zero, and low ones keep their order.
LOW_STAMP = 1 << 30


class Component(abc.ABC):
    """Rules of one kind of state; stateless but for the static config."""

    type: ComponentType
    eviction_priority: int
    """Phases run from low to high; a value also takes those of lower priority."""
    removes_node: bool
    """Whether a victim goes whole, node and all."""
    has_tombstones: bool
    """Whether a live node may lack a value; else every page of the run serves."""
    entry_is_page: bool
    """Whether an entry stands for a page of tokens (else for one slot)."""

    def __init__(self, config: CacheConfig):
        self.config = config

    @property
    def value_field(self) -> int:
        """Field of a node that holds this component's value."""
        return VALUE + self.type

    @property
    def lock_field(self) -> int:
        """Field of a node that counts this component's locks."""
        return LOCK_REF + self.type

    @property
    def stamp_field(self) -> int:
        """Field of a node that holds this component's recency."""
        return LAST_ACCESS + self.type

    @property
    def entry_size(self) -> int:
        """Tokens, or slots, that one entry counts for in `EvictParams`."""
        return self.config.page_size if self.entry_is_page else 1

    @abc.abstractmethod
    def accepts(self, value) -> jax.Array:
        """Which boundaries this component can serve.

        Args:
          value: int32 [..., pages], `NULL` for a tombstone or past the FULL run.

        Returns:
          bool [..., pages]; entry i speaks of the boundary of i + 1 pages.
        """

    @abc.abstractmethod
    def refreshes(self, page, hit_pages, value) -> jax.Array:
        """Which pages a hit of `hit_pages` refreshes.

        Args:
          page: int32 [1, pages]: 0, 1, ...
          hit_pages: int32 [..., 1].
          value: int32 [..., pages]; tombstones have no recency.

        Returns:
          bool [..., pages].
        """

    @abc.abstractmethod
    def locks(self, page, num_pages) -> jax.Array:
        """Which pages a lock on an anchor of `num_pages` holds, by position.

        Tombstones are counted too, so that a value that appears under a lock is
        protected at once.
        """

    def stamps(self, clock, num_pages: int):
        """Recency of the pages of keys of static size `num_pages`.

        Args:
          clock: int32 [requests, 1], the first tick of each request.
          num_pages: static page count.

        Deeper pages are older, so that children go before their parents.
        """
        return clock + (num_pages - 1 - jnp.arange(num_pages, dtype=jnp.int32))[None]

    def grid(self) -> int:
        """Tokens between positions where a checkpoint of this component may stand."""
        return self.config.page_size

    def branching_seqlen(self, full_pages, accepted_pages):
        """Where a checkpoint would have served this match better, 0 for nowhere.

        Args:
          full_pages: pages of the FULL run.
          accepted_pages: deepest boundary that this component accepts.

        Returns:
          The FULL run floored to the grid, in tokens, if beyond what is accepted.
        """
        size = self.config.page_size
        floor = full_pages * size // self.grid() * self.grid()
        return jnp.where(floor > accepted_pages * size, floor, 0)

    def stamps_insert(self, page, cut, taken, value, stamp):
        """Which pages an insert stamps, and how.

        Args:
          page: int32 [1, pages].
          cut: int32 [1, 1], pages that the tree holds after the insert.
          taken: bool [1, pages], the entries that it takes (RECURRENT: or that stood
            where it brings one).
          value: int32 [1, pages], what the nodes held.
          stamp: int32 [1, pages], what `stamps` gives.

        Returns:
          ``(written, stamps)``.
        """
        del taken, value
        return page < cut, stamp

    def adopts(self, page, value, offered, is_new, evicted_seqlen):
        """Which offered entries an insert takes.

        Args:
          page: int32 [1, pages].
          value: int32 [..., pages], what the nodes hold.
          offered: int32 [..., pages], what the caller brings, 0 for nothing.
          is_new: bool [..., pages], nodes that this insert makes.
          evicted_seqlen: tokens whose entries the request has already let go.

        Returns:
          bool [..., pages]. A live value always stays; the caller's is a duplicate.
        """
        del page, evicted_seqlen
        return is_new & (value == NULL) & (offered != 0)
