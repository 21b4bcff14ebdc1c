"""Pages and slots from a memory budget, before anything is built.

Host arithmetic in Python ints; `entry_bytes.py` has the bytes. Row 0 of every pool is
a dummy that padded lanes may touch: each budget here pays for it. Counts that a
`CacheConfig` takes are those of one rank.
"""

import math
from typing import NamedTuple

NUM_TRACK_SLOTS = 2


def request_owned_slots(
    *,
    extra_buffer: bool,
    has_prefix_cache: bool = True,
    num_track_slots: int = NUM_TRACK_SLOTS,
) -> int:
    """Recurrent slots that a running request owns: what admission asks for.

    Args:
      extra_buffer: snapshots are published through track slots.
      has_prefix_cache: whether there is a tree to publish to.
      num_track_slots: 2, so that one is kept while the other is written; 1 where no
        forward starts before the one before it has been published.

    Returns:
      the running slot, and the track slots where they are used.

    Raises:
      ValueError: another number of track slots.
    """
    if num_track_slots not in (1, 2):
        raise ValueError(
            f"num_track_slots={num_track_slots!r}; wanted 1 or 2. Two let a forward "
            "write one slot while the other is still to be published."
        )
    return 1 + num_track_slots if extra_buffer and has_prefix_cache else 1


def reserved_slots_per_request(
    *, extra_buffer: bool, has_prefix_cache: bool = True
) -> int:
    """Slots that a pool sized by its user should have for each running request.

    More than a request owns: without spare slots every snapshot would be evicted for
    the next request, and nothing would ever hit.

    Args:
      extra_buffer: snapshots are published through track slots.
      has_prefix_cache: whether there is a tree to publish to.

    Returns:
      1 without a tree; 2 on the base path; 3 with the extra buffer, however many track
      slots a request owns.
    """
    if not has_prefix_cache:
        return 1
    return 3 if extra_buffer else 2


def snapshot_headroom(num_slots: int) -> int:
    """Slots of a rank that an auto-sized pool leaves to snapshots: a quarter, >= 1."""
    return max(1, -(-num_slots // 4))


def available_bytes(free: int, total: int, memory_fraction: float) -> int:
    """Bytes for pools: what is free, less the share to leave alone.

    Args:
      free: bytes free on a device, weights loaded.
      total: bytes free before the weights were loaded.
      memory_fraction: share of `total` that weights and pools may use together.

    Returns:
      bytes; at most 0 where the weights alone take the fraction.

    Raises:
      ValueError: the fraction is not in (0, 1].
    """
    if not 0 < memory_fraction <= 1:
        raise ValueError(
            f"memory_fraction={memory_fraction!r}; wanted a share in (0, 1]. "
            "0.9 leaves a tenth to activations."
        )
    return free - math.ceil(total * (1 - memory_fraction))


class SlotBudget(NamedTuple):
    """How a device's pool memory divides between recurrent slots and KV."""

    slots_per_rank: int
    """Usable slots: `CacheConfig.num_recurrent_slots`."""
    kv_bytes: int
    """What is left for KV pages."""


def budget_slots(
    available: int,
    slot_bytes: int,
    *,
    num_slots: int | None = None,
    max_running: int | None = None,
    has_prefix_cache: bool = True,
    ratio: float = 0.9,
    dp_size: int = 1,
) -> SlotBudget:
    """Divide pool memory between recurrent slots and KV.

    Args:
      available: bytes for pools on each device.
      slot_bytes: bytes of a slot on each device.
      num_slots: slots of all ranks together, if the user says so.
      max_running: running requests of all ranks, if the user says so; without a tree
        it is the number of slots.
      has_prefix_cache: whether there is a tree.
      ratio: recurrent bytes for each byte of KV, where nothing else decides.
      dp_size: data-parallel ranks.

    Returns:
      slots of each rank and the bytes left for KV; the dummy row is paid for.

    Raises:
      ValueError: slots do not divide among the ranks, the ratio is not positive, or
        the memory does not hold the slots.
    """
    if num_slots is None and not has_prefix_cache:
        num_slots = max_running
    if num_slots is not None:
        slots = per_rank(num_slots, dp_size)
    else:
        if not ratio > 0:
            raise ValueError(
                f"ratio={ratio!r}; wanted a positive ratio of recurrent to KV bytes. "
                "0.9 is the default."
            )
        slots = int(available * ratio / (1 + ratio)) // slot_bytes - 1
    left = available - (slots + 1) * slot_bytes
    if slots < 1 or left < 0:
        raise ValueError(
            f"available={available} bytes for {max(slots, 1)} recurrent slots of "
            f"{slot_bytes} bytes a rank and the dummy; wanted room for them. Raise "
            "memory_fraction or tensor_size, or ask for fewer slots."
        )
    return SlotBudget(slots, left)


def budget_pages(available: int, page_bytes: int) -> int:
    """Usable KV pages of `page_bytes` in `available` bytes, the dummy page paid for.

    Raises:
      ValueError: not even one page fits.
    """
    pages = available // page_bytes - 1
    if pages < 1:
        raise ValueError(
            f"available={available} bytes for pages of {page_bytes} bytes; wanted room "
            "for one and the dummy. Raise memory_fraction, or shrink page_size or the "
            "recurrent pool."
        )
    return pages


def budget_swa_pages(
    available: int, full_page_bytes: int, swa_page_bytes: int, *, ratio: float = 0.8
) -> tuple[int, int]:
    """Divide KV memory between the FULL and the SWA pool of a hybrid model.

    Args:
      available: bytes for KV on each device.
      full_page_bytes: bytes of a page in the full-attention layers.
      swa_page_bytes: bytes of a page in the sliding-window layers.
      ratio: SWA pages for each FULL page.

    Returns:
      ``(num_pages, num_swa_pages)``, the dummies paid for.

    Raises:
      ValueError: a pool would be empty, or the ratio is not positive.
    """
    if not ratio > 0:
        raise ValueError(
            f"ratio={ratio!r}; wanted a positive ratio of SWA to FULL pages. 0.8 is "
            "the default."
        )
    room = available - full_page_bytes - swa_page_bytes
    num_pages = int(room // (full_page_bytes + ratio * swa_page_bytes))
    num_swa_pages = int(num_pages * ratio)
    if num_pages < 1 or num_swa_pages < 1:
        raise ValueError(
            f"available={available} bytes give {max(num_pages, 0)} FULL and "
            f"{max(num_swa_pages, 0)} SWA pages; wanted at least one of each. Raise "
            "memory_fraction, or shrink page_size."
        )
    return num_pages, num_swa_pages


def per_rank(num_slots: int, dp_size: int) -> int:
    """Slots of one rank, of `num_slots` in all.

    Raises:
      ValueError: they do not divide among the ranks.
    """
    if num_slots < 1 or num_slots % dp_size:
        raise ValueError(
            f"num_slots={num_slots} for dp_size={dp_size}; wanted a positive multiple: "
            "every rank has as many. Round it."
        )
    return num_slots // dp_size
