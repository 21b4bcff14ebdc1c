"""Request tables: which pages, and which slots, each running request owns or shares.

Arrays only: the free lists live in `CacheState`, which also knows who owns what. Row 0
is the dummy of padded lanes and stays empty; 0 is also "none" for pages and slots.
Lengths are in tokens.

A table holds a page each, not a location each token: the location of a token is
``page * page_size + offset``, and a tree node holds a page.
"""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ..tree_arrays import DROP
from .layout import require, require_counts
from .tracking import TrackSlots, fresh_tracks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestConfig:
    """Shape of the request tables.

    Args:
      num_requests: requests that can run at once; arrays have one more row.
      max_pages: pages of the longest request, prompt and output.
      page_size: tokens a page.
      has_swa: whether requests own SWA pages too.
      num_track_slots: track slots of each request: 2 in turns, 1, or 0 without the
        extra buffer.
    """

    num_requests: int
    max_pages: int
    page_size: int
    has_swa: bool = False
    num_track_slots: int = 0

    def __post_init__(self):
        require_counts(self, "num_requests", "max_pages", "page_size")
        require_counts(self, "num_track_slots", least=0)
        require(
            self.num_track_slots in (0, 1, 2),
            f"num_track_slots={self.num_track_slots!r}",
            "0, 1 or 2",
            "Two take turns, so that one is kept while the other is written.",
        )


class Owned(NamedTuple):
    """What requests own, 0-padded: the record that `check_invariants` takes."""

    pages: Int32[Array, " rows pages"]
    swa_pages: Int32[Array, " rows pages"]
    slots: Int32[Array, " rows slots"]


class ReqToTokenPool(eqx.Module):
    """Page tables and lengths of running requests."""

    pages: Int32[Array, " rows pages"]
    """FULL page of each page of a request: the tree's first, then its own."""
    swa_pages: Int32[Array, " rows swa_pages"]
    """SWA page of each, 0 where it slid out of the window; no columns without SWA."""
    length: Int32[Array, " rows"]
    """Tokens whose KV is written, or has a page."""
    protected_length: Int32[Array, " rows"]
    """Tokens at the front whose pages are the tree's."""
    config: RequestConfig = eqx.field(static=True)

    def write_pages(
        self,
        rows: Int32[Array, " requests"],
        start: Int32[Array, " requests"],
        pages: Int32[Array, " requests new"],
        swa_pages: Int32[Array, " requests new"] | None = None,
    ):
        """Write runs of pages into tables.

        Args:
          rows: of the requests; 0 writes nothing.
          start: first page to write.
          pages: pages of each run; 0 ends it and leaves the table as it is.
          swa_pages: the same for the SWA table, where 0 is written too: there a
            request has let its page go. `None` leaves that table alone.
        """
        table = _write_runs(self.pages, rows, start, pages, pages > 0)
        swa_table = self.swa_pages
        if swa_pages is not None:
            swa_table = _write_runs(swa_table, rows, start, swa_pages, pages > 0)
        return dataclasses.replace(self, pages=table, swa_pages=swa_table)

    def write_swa_pages(self, rows, start, swa_pages):
        """Write runs of SWA pages alone; arguments as of `write_pages`."""
        table = _write_runs(self.swa_pages, rows, start, swa_pages, swa_pages > 0)
        return dataclasses.replace(self, swa_pages=table)

    def set_lengths(self, rows, length, protected_length):
        """Say what is written, and how much of it is the tree's."""
        place = _live_rows(rows, self.length)
        return dataclasses.replace(
            self,
            length=self.length.at[place].set(length, **DROP),
            protected_length=self.protected_length.at[place].set(
                protected_length, **DROP
            ),
        )

    def locations(
        self,
        rows: Int32[Array, " *batch"],
        positions: Int32[Array, " *batch"],
        *,
        swa: bool = False,
    ) -> Int32[Array, " *batch"]:
        """Where tokens of requests lie in a KV pool; 0 where they have no page."""
        size = self.config.page_size
        table = self.swa_pages if swa else self.pages
        column = positions // size
        page = table.at[rows, column].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        return jnp.where(page > 0, page * size + positions % size, 0)

    def clear_rows(self, rows: Int32[Array, " requests"]):
        """Empty the rows of requests that ended; nothing is freed by it."""
        place = _live_rows(rows, self.length)
        empty = lambda array: array.at[place].set(0, **DROP)
        return dataclasses.replace(
            self,
            pages=empty(self.pages),
            swa_pages=empty(self.swa_pages),
            length=empty(self.length),
            protected_length=empty(self.protected_length),
        )

    def owned(self) -> Owned:
        """Pages that requests own: not the tree's, and not let go."""
        column = jnp.arange(self.pages.shape[-1], dtype=jnp.int32)
        shared = (self.protected_length // self.config.page_size)[..., None]
        is_own = jnp.broadcast_to(column, self.pages.shape) >= shared
        own = lambda table: jnp.where(is_own[..., : table.shape[-1]], table, 0)
        no_slots = jnp.zeros((*self.length.shape, 0), jnp.int32)
        return Owned(own(self.pages), own(self.swa_pages), no_slots)


class HybridReqToTokenPool(ReqToTokenPool):
    """Request tables of a recurrent model: besides pages, slots by role.

    Args of methods named `rows` are int32 [requests], 0 for a padded lane.
    """

    running_slot: Int32[Array, " rows"]
    """Slot that every forward updates; 0 for none."""
    track_slots: Int32[Array, " rows tracks"]
    """Slots that take snapshots in turns; 0 for one that is no longer the request's."""
    next_track: Int32[Array, " rows"]
    """Which track slot the next boundary writes."""
    last_track_len: Int32[Array, " rows"]
    """Tokens that the kept snapshot covers; 0 while there is none to publish."""

    def assign_slots(self, rows, running, tracks):
        """Give requests the slots that were allocated for them.

        Args:
          rows: of the requests.
          running: int32 [requests] slots. A request that already runs keeps all it
            has, so that the next chunk of a prefill changes nothing.
          tracks: int32 [requests, num_track_slots].

        Returns:
          ``(pool, taken)``: bool [requests], whose slots were taken; the others' stay
          the caller's.
        """
        is_new = (rows > 0) & (self.running_slots(rows) == 0) & (running > 0)
        new_rows = jnp.where(is_new, rows, 0)
        place = _live_rows(new_rows, self.length)
        assigned = dataclasses.replace(
            self, running_slot=self.running_slot.at[place].set(running, **DROP)
        )
        return assigned.put_tracks(new_rows, fresh_tracks(tracks)), is_new

    def running_slots(self, rows):
        """Running slots by row, 0 where there is none."""
        return _read(self.running_slot, rows)

    def tracks(self, rows) -> TrackSlots:
        """What `tracking` works on, by row."""
        return TrackSlots(
            _read(self.track_slots, rows),
            _read(self.next_track, rows),
            _read(self.last_track_len, rows),
        )

    def put_tracks(self, rows, tracks: TrackSlots):
        """Store what `tracking` returned."""
        place = _live_rows(rows, self.length)
        return dataclasses.replace(
            self,
            track_slots=self.track_slots.at[place].set(tracks.slots, **DROP),
            next_track=self.next_track.at[place].set(tracks.next_track, **DROP),
            last_track_len=self.last_track_len.at[place].set(
                tracks.last_track_len, **DROP
            ),
        )

    def commit_to_tree(self, rows, is_committed: Bool[Array, " requests"]):
        """Forget running slots that the tree now owns (base path); nothing is freed."""
        place = _live_rows(jnp.where(is_committed, rows, 0), self.length)
        return dataclasses.replace(
            self, running_slot=self.running_slot.at[place].set(0, **DROP)
        )

    def release_slots(self, rows):
        """Forget all slots of requests.

        Returns:
          ``(pool, freed)``: int32 [requests, 1 + num_track_slots], what they held, for
          the caller to free; 0 for none. Releasing again frees nothing.
        """
        tracks = self.tracks(rows)
        running = self.running_slots(rows)[..., None]
        place = _live_rows(rows, self.length)
        released = dataclasses.replace(
            self, running_slot=self.running_slot.at[place].set(0, **DROP)
        )
        empty = fresh_tracks(jnp.zeros_like(tracks.slots))
        freed = jnp.concatenate([running, tracks.slots], axis=-1)
        return released.put_tracks(rows, empty), freed

    def clear_rows(self, rows):
        """Empty the rows of requests that ended, slots too; see `release_slots`."""
        released, _ = self.release_slots(rows)
        return super(HybridReqToTokenPool, released).clear_rows(rows)

    def owned(self) -> Owned:
        """Pages and slots that requests own."""
        slots = [self.running_slot[..., None], self.track_slots]
        return super().owned()._replace(slots=jnp.concatenate(slots, axis=-1))


def init_req_to_token_pool(config: RequestConfig) -> ReqToTokenPool:
    """Empty tables for a model without recurrent layers."""
    require(
        config.num_track_slots == 0,
        f"num_track_slots={config.num_track_slots}",
        "0 without recurrent layers",
        "Use init_hybrid_req_to_token_pool for a recurrent model.",
    )
    return ReqToTokenPool(**_tables(config), config=config)


def init_hybrid_req_to_token_pool(config: RequestConfig) -> HybridReqToTokenPool:
    """Empty tables for a recurrent model."""
    rows = config.num_requests + 1
    zeros = lambda *shape: jnp.zeros((rows, *shape), jnp.int32)
    return HybridReqToTokenPool(
        **_tables(config),
        config=config,
        running_slot=zeros(),
        track_slots=zeros(config.num_track_slots),
        next_track=zeros(),
        last_track_len=zeros(),
    )


def _tables(config: RequestConfig) -> dict[str, Array]:
    zeros = lambda *shape: jnp.zeros((config.num_requests + 1, *shape), jnp.int32)
    return {
        "pages": zeros(config.max_pages),
        "swa_pages": zeros(config.max_pages if config.has_swa else 0),
        "length": zeros(),
        "protected_length": zeros(),
    }


def _live_rows(rows, by_row):
    """Rows to scatter to: those of padded lanes go past the end."""
    return jnp.where(rows > 0, rows, by_row.shape[0])


def _read(by_row, rows):
    return by_row.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _write_runs(table, rows, start, values, is_written):
    """Write `values[i]` to `table[rows[i]]` from column `start[i]` on."""
    column = start[:, None] + jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    is_written = is_written & (rows > 0)[:, None]
    row = jnp.where(is_written, rows[:, None], table.shape[0])
    return table.at[row, column].set(values, **DROP)
