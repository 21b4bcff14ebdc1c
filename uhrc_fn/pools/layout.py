"""What all pools share: checks of their settings, sharding and size."""

import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LANES = 128
WORD_BYTES = 4


def require(ok: bool, came: str, wanted: str, remedy: str) -> None:
    """Raise a `ValueError` that says what came, what was wanted and what to do."""
    if not ok:
        raise ValueError(f"{came}; wanted {wanted}. {remedy}")


def require_counts(settings, *names: str, least: int = 1) -> None:
    """Check that the named settings are integers of at least `least`."""
    for name in names:
        value = getattr(settings, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= least,
            f"{name}={value!r}",
            f"an integer of at least {least}",
            "Read it from the model, or size it from the memory at hand.",
        )


def require_layers(layers) -> None:
    """Check the model layers that a pool holds buffers for."""
    require(
        isinstance(layers, tuple)
        and len(layers) > 0
        and len(set(layers)) == len(layers),
        f"layers={layers!r}",
        "a tuple of distinct layer numbers, at least one",
        "Name the layers of the model whose state this pool holds.",
    )


def position(layers: tuple[int, ...], layer: int) -> int:
    """Place of a model layer among those of a pool."""
    require(
        layer in layers,
        f"layer {layer}",
        f"one of {layers}",
        "Another pool holds that layer's state.",
    )
    return layers.index(layer)


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above `value`."""
    return -(-value // multiple) * multiple


def replaced(held, given):
    """Take buffers that a step returns for those that the pool holds.

    Raises:
      ValueError: there is not one for each, of its shape and dtype.
    """
    leaves, tree = jax.tree.flatten(held)
    new, new_tree = jax.tree.flatten(given)
    kinds = lambda arrays: [(a.shape, a.dtype.name) for a in arrays]
    require(
        tree == new_tree and kinds(leaves) == kinds(new),
        f"buffers {kinds(new)}",
        f"one a layer, {kinds(leaves)}",
        "Return every layer's buffer from the step, changed or not.",
    )
    return given


def with_buffer(pool, at: int, buffer):
    """The same pool with another buffer at one of its places."""
    buffers = (*pool.buffers[:at], buffer, *pool.buffers[at + 1 :])
    return type(pool)(buffers, pool.config)


def bytes_of(buffers) -> int:
    """Bytes that arrays hold, without a TPU's padding of narrow ones."""
    leaves = jax.tree.leaves(buffers)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def shardings(mesh: Mesh, specs, buffers):
    """Where each buffer lies on a mesh.

    Args:
      mesh: with the axes that `specs` name.
      specs: the pool's `partition_specs()`.
      buffers: the pool, or its shapes.

    Returns:
      `NamedSharding`s, in the pool's own tree.

    Raises:
      ValueError: an axis of a buffer does not divide among the devices.
    """

    def place(spec, buffer):
        for axis, name in enumerate(spec):
            ways = mesh.shape[name] if name else 1
            require(
                buffer.shape[axis] % ways == 0,
                f"axis {axis} of {list(buffer.shape)} over {ways} devices of {name!r}",
                "a size that the devices divide",
                "Choose another mesh; heads and channels are never split unevenly.",
            )
        return NamedSharding(mesh, spec)

    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    return jax.tree.map(place, specs, buffers, is_leaf=is_spec)
