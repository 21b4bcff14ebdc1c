"""A GGUF of the Llama architecture as a `Model`."""

import functools

import jax.numpy as jnp
import numpy as np

from ..models.attention import GQAttention
from ..models.config import ModelConfig
from ..models.layers import MLP
from ..models.model import Block, Model
from .gguf_file import GGUFFile


def llama_config(file: GGUFFile, *, dtype: str = "float32") -> ModelConfig:
    """The config that a file's metadata gives.

    Args:
      file: of the Llama architecture.
      dtype: of weights and activations.

    Raises:
      ValueError: it is of another architecture, or scales its rotary frequencies.
    """
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{file.path}: architecture {architecture!r}; wanted 'llama'. Load another "
            "file: other architectures name and lay out their weights differently."
        )
    if file.get("llama.rope.scaling.type", "none") != "none" or (
        "rope_freqs.weight" in file.tensors
    ):
        raise ValueError(
            f"{file.path}: scaled rotary frequencies; wanted plain ones. Load a model "
            "without rope scaling."
        )
    hidden = file.need("llama.embedding_length")
    heads = file.need("llama.attention.head_count")
    return ModelConfig(
        vocab_size=len(file.need("tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=file.need("llama.feed_forward_length"),
        layers=("gqa",) * file.need("llama.block_count"),
        num_heads=heads,
        num_kv_heads=file.get("llama.attention.head_count_kv", heads),
        head_dim=file.get("llama.attention.key_length", hidden // heads),
        rope_theta=float(file.get("llama.rope.freq_base", 10000.0)),
        rotary_dim=file.get("llama.rope.dimension_count"),
        norm_eps=float(file.need("llama.attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in file.tensors,
        dtype=dtype,
    )


def load_llama(file: GGUFFile, *, dtype: str = "float32") -> Model:
    """The model, its weights dequantised.

    Args:
      file: of the Llama architecture.
      dtype: of weights and activations.

    Raises:
      ValueError: see `llama_config`, or a tensor is missing.
    """
    config = llama_config(file, dtype=dtype)
    array = functools.partial(jnp.asarray, dtype=dtype)
    vector = lambda name: array(file.tensor(f"{name}.weight"))
    return Model(
        embedding=vector("token_embd"),
        blocks=tuple(_block(file, config, layer) for layer in range(config.num_layers)),
        norm=vector("output_norm"),
        head=None if config.tie_embeddings else vector("output").T,
        config=config,
    )


def _block(file: GGUFFile, config: ModelConfig, layer: int) -> Block:
    tensor = lambda name: file.tensor(f"blk.{layer}.{name}.weight")
    vector = lambda name: jnp.asarray(tensor(name), config.dtype)
    linear = lambda name: jnp.asarray(tensor(name).T, config.dtype)
    turned = lambda name, heads: jnp.asarray(
        split_rotary(tensor(name), heads).T, config.dtype
    )
    return Block(
        mixer_norm=vector("attn_norm"),
        mixer=GQAttention(
            query=turned("attn_q", config.num_heads),
            key=turned("attn_k", config.num_kv_heads),
            value=linear("attn_v"),
            out=linear("attn_output"),
            query_norm=None,
            key_norm=None,
            config=config,
            window=0,
        ),
        mlp_norm=vector("ffn_norm"),
        mlp=MLP(gate=linear("ffn_gate"), up=linear("ffn_up"), down=linear("ffn_down")),
    )


def split_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Bring the rows of a Q or K weight into our order.

    A GGUF of this architecture has the two dimensions that turn together side by side;
    ours are half a head apart, see `rotary`.

    Args:
      weight: [heads * head_dim, inner].
      heads: that share the rows.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
