"""`forward`: one pass of a hybrid model over lanes of tokens, on the pools."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ...pools.kv import KVConfig, init_kv_pool, init_swa_kv_pool
from ...pools.mla import MLAConfig, init_mla_pool
from ...pools.recurrent_state import RecurrentConfig, init_recurrent_state_pool
from ..lanes import Lanes, Pools
from .attention import init_gqa
from .config import ModelConfig
from .gdn import GDN
from .gla import GLA
from .kda import KDA
from .layers import MLP, init_mlp
from .mla import init_mla
from .norm import rms_norm

BACKENDS = {"kda": KDA, "gdn": GDN, "gla": GLA}


class Block(eqx.Module):
    """A layer: a mixer of tokens, then an MLP, each behind its norm."""

    mixer_norm: Float[Array, " hidden"]
    mixer: Any
    """Attention, `(x, kv, layer, lanes)`, or recurrent, `(x, states, layer, lanes)`."""
    mlp_norm: Float[Array, " hidden"]
    mlp: MLP


class Model(eqx.Module):
    """Weights of all layers."""

    embedding: Float[Array, " vocab hidden"]
    blocks: tuple[Block, ...]
    norm: Float[Array, " hidden"]
    head: Float[Array, " hidden vocab"] | None
    """`None` where the embedding is the head too."""
    config: ModelConfig = eqx.field(static=True)

    def partition_specs(self, data: str = "data", tensor: str = "tensor") -> "Model":
        """Specs in the model's own tree, for one that `shard_model` gave.

        Where the part that `config` describes is smaller, `tensor` cuts: heads and MLP.
        Embedding, head and norms are whole on each device.
        """
        del data
        part = jax.eval_shape(lambda: init_model(jax.random.key(0), self.config))

        def cut(whole, part):
            pairs = zip(whole.shape, part.shape, strict=True)
            return P(*(tensor if n != m else None for n, m in pairs))

        return jax.tree.map(cut, self, part)


def init_model(key, config: ModelConfig) -> Model:
    """A model with random weights; from abstract keys, abstract ones."""
    c = config
    of_embedding, of_head, of_blocks = jax.random.split(key, 3)
    ones = lambda: jnp.ones((c.hidden_size,), c.dtype)

    def block(key, layer):
        of_mixer, of_mlp = jax.random.split(key)
        return Block(
            mixer_norm=ones(),
            mixer=_init_mixer(of_mixer, c, layer),
            mlp_norm=ones(),
            mlp=init_mlp(of_mlp, c.hidden_size, c.intermediate_size, c.dtype),
        )

    keys = jax.random.split(of_blocks, c.num_layers)
    draw = lambda key, *shape: jax.random.normal(key, shape, c.dtype)
    scale = c.hidden_size**-0.5
    head = None if c.tie_embeddings else draw(of_head, c.hidden_size, c.vocab_size)
    return Model(
        # Of a tied one the size only matters to the head: a norm comes first.
        embedding=draw(of_embedding, c.vocab_size, c.hidden_size) * scale,
        blocks=tuple(block(keys[layer], layer) for layer in range(c.num_layers)),
        norm=ones(),
        head=None if head is None else head * scale,
        config=c,
    )


def _init_mixer(key, config: ModelConfig, layer: int):
    c, kind = config, config.layers[layer]
    if kind == "gqa":
        return init_gqa(key, c)
    if kind == "swa":
        return init_gqa(key, c, window=c.sliding_window)
    if kind == "mla":
        return init_mla(key, c)
    more = {}
    if kind == "gla":
        more = {"rope_theta": c.rope_theta, "tensor_axis": c.tensor_axis}
    return BACKENDS[kind].init(
        key,
        hidden_size=c.hidden_size,
        num_v_heads=c.recurrent_v_heads,
        v_head_dim=c.recurrent_v_dim,
        num_k_heads=c.recurrent_k_heads,
        k_head_dim=c.recurrent_k_dim,
        conv_kernel_size=c.conv_kernel_size,
        layer_index=layer,
        num_layers=c.num_layers,
        norm_eps=c.norm_eps,
        dtype=c.dtype,
        **more,
    )


def init_pools(
    config: ModelConfig,
    *,
    num_pages: int,
    page_size: int,
    num_swa_pages: int = 0,
    num_slots: int = 0,
    kv_dtype: str | None = None,
    state_dtype: str = "float32",
    num_ranks: int = 1,
) -> Pools:
    """Empty pools for a model.

    Args:
      config: of the model.
      num_pages: usable pages of the layers that attend to all tokens.
      page_size: tokens a page.
      num_swa_pages: usable pages of sliding layers.
      num_slots: usable slots of recurrent states.
      kv_dtype: of cached KV; `None` for the model's.
      state_dtype: of temporal states.
      num_ranks: data-parallel ranks, each with so many pages and slots.
    """
    shared = {
        "page_size": page_size,
        "dtype": kv_dtype or config.dtype,
        "num_ranks": num_ranks,
    }
    kv = _init_kv(config, num_pages, num_swa_pages, shared)
    if not config.recurrent_layers:
        return Pools(kv, None)
    states = _states(config, num_slots, state_dtype, num_ranks)
    return Pools(kv, init_recurrent_state_pool(states))


def _init_kv(c: ModelConfig, num_pages: int, num_swa_pages: int, shared: dict):
    def heads(kind, pages):
        return KVConfig(
            num_pages=pages,
            layers=c.layers_of(kind),
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            **shared,
        )

    if c.has("swa"):
        return init_swa_kv_pool(heads("gqa", num_pages), heads("swa", num_swa_pages))
    if c.has("gqa"):
        return init_kv_pool(heads("gqa", num_pages))
    if not c.has("mla"):
        return None
    latents = MLAConfig(
        num_pages=num_pages,
        layers=c.layers_of("mla"),
        kv_lora_rank=c.kv_lora_rank,
        rope_head_dim=c.rope_head_dim,
        **shared,
    )
    return init_mla_pool(latents)


def _states(
    c: ModelConfig, num_slots: int, state_dtype: str, num_ranks: int
) -> RecurrentConfig:
    return RecurrentConfig(
        num_slots=num_slots,
        layers=c.recurrent_layers,
        num_v_heads=c.recurrent_v_heads,
        v_head_dim=c.recurrent_v_dim,
        num_k_heads=c.recurrent_k_heads,
        k_head_dim=c.recurrent_k_dim,
        conv_kernel_size=c.conv_kernel_size,
        state_dtype=state_dtype,
        # Inputs as they are: a rounded one would tell a chunk's start from its middle.
        conv_dtype=c.dtype,
        num_ranks=num_ranks,
    )


def forward(
    model: Model, pools: Pools, lanes: Lanes
) -> tuple[Pools, Float[Array, " lanes vocab"]]:
    """Compute new tokens: write their KV and states, and say what may come next.

    Pure; under `jax.jit` with the pools donated they are written in place. What a lane
    gets depends on its own row alone.

    Args:
      model: the weights.
      pools: of `init_pools`.
      lanes: what to compute, and where the KV and states are.

    Returns:
      ``(pools, logits)``: float32 [lanes, vocab] after each lane's last new token;
      those of an idle lane mean nothing.
    """
    c = model.config
    # A device's heads and its part of an MLP give a part of the sum that they add.
    whole = lambda y: y if c.tensor_axis is None else jax.lax.psum(y, c.tensor_axis)
    kv, states = pools.kv, pools.states
    x = model.embedding.at[lanes.token_ids].get(mode="clip")
    for layer, (kind, block) in enumerate(zip(c.layers, model.blocks, strict=True)):
        inner = rms_norm(x, block.mixer_norm, c.norm_eps)
        if kind in BACKENDS:
            y, states = block.mixer(inner, states, layer, lanes)
        else:
            y, kv = block.mixer(inner, kv, layer, lanes)
        x = x + whole(y)
        x = x + whole(block.mlp(rms_norm(x, block.mlp_norm, c.norm_eps)))
    last = jnp.maximum(lanes.num_new - 1, 0)[:, None, None]
    x = rms_norm(jnp.take_along_axis(x, last, axis=1)[:, 0], model.norm, c.norm_eps)
    weight, axes = (
        (model.embedding, "lh,vh->lv")
        if model.head is None
        else (model.head, "lh,hv->lv")
    )
    logits = jnp.einsum(axes, x, weight, preferred_element_type=jnp.float32)
    return Pools(kv, states), logits
