"""Paged KV pools of K and V heads (MHA, GQA, MQA), sliding windows too.

A token's location is `page * page_size + offset`. Page 0 is the dummy: what is written
to it is dropped, so that 0 means "none" in every table of pages or locations. With
several ranks the buffers of all follow one another, each with a dummy of its own.
"""

import dataclasses

import equinox as eqx
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
class KVConfig:
    """Shape of a pool of K and V heads.

    Args:
      num_pages: usable pages of each rank.
      page_size: tokens a page.
      layers: model layers whose KV the pool holds.
      num_kv_heads: heads of K, and of V.
      head_dim: width of a head; padded to 128.
      dtype: of the buffers.
      num_ranks: data-parallel ranks.
    """

    num_pages: int
    page_size: int
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    num_ranks: int = 1

    def __post_init__(self):
        names = ("num_pages", "page_size", "num_kv_heads", "head_dim", "num_ranks")
        require_counts(self, *names)
        require_layers(self.layers)

    @property
    def packing(self) -> int:
        """Entries that share a 32-bit word."""
        return max(1, WORD_BYTES // jnp.dtype(self.dtype).itemsize)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a layer's buffer."""
        fused = round_up(2 * self.num_kv_heads, self.packing) // self.packing
        pages = self.num_ranks * (self.num_pages + 1)
        width = round_up(self.head_dim, LANES)
        return pages, self.page_size, fused, self.packing, width


class KVPool(eqx.Module):
    """K and V of each token, heads interleaved as K0 V0 K1 V1 and packed into words."""

    buffers: tuple[Float[Array, " pages page fused packing width"], ...]
    """One a layer."""
    config: KVConfig = eqx.field(static=True)

    def set_kv_buffer(
        self,
        layer: int,
        location: Int32[Array, " tokens"],
        k: Float[Array, " tokens heads head_dim"],
        v: Float[Array, " tokens heads head_dim"],
    ) -> "KVPool":
        """Write new tokens of one layer; in place if the pool is donated.

        Args:
          layer: of the model.
          location: where each token goes, distinct; below `page_size`: nowhere.
          k: keys, in the pool's dtype.
          v: values, in the pool's dtype.
        """
        at = position(self.config.layers, layer)
        buffer, rows = self.buffers[at], self._fuse(k, v)
        tokens = buffer.reshape(-1, *buffer.shape[2:])
        is_written = location >= self.config.page_size
        written = track_scatter(tokens, rows, location, is_written)
        return with_buffer(self, at, written.reshape(buffer.shape))

    def read_pages(self, layer: int, pages: Int32[Array, " *batch"]):
        """K and V of whole pages: [..., page_size, heads, head_dim] each."""
        c = self.config
        buffer = self.buffers[position(c.layers, layer)]
        read = buffer.at[pages].get(mode="promise_in_bounds")
        heads = read.reshape(*read.shape[:-3], -1, read.shape[-1])
        # Under a mesh a shard holds its own heads only; padding heads come last.
        num_heads = min(c.num_kv_heads, heads.shape[-2] // 2)
        heads = heads[..., : 2 * num_heads, : c.head_dim]
        return heads[..., 0::2, :], heads[..., 1::2, :]

    def replace_buffer(self, buffers) -> "KVPool":
        """Take the buffers of all layers from a step that was given this pool's."""
        return KVPool(replaced(self.buffers, tuple(buffers)), self.config)

    def partition_specs(self, data: str = "data", tensor: str = "tensor") -> "KVPool":
        """Specs in the pool's own tree: pages over `data`, heads over `tensor`."""
        spec = P(data, None, tensor, None, None)
        return KVPool((spec,) * len(self.buffers), self.config)  # type: ignore[arg-type]

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers."""
        return bytes_of(self.buffers)

    def _fuse(self, k, v):
        """Interleave heads and pack them: [tokens, fused, packing, width]."""
        c = self.config
        for name, heads in (("k", k), ("v", v)):
            require(
                heads.shape == k.shape
                and heads.shape[-1] == c.head_dim
                and heads.dtype == jnp.dtype(c.dtype),
                f"{name} {heads.dtype.name}{list(heads.shape)}",
                f"{c.dtype}[tokens, heads, {c.head_dim}], the same for k and v",
                "Cast or reshape it before it is written.",
            )
        tokens, num_heads, head_dim = k.shape
        _, _, _, packing, width = c.shape
        heads = jnp.stack([k, v], axis=2).reshape(tokens, 2 * num_heads, head_dim)
        rows = round_up(2 * num_heads, packing) - 2 * num_heads
        padded = jnp.pad(heads, ((0, 0), (0, rows), (0, width - head_dim)))
        return padded.reshape(tokens, -1, packing, width)


def init_kv_pool(config: KVConfig) -> KVPool:
    """An empty pool; run it under `jax.jit` with `out_shardings` to make it sharded."""
    make = lambda: jnp.zeros(config.shape, config.dtype)
    return KVPool(tuple(make() for _ in config.layers), config)


class SWAKVPool(eqx.Module):
    """KV of a model some of whose layers attend to a sliding window only.

    The two kinds have page spaces of their own: a token has a location in each.
    """

    full: KVPool
    swa: KVPool

    def set_kv_buffer(self, layer: int, location, swa_location, k, v) -> "SWAKVPool":
        """Write new tokens of one layer, at the location of its kind."""
        if layer in self.swa.config.layers:
            return SWAKVPool(
                self.full, self.swa.set_kv_buffer(layer, swa_location, k, v)
            )
        return SWAKVPool(self.full.set_kv_buffer(layer, location, k, v), self.swa)

    def read_pages(self, layer: int, pages, swa_pages):
        """K and V of whole pages, of the layer's kind."""
        if layer in self.swa.config.layers:
            return self.swa.read_pages(layer, swa_pages)
        return self.full.read_pages(layer, pages)

    def replace_buffer(self, full, swa) -> "SWAKVPool":
        """Take the buffers of all layers from a step that was given this pool's."""
        return SWAKVPool(self.full.replace_buffer(full), self.swa.replace_buffer(swa))

    def partition_specs(self, data: str = "data", tensor: str = "tensor"):
        """Specs in the pool's own tree."""
        specs = lambda pool: pool.partition_specs(data, tensor)
        return SWAKVPool(specs(self.full), specs(self.swa))

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers of both kinds."""
        return self.full.memory_bytes + self.swa.memory_bytes


def init_swa_kv_pool(full: KVConfig, swa: KVConfig) -> SWAKVPool:
    """Two empty pools for the layers of either kind.

    Raises:
      ValueError: a layer is named by both, or their page sizes or ranks differ.
    """
    both = set(full.layers) & set(swa.layers)
    require(
        not both,
        f"layers {sorted(both)} in both pools",
        "each layer in one",
        "A layer attends either to all tokens or to a window.",
    )
    kinds = [(c.page_size, c.num_ranks) for c in (full, swa)]
    require(
        kinds[0] == kinds[1],
        f"(page_size, num_ranks) of {kinds[0]} and {kinds[1]}",
        "the same in both pools",
        "One node of the tree holds a page of each.",
    )
    return SWAKVPool(init_kv_pool(full), init_kv_pool(swa))
