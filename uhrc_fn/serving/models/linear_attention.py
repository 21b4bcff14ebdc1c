"""The contract of the linear-recurrent attention layers: KDA, GDN and GLA.

A backend is one layer with its parameters. All take the same constructor arguments:

    backend = KDA.init(key, hidden_size=64, num_v_heads=4, v_head_dim=16)
    config = backend.recurrent_config(num_slots=8, layers=(0, 1, 3))
    states = init_recurrent_state_pool(config)
    y, states = backend(x, states, layer=0, lanes=lanes)

A forward of many tokens runs chunk by chunk, one of a single token (decode) as one
step; see `recurrence`. State is read and written in the pool by slot.
"""

import abc
import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...pools.layout import require, require_counts
from ...pools.recurrent_state import RecurrentConfig, RecurrentStatePool
from ..lanes import Lanes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearHeads:
    """Heads of a linear-recurrent layer.

    Args:
      num_v_heads: value heads, each with a state of its own.
      v_head_dim: width of a value head.
      num_k_heads: query and key heads; `None` for as many as value heads.
      k_head_dim: width of a query or key head; `None` for that of a value head.
      conv_kernel_size: taps of the short convolution; 1 for none.
    """

    num_v_heads: int
    v_head_dim: int
    num_k_heads: int | None = None
    k_head_dim: int | None = None
    conv_kernel_size: int = 1

    def __post_init__(self):
        if self.num_k_heads is None:
            object.__setattr__(self, "num_k_heads", self.num_v_heads)
        if self.k_head_dim is None:
            object.__setattr__(self, "k_head_dim", self.v_head_dim)
        names = [field.name for field in dataclasses.fields(self)]
        require_counts(self, *names)
        require(
            self.num_v_heads % self.num_k_heads == 0,  # type: ignore[operator]
            f"num_v_heads={self.num_v_heads} with num_k_heads={self.num_k_heads}",
            "a multiple of the key heads",
            "Each key head serves as many value heads as any other.",
        )

    @property
    def k_width(self) -> int:
        """Channels of all key heads, and of all query heads."""
        return self.num_k_heads * self.k_head_dim  # type: ignore[operator]

    @property
    def v_width(self) -> int:
        """Channels of all value heads."""
        return self.num_v_heads * self.v_head_dim

    def require_equal_heads(self, family: str) -> None:
        """Refuse fewer key heads than value heads, for a family without such."""
        require(
            self.num_k_heads == self.num_v_heads,
            f"num_k_heads={self.num_k_heads} with num_v_heads={self.num_v_heads}",
            f"as many of both for {family}",
            "Leave num_k_heads out, or use GDN.",
        )


class LinearRecurrentAttnBackend(eqx.Module):
    """A linear-recurrent attention layer that keeps its state in a pool, by slot."""

    heads: eqx.AbstractVar[LinearHeads]

    @abc.abstractmethod
    def mix(
        self,
        x: Float[Array, " lanes tokens hidden"],
        temporal: Float[Array, " lanes v_heads k_dim v_dim"],
        conv,
        lanes: Lanes,
    ) -> tuple:
        """Run the layer from given states.

        Tokens at or past a lane's `num_new` change no state; their output has no
        meaning.

        Args:
          x: hidden states of the new tokens.
          temporal: states after `lanes.start` tokens, in any float dtype.
          conv: the last inputs of the convolution, [lanes, channels, taps]; `None`
            without one.
          lanes: what is computed.

        Returns:
          ``(y, temporal, conv)``: hidden states like `x`, the states after the new
          tokens, `temporal` in float32 and `conv` in its own dtype.
        """

    def __call__(
        self,
        x: Float[Array, " lanes tokens hidden"],
        states: RecurrentStatePool,
        layer: int,
        lanes: Lanes,
    ) -> tuple[Float[Array, " lanes tokens hidden"], RecurrentStatePool]:
        """Read the states of the lanes' slots, run the layer, write the new states.

        Args:
          x: hidden states of the new tokens.
          states: the pool; donated, it is written in place.
          layer: of the model.
          lanes: what is computed. A lane that starts at 0 ignores what its slot
            holds; one without new tokens, or with slot 0, writes nothing.

        Returns:
          ``(y, states)``. Track slots take the same bits as the running ones.
        """
        past = states.gather_state(layer, lanes.slots, lanes.start == 0)
        y, temporal, conv = self.mix(x, *past, lanes)
        slots = jnp.where(lanes.num_new > 0, lanes.slots, 0)
        temporal = temporal.astype(states.config.state_dtype)
        return y, states.put_state(layer, slots, temporal, conv, lanes.track)

    def recurrent_config(
        self,
        num_slots: int,
        layers: tuple[int, ...],
        *,
        state_dtype: str = "float32",
        conv_dtype: str = "bfloat16",
        num_ranks: int = 1,
    ) -> RecurrentConfig:
        """Shape of the pool that holds the states of layers like this one.

        Args:
          num_slots: usable slots of each rank.
          layers: model layers that are of this kind.
          state_dtype: of the temporal states.
          conv_dtype: of the conv states.
          num_ranks: data-parallel ranks.
        """
        return RecurrentConfig(
            num_slots=num_slots,
            layers=layers,
            state_dtype=state_dtype,
            conv_dtype=conv_dtype,
            num_ranks=num_ranks,
            **dataclasses.asdict(self.heads),
        )


def new_tokens(x: Float[Array, " lanes tokens hidden"], lanes: Lanes):
    """Which tokens count: bool [lanes, tokens]."""
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lanes.num_new[:, None]
