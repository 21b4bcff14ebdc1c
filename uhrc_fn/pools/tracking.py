"""Track slots: where a forward leaves a snapshot, and when one is given to the tree.

With the extra buffer a request owns a running slot and `tracks` track slots, two of
them in turns: the next boundary is written to one, while the other is kept, the newest
finished snapshot. With a single one both roles fall on it.

    at a boundary of n tokens      next -> written, then kept; last_track_len = n
    published by a live request    kept -> the tree's; a replacement takes its place
    published at the end           kept -> the tree's; all else is freed

Slots and lengths are int32, 0 for none; arrays may carry leading batch axes.
"""

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class TrackSlots(NamedTuple):
    """What a request knows of its track slots."""

    slots: Int32[Array, " *batch tracks"]
    """Its track slots; 0 for one it no longer owns."""
    next_track: Int32[Array, " *batch"]
    """Which of them the next boundary is written to."""
    last_track_len: Int32[Array, " *batch"]
    """Tokens that the kept snapshot covers; 0 while there is none to publish."""


class TrackMetadata(NamedTuple):
    """What a forward must know: always arrays, so that its program stays the same."""

    track_index: Int32[Array, " *batch"]
    """Slot that takes the final state, 0 where none does."""
    track_mask: Bool[Array, " *batch"]
    """Whether it is taken."""


def fresh_tracks(slots) -> TrackSlots:
    """Track slots as allocated: nothing written yet.

    Args:
      slots: int32 [..., tracks].
    """
    slots = jnp.asarray(slots, jnp.int32)
    none = jnp.zeros(slots.shape[:-1], jnp.int32)
    return TrackSlots(slots, none, none)


def kept_track(tracks: TrackSlots):
    """Which track slot the next boundary leaves alone: int32 [...], a role index."""
    return (tracks.next_track + 1) % tracks.slots.shape[-1]


def kept_slot(tracks: TrackSlots):
    """Slot of the newest finished snapshot: int32 [...]."""
    return _pick(tracks.slots, kept_track(tracks))


def advance_tracks(
    tracks: TrackSlots,
    length,
    num_new,
    *,
    interval: int,
    branching_length: Any = 0,
) -> tuple[TrackSlots, TrackMetadata]:
    """Say where a forward leaves its final state, and turn the roles.

    Args:
      tracks: of the requests in the batch.
      length: int32 [...] tokens that the state covers after this forward; of a decode
        step that includes its input token.
      num_new: int32 [...] tokens that the forward computes; 0 for an idle row.
      interval: track interval, static.
      branching_length: int32 [...] where the prefill was cut besides, 0 for nowhere.

    Returns:
      ``(tracks, metadata)``. On a boundary the slot is read, then the roles turn and
      `last_track_len` is `length`; elsewhere nothing changes and the metadata is 0.
    """
    length = jnp.asarray(length, jnp.int32)
    branching = jnp.asarray(branching_length, jnp.int32)
    at_boundary = (length % interval == 0) | (length == branching)
    target = _pick(tracks.slots, tracks.next_track)
    is_tracked = at_boundary & (length > 0) & (jnp.asarray(num_new) > 0) & (target > 0)
    moved = TrackSlots(
        tracks.slots,
        jnp.where(is_tracked, kept_track(tracks), tracks.next_track),
        jnp.where(is_tracked, length, tracks.last_track_len),
    )
    return moved, TrackMetadata(jnp.where(is_tracked, target, 0), is_tracked)


class Outcome(enum.IntEnum):
    """Whether a request offers a snapshot to the tree, or why not."""

    OFFER = 0
    NOTHING = 1
    """No boundary since the last time."""
    NO_REPLACEMENT = 2
    """A live request needs a slot in exchange and got none: it tries again later."""
    LENGTH_MISMATCH = 3
    """The snapshot covers other tokens than the key would have: refused."""


class Donation(NamedTuple):
    """A snapshot on its way to the tree."""

    slot: Int32[Array, " *batch"]
    """`InsertParams.recurrent_value`; 0 unless offered."""
    length: Int32[Array, " *batch"]
    """Tokens to cut the key to: what the snapshot covers; 0 unless offered."""
    outcome: Int32[Array, " *batch"]
    """An `Outcome`."""


def wants_replacement(tracks: TrackSlots, written_length, page_size: int):
    """Whether a live request has a snapshot to publish, and so needs a slot: bool.

    Ask before a slot is taken, evicting one if it must be, for `plan_donation`.
    """
    return _by_length(tracks, written_length, page_size) == int(Outcome.OFFER)


def plan_donation(
    tracks: TrackSlots, written_length, page_size: int, *, is_live, replacement: Any = 0
) -> Donation:
    """Decide whether the kept snapshot is offered to the tree, and with which key.

    The key is cut to exactly the tokens that the snapshot covers. Where that cannot be
    (they are not all written yet, or are no whole pages), nothing is offered: a node
    whose state ran ahead of its key would resume later requests on wrong state.

    Args:
      tracks: of the request.
      written_length: int32 [...] tokens whose KV and state are written and whose ids
        are known: the longest key that it could publish.
      page_size: tokens a page, static.
      is_live: bool [...] whether the request goes on. One that ends needs no
        replacement.
      replacement: int32 [...] slot to put in the kept one's place, 0 for none.

    Returns:
      the donation. Unless offered, its slot and length are 0 and the request keeps
      all it has.
    """
    by_length = _by_length(tracks, written_length, page_size)
    is_short = jnp.asarray(is_live) & (jnp.asarray(replacement) == 0)
    outcome = jnp.where(
        (by_length == int(Outcome.OFFER)) & is_short,
        int(Outcome.NO_REPLACEMENT),
        by_length,
    ).astype(jnp.int32)
    is_offered = outcome == int(Outcome.OFFER)
    return Donation(
        jnp.where(is_offered, kept_slot(tracks), 0),
        jnp.where(is_offered, tracks.last_track_len, 0),
        outcome,
    )


def settle_live(
    tracks: TrackSlots, donation: Donation, is_committed, replacement: Any = 0
):
    """Put a live request's track slots in order after the insert.

    | offered | committed | freed | `last_track_len` |
    |---|---|---|---|
    | yes | yes | nothing: the kept slot is the tree's | 0 |
    | yes | no (the node holds one) | the kept slot, a duplicate | 0 |
    | no | - | the replacement, if any | stays |

    Args:
      tracks: of the request.
      donation: from `plan_donation`.
      is_committed: bool [...], `InsertResult.recurrent_committed`.
      replacement: int32 [...] the slot given to `plan_donation`.

    Returns:
      ``(tracks, freed)``: int32 [...] slot to return to the pool, 0 for none.

    Ownership:
      an offered slot is the tree's if committed, else free; the replacement stands in
      its place, so the request owns as many slots as before.
    """
    is_offered = donation.slot > 0
    replacement = jnp.asarray(replacement, jnp.int32)
    role = jnp.arange(tracks.slots.shape[-1], dtype=jnp.int32)
    is_kept = _align(role, tracks.slots) == kept_track(tracks)[..., None]
    changed = is_kept & is_offered[..., None]
    slots = jnp.where(changed, replacement[..., None], tracks.slots)
    length = jnp.where(is_offered, 0, tracks.last_track_len)
    orphan = jnp.where(jnp.asarray(is_committed), 0, donation.slot)
    freed = jnp.where(is_offered, orphan, replacement)
    return TrackSlots(slots, tracks.next_track, length), freed


def settle_finished(tracks: TrackSlots, donation: Donation, is_committed, running_slot):
    """Give back what a request that ends still owns; also one aborted or retracted.

    Args:
      tracks: of the request.
      donation: from `plan_donation`, or `no_donation`.
      is_committed: bool [...], `InsertResult.recurrent_committed`.
      running_slot: int32 [...] its running slot, 0 for none.

    Returns:
      ``(tracks, freed)``: empty track slots, and int32 [..., 1 + tracks] slots to
      return to the pool, 0 for none.

    Ownership:
      a committed slot is the tree's; the running slot and all other track slots are
      free. Settling again frees nothing.
    """
    is_tree_owned = (tracks.slots == donation.slot[..., None]) & jnp.asarray(
        is_committed
    )[..., None]
    running = jnp.asarray(running_slot, jnp.int32)[..., None]
    own = jnp.where(is_tree_owned, 0, tracks.slots)
    freed = jnp.concatenate([running, own], axis=-1)
    return fresh_tracks(jnp.zeros_like(tracks.slots)), freed


def no_donation(shape=()) -> Donation:
    """Nothing is offered, as by a request that is aborted: batch `shape`."""
    zeros = jnp.zeros(shape, jnp.int32)
    return Donation(zeros, zeros, zeros + int(Outcome.NOTHING))


def _by_length(tracks: TrackSlots, written_length, page_size: int):
    """`Outcome` as far as lengths decide it."""
    length = tracks.last_track_len
    written = jnp.asarray(written_length, jnp.int32)
    is_exact = (length <= written) & (length % page_size == 0)
    outcome = jnp.where(is_exact, int(Outcome.OFFER), int(Outcome.LENGTH_MISMATCH))
    return jnp.where(length > 0, outcome, int(Outcome.NOTHING)).astype(jnp.int32)


def _pick(slots, role):
    return jnp.take_along_axis(slots, role[..., None], axis=-1)[..., 0]


def _align(vector, like):
    return jnp.broadcast_to(vector, like.shape[:-1] + vector.shape)
