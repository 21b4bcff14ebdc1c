"""Many devices: one tree a rank on a mesh, each rank alone.

    mesh = make_mesh(data=2, tensor=4)
    ranks = init_ranks(mesh, lambda: uhrc_fn.init(config))
    match = jax.jit(per_rank(uhrc_fn.match_prefix, mesh), donate_argnums=0)
    ranks, result = match(ranks, stacked_params)

What belongs to a rank has a leading axis of ranks, cut over `data`; the devices of
`tensor` each hold all of their rank's row and do the same with it. Pools say themselves
how they lie (`partition_specs`): the rows of all ranks follow one another, and heads
are cut over `tensor`. No operation needs another rank or device, so that none holds a
collective.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .pools import layout
from .pools.layout import require

DATA, TENSOR = "data", "tensor"


def make_mesh(data: int, tensor: int = 1, devices=None) -> Mesh:
    """A mesh of `data` ranks, each of `tensor` devices.

    Args:
      data: data-parallel ranks, each with a tree of its own.
      tensor: devices of a rank.
      devices: which, in order; `None` for the first of all processes' devices.

    Raises:
      ValueError: there are not so many devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    require(
        data >= 1 and tensor >= 1 and data * tensor <= len(devices),
        f"data={data} and tensor={tensor} with {len(devices)} devices",
        "at least 1 of each, and no more devices than there are",
        "Choose a smaller mesh; on CPU, --xla_force_host_platform_device_count in "
        "XLA_FLAGS makes virtual devices.",
    )
    grid = np.asarray(devices[: data * tensor]).reshape(data, tensor)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def partition_specs(tree):
    """How each array of a tree lies on a mesh, pools as they say themselves."""
    of = lambda x: x.partition_specs(DATA, TENSOR) if _lies(x) else P(DATA)
    return jax.tree.map(of, tree, is_leaf=_lies)


def shardings(mesh: Mesh, tree):
    """The same as `NamedSharding`s, for `jax.jit` and `jax.device_put`.

    Args:
      mesh: of `make_mesh`.
      tree: arrays or their shapes, with the leading axis of ranks.

    Raises:
      ValueError: an axis of an array does not divide among the devices.
    """
    return layout.shardings(mesh, partition_specs(tree), tree)


def init_ranks(mesh: Mesh, make: Callable):
    """Build what all ranks start with, each device its own part.

    Args:
      mesh: of `make_mesh`.
      make: gives what one rank starts with; pools for all of them (`num_ranks`).

    Returns:
      the same with a leading axis of ranks, on the mesh.
    """
    make_all = _for_all(mesh, make)
    out_shardings = shardings(mesh, jax.eval_shape(make_all))
    return jax.jit(make_all, out_shardings=out_shardings)()


def shapes_of_ranks(mesh: Mesh, make: Callable):
    """What `init_ranks` gives as shapes, placed: to compile for devices far away."""
    return placed_shapes(mesh, jax.eval_shape(_for_all(mesh, make)))


def placed_shapes(mesh: Mesh, tree):
    """The shapes of arrays with a leading axis of ranks, placed on a mesh."""
    place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    return jax.tree.map(place, tree, shardings(mesh, tree))


def _for_all(mesh: Mesh, make: Callable) -> Callable:
    _check_mesh(mesh)
    num_ranks = mesh.shape[DATA]
    stack = lambda x: jnp.broadcast_to(x, (num_ranks, *jnp.shape(x)))
    return lambda: _map_rows(stack, make())


def place(mesh: Mesh, tree):
    """Put host arrays on a mesh; every process has all of them and keeps its part."""
    _check_mesh(mesh)
    tree = jax.tree.map(np.asarray, tree)

    def put(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    return jax.tree.map(put, tree, shardings(mesh, tree))


def per_rank(
    function: Callable, mesh: Mesh, out_specs=None, *, check_vma: bool = True
) -> Callable:
    """A function of one rank as a function of all ranks, by `jax.shard_map`.

    Unlike `vmap`, it lets each rank take its own branches: no rank waits for another.

    Args:
      function: of arrays and pools of one rank, by position; static arguments are
        bound before, with `functools.partial`. What it returns of a rank may depend on
        the device of `tensor` only in a pool.
      mesh: of `make_mesh`.
      out_specs: where it returns a pool, `partition_specs` of what it returns (of the
        arguments that it replaces); a prefix of the tree will do.
      check_vma: of `jax.shard_map`: prove while tracing that what is no pool is the
        same on all devices of a rank.

    Returns:
      A function of the same arguments with a leading axis of ranks, to be jitted.
    """
    _check_mesh(mesh)
    out_specs = P(DATA) if out_specs is None else out_specs

    def on_rank(*args):
        result = function(*_map_rows(lambda x: x[0], args))
        return _map_rows(lambda x: jnp.asarray(x)[None], result)

    def on_all(*args):
        mapped = jax.shard_map(
            on_rank,
            mesh=mesh,
            in_specs=partition_specs(args),
            out_specs=out_specs,
            check_vma=check_vma,
        )
        return mapped(*args)

    return on_all


def _lies(x) -> bool:
    """Whether it says itself how it lies on a mesh."""
    return hasattr(type(x), "partition_specs")


def _map_rows(function: Callable, tree):
    """Map the arrays that have an axis of ranks; pools have none."""
    of = lambda x: x if _lies(x) else function(x)
    return jax.tree.map(of, tree, is_leaf=_lies)


def _check_mesh(mesh: Mesh) -> None:
    axes = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    require(
        axes == {DATA: AxisType.Auto, TENSOR: AxisType.Auto},
        f"a mesh of {axes}",
        f"axes {DATA!r} and {TENSOR!r}, both Auto",
        "Build it with uhrc_fn.mesh.make_mesh; an axis may be of one device.",
    )
