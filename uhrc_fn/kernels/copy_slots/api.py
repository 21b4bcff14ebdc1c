"""`copy_slots`: what callers use; the implementation is chosen when lowering."""

import jax
import jax.numpy as jnp

from ...by_platform import by_platform
from ..arguments import as_buffers, batched, merge_ranks, merged_rows, require_lanes
from . import cpu, tpu


def copy_slots(buffers, src, dst):
    """Copy row `src[i]` to row `dst[i]` of every buffer, as if all at once.

    Args:
      buffers: one array [slots + 1, ...] or a pytree of them: temporal and conv states
        of all layers. Row 0 is the dummy.
      src: int32 [lanes], slots to read; 0 copies nothing.
      dst: int32 [lanes], slots to write; 0 copies nothing.

    Returns:
      The buffers, in place if they were donated. The dummy row never changes.

    Ownership: the destinations are slots just allocated: distinct, and no lane's source
    unless that lane copies a slot onto itself. Otherwise the copied rows are undefined.
    A lane with a slot out of range copies nothing. Under a mesh, call it inside a
    `shard_map`, with the rank's own slots.
    """
    arrays, rebuild = as_buffers("copy_slots", buffers)
    require_lanes("copy_slots", jnp.int32, src=src, dst=dst)
    return rebuild(_copy_slots(arrays, src, dst))


@jax.custom_batching.custom_vmap
def _copy_slots(buffers, src, dst):
    if not buffers:
        return buffers
    rows = buffers[0].shape[0]
    is_live = (src > 0) & (src < rows) & (dst > 0) & (dst < rows) & (src != dst)
    src, dst = jnp.where(is_live, src, 0), jnp.where(is_live, dst, 0)
    return by_platform(cpu.copy_slots, tpu=tpu.copy_slots)(buffers, src, dst)


@_copy_slots.def_vmap
def _copy_slots_of_ranks(num_ranks, in_batched, buffers, src, dst):
    """Copy on all ranks at once: their rows are those of one longer buffer."""
    buffers, src, dst = batched(num_ranks, in_batched, [buffers, src, dst])
    rows = buffers[0].shape[1] if buffers else 0
    merged = [merge_ranks(buffer) for buffer in buffers]
    moved = _copy_slots(merged, merged_rows(src, rows), merged_rows(dst, rows))
    split = [new.reshape(old.shape) for new, old in zip(moved, buffers, strict=True)]
    return split, [True] * len(split)
