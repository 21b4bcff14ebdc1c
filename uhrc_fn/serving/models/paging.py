"""Where a lane's tokens lie in its pages, and which pages an attention layer reads."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..lanes import Lanes


def positions_of(lanes: Lanes) -> Int32[Array, " lanes tokens"]:
    """Position of each new token in its request, padded ones included."""
    offsets = jnp.arange(lanes.token_ids.shape[1], dtype=jnp.int32)
    return lanes.start[:, None] + offsets[None]


def locations_of(lanes: Lanes, table, page_size: int):
    """Where the KV of each new token goes: int32 [lanes, tokens], 0 for nowhere.

    Args:
      lanes: padded tokens and idle lanes go nowhere.
      table: int32 [lanes, pages], page of each page of a request.
      page_size: tokens a page.
    """
    positions = positions_of(lanes)
    offsets = jnp.arange(lanes.token_ids.shape[1], dtype=jnp.int32)
    page = _columns(table, positions // page_size)
    is_written = (offsets[None] < lanes.num_new[:, None]) & (page > 0)
    return jnp.where(is_written, page * page_size + positions % page_size, 0)


class Span(NamedTuple):
    """The pages that each lane reads."""

    pages: Int32[Array, " lanes pages"]
    """0 where there is none."""
    positions: Int32[Array, " lanes keys"]
    """Position of each token of those pages; -1 where it holds none of the lane's."""


def span_of(lanes: Lanes, table, page_size: int, window: int = 0) -> Span:
    """Pages whose tokens the new tokens of each lane may attend to.

    Args:
      lanes: what is computed.
      table: int32 [lanes, pages].
      page_size: tokens a page.
      window: tokens that one attends to; 0 for all. Of a window no more columns of the
        table are read than `tokens + window` can touch.
    """
    num_lanes, num_pages = table.shape
    tokens = lanes.token_ids.shape[1]
    first = jnp.zeros((num_lanes,), jnp.int32)
    count = num_pages
    if window:
        # Keys from start - window + 1 to start + tokens - 1.
        count = min(num_pages, -(-(window + tokens - 2) // page_size) + 1)
        first = jnp.maximum(lanes.start - window + 1, 0) // page_size
    columns = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    pages = _columns(table, columns) if window else table
    offsets = jnp.arange(page_size, dtype=jnp.int32)
    positions = columns[..., None] * page_size + offsets[None, None]
    end = (lanes.start + lanes.num_new)[:, None, None]
    is_held = (pages > 0)[..., None] & (positions < end)
    held = jnp.where(is_held, positions, -1)
    return Span(pages, held.reshape(num_lanes, count * page_size))


def attends(lanes: Lanes, span: Span, window: int = 0):
    """Which keys each new token attends to: bool [lanes, tokens, keys]."""
    query = positions_of(lanes)[..., None]
    key = span.positions[:, None]
    causal = (key >= 0) & (key <= query)
    return causal & (key > query - window) if window else causal


def _columns(table, columns):
    """Entries of each lane's row, 0 past its end."""
    entries = jnp.take_along_axis(
        table, jnp.clip(columns, 0, table.shape[1] - 1), axis=1
    )
    return jnp.where((columns >= 0) & (columns < table.shape[1]), entries, 0)
