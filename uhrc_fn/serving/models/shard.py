"""A model over the devices of a rank: each has some heads and a part of every MLP."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ...mesh import TENSOR, place
from .linear_attention import LinearHeads, LinearRecurrentAttnBackend
from .model import Model, init_model


def shard_model(model: Model, mesh: Mesh) -> Model:
    """Put a model on a mesh: cut over `tensor`, the same on all ranks.

    Its `config` becomes that of one device's part, as a `shard_map` sees it; pools are
    made from the config that the model had before.

    Args:
      model: of `init_model`, whole.
      mesh: of `make_mesh`.

    Raises:
      ValueError: the devices of `tensor` do not divide the heads or the MLP.
    """
    return place(mesh, as_shards(model, mesh.shape[TENSOR]))


def as_shards(model: Model, ways: int) -> Model:
    """The same weights in the order of `ways` devices, under the config of one."""
    config = model.config.shard(ways, TENSOR)
    part = jax.eval_shape(lambda: init_model(jax.random.key(0), config))
    blocks = [
        dataclasses.replace(block, mixer=_by_device(block.mixer, ways))
        for block in model.blocks
    ]
    leaves = jax.tree.leaves(dataclasses.replace(model, blocks=tuple(blocks)))
    return jax.tree.unflatten(jax.tree.structure(part), leaves)


def _by_device(mixer, ways: int):
    """Q, K and V of a recurrent layer one after another for each device, as the pool
    has the inputs of the convolution."""
    if not isinstance(mixer, LinearRecurrentAttnBackend):
        return mixer
    axes = {"qkv": 1, "conv": 0}
    regrouped = {
        name: _regrouped(getattr(mixer, name), axis, mixer.heads, ways)
        for name, axis in axes.items()
        if hasattr(mixer, name)
    }
    return dataclasses.replace(mixer, **regrouped)


def _regrouped(channels, axis: int, heads: LinearHeads, ways: int):
    """Q, K and V, each of all devices, as those of each device."""
    parts = jnp.split(channels, [heads.k_width, 2 * heads.k_width], axis)
    by_device = zip(*(jnp.split(part, ways, axis) for part in parts), strict=True)
    return jnp.concatenate([piece for pieces in by_device for piece in pieces], axis)
