"""What a forward is given: lanes of tokens, and the pools that they read and write.

A lane is one request's share of a forward: a chunk of its prompt, or the one token that
it decodes. Idle lanes have `num_new == 0`, page tables of 0 and slot 0, so that they
read nothing and write nothing.
"""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Int32

from ..pools.kv import KVPool, SWAKVPool
from ..pools.mla import MLAPool
from ..pools.recurrent_state import RecurrentStatePool
from ..pools.tracking import TrackMetadata


class Lanes(eqx.Module):
    """Requests in one forward, each with up to `tokens` new tokens."""

    token_ids: Int32[Array, " lanes tokens"]
    """Tokens to compute, 0-padded."""
    start: Int32[Array, " lanes"]
    """Tokens whose KV and state there are: the position of the first new token. 0 is a
    request without a past, whose recurrent state reads as zeros."""
    num_new: Int32[Array, " lanes"]
    """Tokens to compute; 0 for an idle lane."""
    pages: Int32[Array, " lanes pages"]
    """FULL page of each page of the request, those of the new tokens included."""
    swa_pages: Int32[Array, " lanes swa_pages"]
    """SWA page of each, 0 where it slid away; no columns without SWA."""
    slots: Int32[Array, " lanes"]
    """Running slot of the recurrent states; 0 without."""
    track: TrackMetadata
    """Track slot that takes the final state besides, by lane."""


class Pools(eqx.Module):
    """The big buffers: donate them to every step."""

    kv: KVPool | MLAPool | SWAKVPool | None
    """KV of the attention layers; `None` where no layer attends."""
    states: RecurrentStatePool | None
    """States of the recurrent layers; `None` without one."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers."""
        parts: tuple[Any, ...] = (self.kv, self.states)
        return sum(part.memory_bytes for part in parts if part is not None)
