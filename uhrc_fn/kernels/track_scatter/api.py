"""`track_scatter`: what callers use; the implementation is chosen when lowering."""

import jax
import jax.numpy as jnp

from ...by_platform import by_platform
from ..arguments import (
    as_buffers,
    batched,
    merge_ranks,
    merged_rows,
    require,
    require_lanes,
)
from . import reference, tpu


def track_scatter(buffer, rows, index, mask):
    """Write the state of each request that is tracked to its track slot.

    Args:
      buffer: one array [slots + 1, ...] or a pytree of them. Row 0 is the dummy.
      rows: [requests, ...] final states, in the same tree and of the same dtypes.
      index: int32 [requests], slots; 0 writes nothing.
      mask: bool [requests], which requests are at a boundary.

    Returns:
      The buffers, in place if they were donated. The dummy row never changes.

    Ownership: the slots written are the requests' own, so they are distinct. A slot
    out of range writes nothing. Under a mesh, call it inside a `shard_map`, with the
    rank's own slots.
    """
    buffers, rebuild = as_buffers("track_scatter", buffer)
    states, _ = as_buffers("track_scatter", rows)
    require_lanes("track_scatter", jnp.int32, index=index)
    require_lanes("track_scatter", jnp.bool_, mask=mask)
    wanted = [(index.shape + held.shape[1:], held.dtype) for held in buffers]
    require(
        [(state.shape, state.dtype) for state in states] == wanted
        and mask.shape == index.shape,
        f"track_scatter: states {_named(states)}, {mask.size} masks and {index.size} "
        f"slots for buffers {_named(buffers)}",
        "one state, mask and slot a request, of its buffer's shape and dtype",
        "Cast the final state to the buffer's dtype, as the running slot's is.",
    )
    return rebuild(_track_scatter(buffers, states, jnp.where(mask, index, 0)))


def _named(arrays) -> str:
    return ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in arrays)


@jax.custom_batching.custom_vmap
def _track_scatter(buffers, rows, index):
    if not buffers:
        return buffers
    is_slot = (index > 0) & (index < buffers[0].shape[0])
    write = by_platform(reference.track_scatter, tpu=tpu.track_scatter)
    return write(buffers, rows, jnp.where(is_slot, index, 0))


@_track_scatter.def_vmap
def _track_scatter_of_ranks(num_ranks, in_batched, buffers, rows, index):
    """Write on all ranks at once: their rows are those of one longer buffer."""
    buffers, rows, index = batched(num_ranks, in_batched, [buffers, rows, index])
    num_rows = buffers[0].shape[1] if buffers else 0
    merged = [merge_ranks(buffer) for buffer in buffers]
    states = [merge_ranks(row) for row in rows]
    moved = _track_scatter(merged, states, merged_rows(index, num_rows))
    split = [new.reshape(old.shape) for new, old in zip(moved, buffers, strict=True)]
    return split, [True] * len(split)
