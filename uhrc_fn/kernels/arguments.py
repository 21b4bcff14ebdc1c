"""What the kernels ask of their arguments, and how a leading axis of ranks folds in."""

import jax
import jax.numpy as jnp


def require(ok: bool, came: str, wanted: str, remedy: str) -> None:
    """Raise a `ValueError` that says what came, what was wanted and what to do."""
    if not ok:
        raise ValueError(f"{came}; wanted {wanted}. {remedy}")


def as_buffers(name: str, buffers):
    """Flatten one array or a pytree of arrays.

    Returns:
      (arrays, rebuild): a list, and what turns such a list into the caller's tree.
    """
    arrays, tree = jax.tree.flatten(buffers)
    for array in arrays:
        require(
            array.ndim >= 1 and array.shape[0] == arrays[0].shape[0],
            f"{name}: buffers of shapes {[a.shape for a in arrays]}",
            "the same number of rows in all of them",
            "Call it once for each pool.",
        )
    return list(arrays), lambda moved: jax.tree.unflatten(tree, moved)


def require_lanes(name: str, dtype, **lanes: jax.Array) -> None:
    """Check that all of `lanes` are vectors of one length and of `dtype`."""
    sizes = {lane.shape for lane in lanes.values()}
    for key, lane in lanes.items():
        require(
            lane.ndim == 1 and lane.dtype == dtype and len(sizes) == 1,
            f"{name}: {key} is {lane.dtype}{list(lane.shape)}",
            f"{jnp.dtype(dtype).name}[lanes], as long as the others",
            "One lane stands for one request; give lanes without work a 0.",
        )


def batched(num_ranks: int, is_batched, tree):
    """Give every leaf the leading axis that `vmap` maps over."""
    spread = lambda leaf, has_axis: (
        leaf if has_axis else jnp.broadcast_to(leaf, (num_ranks, *leaf.shape))
    )
    return jax.tree.map(spread, tree, is_batched)


def merge_ranks(array: jax.Array) -> jax.Array:
    """Turn [ranks, rows, ...] into [ranks * rows, ...], rank by rank."""
    return array.reshape(-1, *array.shape[2:])


def merged_rows(rows: jax.Array, num_rows: int) -> jax.Array:
    """Row numbers [ranks, lanes] of each rank's own buffer in the merged one.

    What is none, or out of range, becomes 0 everywhere.
    """
    first = jnp.arange(rows.shape[0], dtype=rows.dtype)[:, None] * num_rows
    is_row = (rows > 0) & (rows < num_rows)
    return jnp.where(is_row, rows + first, 0).reshape(-1)
