"""Claims: many lanes agree in parallel on who comes first, as if one after another.

A lane claims a place by writing a number that falls with its turn; the largest number
stays, so the earliest lane wins. Places are claimed in the array that they belong to,
which needs no scratch memory of its size; the caller writes their final values after.
"""

from ..tree_arrays import DROP, fence

# Above every value that a claimed place may hold.
_TOP = 1 << 30


def claim(array, index, turn):
    """Claim ``array[index]`` for the lanes with the lowest `turn`.

    Args:
      array: int32, holding values below 2^29; claimed places are overwritten.
      index: tuple of int32 [lanes]; out of range claims nothing.
      turn: int32 [lanes] in [0, 2^29), different for every lane.

    Returns:
      ``(array, winner)``: `winner` is the turn that holds each lane's place, or
      negative where an earlier value of at least 2^29 stands there.
    """
    array = array.at[index].max(_TOP - turn, **DROP)
    held = array.at[index].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    held, array = fence(held, array)
    return array, _TOP - held


def first_touch(array, index, turn):
    """Whether each lane is the first of those with the same `index`.

    Args:
      array: int32; the places are restored.
      index: tuple of int32 [lanes]; out of range is nobody's.
      turn: int32 [lanes].

    Returns:
      ``(array, is_first)``.
    """
    before = array.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    before, array = fence(before, array)
    claimed, winner = claim(array, index, turn)
    restored = claimed.at[index].set(before, **DROP)
    return restored, winner == turn
