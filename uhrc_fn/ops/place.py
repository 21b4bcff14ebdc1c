"""Give every new page of a batch a way in its bucket, and equal pages one leader.

The outcome is that of one page after another: a page fails only where its bucket is
full. Few pages are ranked by comparing all pairs, which is a handful of array steps.
Many pages claim ways in rounds, whose cost is linear; there a page may, with tiny
odds, stay unplaced, and `insert_batch` then turns to one request after another.
"""

import functools

import jax
import jax.numpy as jnp

from ..config import WAYS
from ..tree_arrays import IN_BOUNDS, NULL, entry_index
from .claim import claim
from .path import KeyPages

# Up to this many pages a table of all pairs is cheaper than rounds of claims.
MAX_PAIRED = 256

# A page fails a round with the odds that an earlier page of the batch took its way:
# under 2 % when a batch fills half of the table's mean load at once.
ROUNDS = 6


def place(table, pages: KeyPages, wants):
    """Place the pages that `wants` marks.

    Args:
      table: children table; claims may be left in it, see `claimed`.
      pages: the keys.
      wants: bool [requests, pages].

    Returns:
      ``(table, leader, claimed)``. `leader` is the turn (row-major place in the
      batch) of the first page equal to each, `NULL` where it could not be placed.
      `claimed` is the table slot of a leader, else `NULL`; the caller must write
      every claimed slot's node id.
    """
    turn = jnp.arange(wants.size, dtype=jnp.int32).reshape(wants.shape)
    nth_free_slot = functools.partial(_nth_free_slot, pages)
    if wants.size <= MAX_PAIRED:
        leader, claimed = _by_pairs(pages, wants, turn, nth_free_slot)
        return table, leader, claimed
    return _by_rounds(table, pages, wants, turn, nth_free_slot)


def place_key(table, pages: KeyPages, wants, value):
    """Place the pages of one key that `wants` marks.

    Args:
      table: children table; claims may be left in it, see `place`.
      pages: one key.
      wants: bool [1, pages].
      value: int32 [1, pages], the caller's entries.

    Returns:
      ``(table, slot, is_twin, is_second)``: the table slot of each page or `NULL`,
      whether an earlier page has its bucket and fingerprint, and whether an earlier
      page brings the same entry: None where there are too many pages to compare.
    """
    if wants.size > MAX_PAIRED:
        table, leader, claimed = place(table, pages, wants)
        turn = jnp.arange(wants.size, dtype=jnp.int32)[None]
        return table, claimed, wants & (leader != turn), None
    # [other, page]: XLA for CPU vectorises a reduction over the major axis.
    # Worked out once, in one array: each pair would do it anew, and many arrays at
    # once make XLA hand some of them to another thread, which a lone call waits for.
    lanes = [pages.bucket, pages.fingerprint, wants.astype(jnp.int32), value]
    lanes = jax.lax.optimization_barrier(jnp.concatenate(lanes))
    bucket, print_, asks, entry = lanes[0], lanes[1], lanes[2] != 0, lanes[3]
    order = jnp.arange(wants.size, dtype=jnp.int32)
    earlier = asks[:, None] & (order[:, None] < order[None])
    neighbour = earlier & (bucket[:, None] == bucket[None])
    twin = neighbour & (print_[:, None] == print_[None])
    second = earlier & (entry[:, None] == entry[None])
    # Three counts of at most 256 in one sum.
    code = jnp.where(neighbour, 1, 0) + jnp.where(twin, 1 << 10, 0)
    code = jnp.sum(code + jnp.where(second, 1 << 20, 0), axis=0, dtype=jnp.int32)[None]
    slot = _nth_free_slot(pages, code & 1023, wants)
    return table, slot, (code >> 10) & 1023 != 0, code >> 20 != 0


def _nth_free_slot(pages: KeyPages, n, asks):
    """Table slot of the n-th free way of each page's bucket, or `NULL`."""
    ways = jnp.arange(WAYS, dtype=jnp.int32)[None, None]
    free = pages.free_ways[..., None]
    is_free = (free >> ways) & 1 != 0
    below = jnp.left_shift(1, ways) - 1
    # The k-th free way has rank k; a taken one has none.
    is_it = is_free & (jax.lax.population_count(free & below) == n[..., None])
    way = jnp.max(jnp.where(is_it, ways, NULL), -1)
    return jnp.where(asks & (way != NULL), pages.bucket * WAYS + way, NULL)


def _by_pairs(pages: KeyPages, wants, turn, nth_free_slot):
    """Rank pages within their bucket by comparing all pairs."""
    bucket = pages.bucket.reshape(-1)
    print_ = pages.fingerprint.reshape(-1)
    asks = wants.reshape(-1)
    order = turn.reshape(-1)
    # [other, page]: XLA for CPU vectorises a reduction over the major axis.
    same_bucket = (bucket[:, None] == bucket[None]) & asks[:, None]
    equal = same_bucket & (print_[:, None] == print_[None])
    most = jnp.int32(order.shape[0])
    leader = jnp.min(jnp.where(equal, order[:, None], most), axis=0)
    leads = asks & (leader == order)
    earlier = same_bucket & leads[:, None] & (order[:, None] < order[None])
    rank = jnp.sum(earlier, axis=0, dtype=jnp.int32)
    leads = leads.reshape(wants.shape)
    claimed = nth_free_slot(rank.reshape(wants.shape), leads)
    found = claimed.reshape(-1).at[jnp.minimum(leader, most - 1)].get(**IN_BOUNDS)
    leader = jnp.where(asks & (found != NULL), leader, NULL)
    return leader.reshape(wants.shape), claimed


def _by_rounds(table, pages: KeyPages, wants, turn, nth_free_slot):
    """Claim ways in rounds, in the table itself."""
    num_lanes = wants.size
    num_free = jax.lax.population_count(pages.free_ways)
    # The start depends on the hash alone, so that equal pages try the same ways.
    start = (pages.fingerprint >> 16) & 0xFFFF
    code = (pages.bucket, pages.fingerprint)
    waits = wants
    leader = claimed = jnp.full_like(turn, NULL)
    for attempt in range(ROUNDS):
        slot = nth_free_slot((start + attempt) % jnp.maximum(num_free, 1), waits)
        row, column = entry_index(slot)
        # Later rounds write smaller numbers and never displace an earlier winner.
        offset = attempt * num_lanes
        table, winner = claim(table, (row, column + WAYS), turn + offset)
        winner = winner - offset
        is_ours = (slot != NULL) & (winner >= 0) & (winner < num_lanes)
        winner = jnp.clip(winner, 0, num_lanes - 1)
        same = [c.reshape(-1).at[winner].get(**IN_BOUNDS) == c for c in code]
        placed = is_ours & same[0] & same[1]
        leader = jnp.where(placed, winner, leader)
        claimed = jnp.where(placed & (winner == turn), slot, claimed)
        waits = waits & ~placed
    return table, leader, claimed
