"""`RecurrentStatePool`: temporal and conv states of every recurrent layer, by slot.

A slot id stands for its row in every layer. Row 0 is the dummy and stays zero. Slots
are never zeroed when they are allocated: a fresh request reads zeros through its mask.
With several ranks the rows of all follow one another, each with a dummy of its own;
slot ids are the rank's own, as a `shard_map` over `data` sees them.
"""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from ..kernels import copy_slots, track_scatter
from .layout import (
    bytes_of,
    position,
    replaced,
    require,
    require_counts,
    require_layers,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """Shape of a pool of recurrent states.

    Args:
      num_slots: usable slots of each rank.
      layers: model layers whose state the pool holds.
      num_v_heads: value heads, each with a temporal state of its own.
      v_head_dim: width of a value head.
      num_k_heads: query and key heads; `None` for as many as value heads (KDA, GLA).
      k_head_dim: width of a key head; `None` for that of a value head.
      conv_kernel_size: taps of the short convolution; 1 for none (GLA).
      state_dtype: of the temporal states.
      conv_dtype: of the conv states.
      num_ranks: data-parallel ranks.
    """

    num_slots: int
    layers: tuple[int, ...]
    num_v_heads: int
    v_head_dim: int
    num_k_heads: int | None = None
    k_head_dim: int | None = None
    conv_kernel_size: int = 1
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    num_ranks: int = 1

    def __post_init__(self):
        if self.num_k_heads is None:
            object.__setattr__(self, "num_k_heads", self.num_v_heads)
        if self.k_head_dim is None:
            object.__setattr__(self, "k_head_dim", self.v_head_dim)
        require_counts(
            self,
            "num_slots",
            "num_v_heads",
            "v_head_dim",
            "num_k_heads",
            "k_head_dim",
            "conv_kernel_size",
            "num_ranks",
        )
        require_layers(self.layers)
        require(
            self.num_v_heads % self.num_k_heads == 0,  # type: ignore[operator]
            f"num_v_heads={self.num_v_heads} with num_k_heads={self.num_k_heads}",
            "a multiple of the key heads",
            "Each key head serves as many value heads as any other.",
        )

    @property
    def num_rows(self) -> int:
        """Rows of a buffer: the slots of all ranks, and a dummy for each."""
        return self.num_ranks * (self.num_slots + 1)

    @property
    def has_conv(self) -> bool:
        """Whether the layers have a short convolution."""
        return self.conv_kernel_size > 1

    @property
    def temporal_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's temporal buffer."""
        return self.num_rows, self.num_v_heads, self.k_head_dim, self.v_head_dim  # type: ignore[return-value]

    @property
    def conv_shape(self) -> tuple[int, int, int]:
        """Shape of a layer's conv buffer: the channels of Q, K and V, and the taps."""
        keys = self.num_k_heads * self.k_head_dim  # type: ignore[operator]
        channels = self.num_v_heads * self.v_head_dim + 2 * keys
        return self.num_rows, channels, self.conv_kernel_size - 1


class RecurrentStatePool(eqx.Module):
    """States of all recurrent layers; donate it to every step."""

    temporal: tuple[Float[Array, " rows v_heads k_dim v_dim"], ...]
    """One a layer."""
    conv: tuple[Float[Array, " rows channels taps"], ...]
    """One a layer, the last inputs of the convolution; none at all without one."""
    config: RecurrentConfig = eqx.field(static=True)

    def gather_state(
        self,
        layer: int,
        slots: Int32[Array, " *batch"],
        is_fresh: Bool[Array, " *batch"],
    ):
        """Read the states that a forward starts from.

        Args:
          layer: of the model.
          slots: running slots; 0 reads zeros.
          is_fresh: requests without a past; they read zeros, whatever the slot holds.

        Returns:
          ``(temporal, conv)``, one row a request; `conv` is `None` without one.
        """
        at = position(self.config.layers, layer)
        reads_zero = is_fresh | (slots <= 0)

        def read(buffer):
            rows = buffer.at[slots].get(mode="clip")
            inner = (1,) * (rows.ndim - slots.ndim)
            return jnp.where(
                reads_zero.reshape(*slots.shape, *inner), jnp.zeros_like(rows), rows
            )

        return read(self.temporal[at]), read(self.conv[at]) if self.conv else None

    def put_state(
        self,
        layer: int,
        slots: Int32[Array, " requests"],
        temporal: Float[Array, " requests v_heads k_dim v_dim"],
        conv: Float[Array, " requests channels taps"] | None = None,
        track=None,
    ) -> "RecurrentStatePool":
        """Write the final states of a forward; in place if the pool is donated.

        Args:
          layer: of the model.
          slots: running slots, distinct; 0 writes nothing.
          temporal: final states, in the pool's dtype.
          conv: final conv states, in the pool's dtype; `None` without a convolution.
          track: `TrackMetadata`, or any ``(index, mask)``: track slots that take the
            same bits besides; `None` for no tracking.

        Ownership:
          running and track slots are the requests' own.
        """
        at = position(self.config.layers, layer)
        require(
            (conv is None) == (not self.conv),
            f"conv {'missing' if conv is None else 'given'}, "
            f"conv_kernel_size={self.config.conv_kernel_size}",
            "conv states exactly where there is a convolution",
            "Pass what the layer's convolution leaves.",
        )
        held = [self.temporal[at]] + ([self.conv[at]] if self.conv else [])
        states = [temporal] + ([] if conv is None else [conv])
        held = track_scatter(held, states, slots, slots > 0)
        if track is not None:
            index, mask = track
            held = track_scatter(held, states, index, mask)
        swap = lambda old, new: (*old[:at], new, *old[at + 1 :])
        return RecurrentStatePool(
            swap(self.temporal, held[0]),
            swap(self.conv, held[1]) if self.conv else (),
            self.config,
        )

    def copy_slots(
        self, src: Int32[Array, " lanes"], dst: Int32[Array, " lanes"]
    ) -> "RecurrentStatePool":
        """Copy temporal and conv states of all layers from slot to slot.

        A lane with a 0 copies nothing; see `kernels.copy_slots`.

        Ownership:
          a source is locked in the tree or the request's own, a destination the
          request's, just allocated; neither changes hands.
        """
        temporal, conv = copy_slots((self.temporal, self.conv), src, dst)
        return RecurrentStatePool(temporal, conv, self.config)

    def replace_buffer(self, temporal, conv=()) -> "RecurrentStatePool":
        """Take the buffers of all layers from a step that was given this pool's."""
        held = (self.temporal, self.conv)
        temporal, conv = replaced(held, (tuple(temporal), tuple(conv)))
        return RecurrentStatePool(temporal, conv, self.config)

    def partition_specs(self, data: str = "data", tensor: str = "tensor"):
        """Specs in the pool's own tree: slots over `data`, heads over `tensor`.

        The channels of Q, K and V follow one another within a device's part, so a conv
        row has a meaning only under the layout it was written with.
        """
        return RecurrentStatePool(
            (P(data, tensor, None, None),) * len(self.temporal),  # type: ignore[arg-type]
            (P(data, tensor, None),) * len(self.conv),  # type: ignore[arg-type]
            self.config,
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of all layers, dummy rows included."""
        return bytes_of((self.temporal, self.conv))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        return self.memory_bytes // self.config.num_rows


def init_recurrent_state_pool(config: RecurrentConfig) -> RecurrentStatePool:
    """An empty pool; run it under `jax.jit` with `out_shardings` to make it sharded."""
    temporal = tuple(
        jnp.zeros(config.temporal_shape, config.state_dtype) for _ in config.layers
    )
    conv = tuple(
        jnp.zeros(config.conv_shape, config.conv_dtype)
        for _ in (config.layers if config.has_conv else ())
    )
    return RecurrentStatePool(temporal, conv, config)
