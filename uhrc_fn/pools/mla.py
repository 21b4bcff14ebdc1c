"""Paged KV pool of MLA: one compressed latent and one rotary part a token.

Locations and the dummy page are those of `kv`. In a 16-bit dtype two tokens share each
word of memory, so that a row of the buffer holds both.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32

from ..kernels import track_scatter
from .layout import (
    LANES,
    WORD_BYTES,
    bytes_of,
    position,
    replaced,
    require,
    require_counts,
    require_layers,
    round_up,
    with_buffer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Shape of a pool of MLA latents.

    Args:
      num_pages: usable pages of each rank.
      page_size: tokens a page; the buffers round it up to whole words.
      layers: model layers whose latents the pool holds.
      kv_lora_rank: width of the compressed KV; padded to 128 by itself.
      rope_head_dim: width of the rotary part; padded to 128 by itself.
      dtype: of the buffers.
      num_ranks: data-parallel ranks.
    """

    num_pages: int
    page_size: int
    layers: tuple[int, ...]
    kv_lora_rank: int
    rope_head_dim: int
    dtype: str = "bfloat16"
    num_ranks: int = 1

    def __post_init__(self):
        names = ("num_pages", "page_size", "kv_lora_rank", "rope_head_dim", "num_ranks")
        require_counts(self, *names)
        require_layers(self.layers)

    @property
    def packing(self) -> int:
        """Tokens that share a 32-bit word."""
        return max(1, WORD_BYTES // jnp.dtype(self.dtype).itemsize)

    @property
    def rope_start(self) -> int:
        """Where the rotary part of a row starts."""
        return round_up(self.kv_lora_rank, LANES)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's buffer."""
        pages = self.num_ranks * (self.num_pages + 1)
        words = round_up(self.page_size, self.packing) // self.packing
        width = self.rope_start + round_up(self.rope_head_dim, LANES)
        return pages, words, self.packing, width


class MLAPool(eqx.Module):
    """Compressed KV and rotary part of each token, the same on all of `tensor`."""

    buffers: tuple[Float[Array, " pages words packing width"], ...]
    """One a layer; tokens that share a word stand one after another."""
    config: MLAConfig = eqx.field(static=True)

    def set_kv_buffer(
        self,
        layer: int,
        location: Int32[Array, " tokens"],
        latent: Float[Array, " tokens kv_lora_rank"],
        rope: Float[Array, " tokens rope_head_dim"],
    ) -> "MLAPool":
        """Write new tokens of one layer; in place if the pool is donated.

        Args:
          layer: of the model.
          location: where each token goes, distinct; below `page_size`: nowhere.
          latent: compressed KV, in the pool's dtype.
          rope: rotary part, in the pool's dtype.
        """
        c = self.config
        at = position(c.layers, layer)
        _, words, packing, width = c.shape
        for name, part, size in (
            ("latent", latent, c.kv_lora_rank),
            ("rope", rope, c.rope_head_dim),
        ):
            require(
                part.shape == (location.shape[0], size)
                and part.dtype == jnp.dtype(c.dtype),
                f"{name} {part.dtype.name}{list(part.shape)}",
                f"{c.dtype}[tokens, {size}]",
                "Cast or reshape it before it is written.",
            )
        pad = lambda part, to: jnp.pad(part, ((0, 0), (0, to - part.shape[1])))
        rows = [pad(latent, c.rope_start), pad(rope, width - c.rope_start)]
        # A page's buffer may hold more tokens than the page, to fill its last word.
        page, offset = location // c.page_size, location % c.page_size
        stored = jnp.where(location >= c.page_size, page * words * packing + offset, 0)
        written = _write_packed(self.buffers[at], jnp.concatenate(rows, 1), stored)
        return with_buffer(self, at, written)

    def read_pages(self, layer: int, pages: Int32[Array, " *batch"]):
        """Latents and rotary parts of whole pages: [..., page_size, width] each."""
        c = self.config
        buffer = self.buffers[position(c.layers, layer)]
        read = buffer.at[pages].get(mode="promise_in_bounds")
        rows = read.reshape(*read.shape[:-3], -1, read.shape[-1])[..., : c.page_size, :]
        rope = rows[..., c.rope_start : c.rope_start + c.rope_head_dim]
        return rows[..., : c.kv_lora_rank], rope

    def replace_buffer(self, buffers) -> "MLAPool":
        """Take the buffers of all layers from a step that was given this pool's."""
        return MLAPool(replaced(self.buffers, tuple(buffers)), self.config)

    def partition_specs(self, data: str = "data", tensor: str = "tensor") -> "MLAPool":
        """Specs in the pool's own tree: pages over `data`, all on each of `tensor`."""
        del tensor
        specs = (P(data),) * len(self.buffers)
        return MLAPool(specs, self.config)  # type: ignore[arg-type]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers."""
        return bytes_of(self.buffers)


def init_mla_pool(config: MLAConfig) -> MLAPool:
    """An empty pool; run it under `jax.jit` with `out_shardings` to make it sharded."""
    make = lambda: jnp.zeros(config.shape, config.dtype)
    return MLAPool(tuple(make() for _ in config.layers), config)


def _write_packed(buffer, rows, stored):
    """Write tokens that share words with others.

    A row that memory can move holds the tokens of a word, so that the new ones are
    first joined with those that stay.

    Args:
      buffer: [pages, words, packing, width].
      rows: [tokens, width].
      stored: int32 [tokens], place of each token in the buffer, distinct; 0: none.
    """
    _, _, packing, width = buffer.shape
    by_word = buffer.reshape(-1, packing, width)
    word, part = stored // packing, stored % packing
    parts = jnp.arange(packing, dtype=jnp.int32)
    # Which lane brings each token of a lane's word: [tokens, packing], -1 for none.
    wanted = word[:, None] * packing + parts[None]
    is_brought = (wanted[..., None] == stored[None, None]) & (stored > 0)[None, None]
    lane = jnp.arange(stored.shape[0], dtype=jnp.int32)
    lanes = jnp.max(jnp.where(is_brought, lane[None, None], -1), axis=-1)
    old = by_word.at[word].get(mode="clip")
    joined = jnp.where(lanes[..., None] >= 0, rows[lanes], old)
    # The read must be over before the write starts, or XLA copies the whole buffer.
    joined, by_word = jax.lax.optimization_barrier((joined, by_word))
    # The first token of a word writes for all of them.
    earlier = parts[None] < part[:, None]
    is_first = ~jnp.any(earlier & (lanes >= 0), axis=1) & (stored > 0)
    return track_scatter(by_word, joined, word, is_first).reshape(buffer.shape)
