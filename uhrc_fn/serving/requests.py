"""Requests on the device: what is known of each, as arrays with a row a request.

The host writes a row when a request arrives and reads its tokens from the record of a
step; all between happens on the device. Row 0 stays empty, as in the request tables.
"""

import dataclasses
import enum

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from ..params import HostArray, IncLockRefResult, RadixKey
from ..tree_arrays import DROP, NULL
from .config import ServeConfig

MAX_STOP_TOKENS = 4
_RECEIPT_SCALARS = 6


class Phase(enum.IntEnum):
    """Where a request stands. One that runs is in prefill while more than one of its
    tokens is to be computed, and decodes otherwise."""

    IDLE = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    """All its tokens are there; what it holds is still to be published."""


class Requests(eqx.Module):
    """All request slots; lengths in tokens."""

    phase: Int32[Array, " rows"]
    arrival: Int32[Array, " rows"]
    """Order of arrival: the oldest is served first, the youngest retracted first."""
    token_ids: Int32[Array, " rows tokens"]
    """Prompt and output so far, 0-padded to whole pages."""
    length: Int32[Array, " rows"]
    """Tokens of prompt and output so far."""
    prompt_length: Int32[Array, " rows"]
    limit: Int32[Array, " rows"]
    """Length at which it ends."""
    stop_tokens: Int32[Array, " rows stops"]
    """Tokens that end it, -1 for none."""
    temperature: Float[Array, " rows"]
    """0 is greedy."""
    seed: Int32[Array, " rows"]
    namespace: Int32[Array, " rows 4"]
    hit_length: Int32[Array, " rows"]
    """Tokens that it did not compute, when it was last admitted."""
    branching: Int32[Array, " rows"]
    """Where its prefill is cut besides, for a snapshot; 0 for nowhere."""
    swa_evicted: Int32[Array, " rows"]
    """Tokens whose SWA pages it has let go."""
    receipt: IncLockRefResult
    """Its lock, by row."""

    def key(self, row, length) -> RadixKey:
        """The first `length` tokens of a row as a key."""
        none = jnp.zeros((), bool)
        return RadixKey(self.token_ids[row], length, self.namespace[row], none)

    def put(self, row, **values) -> "Requests":
        """Write fields of one row; row 0 writes nothing."""
        place = jnp.where(row > 0, row, self.phase.shape[0])
        write = lambda name: getattr(self, name).at[place].set(values[name], **DROP)
        return dataclasses.replace(self, **{name: write(name) for name in values})

    def lock(self, row) -> IncLockRefResult:
        """The receipt of a row; of row 0 one of nothing."""
        return IncLockRefResult(self.receipt.path[row], self.receipt.scalars[row])

    def put_lock(self, row, receipt: IncLockRefResult) -> "Requests":
        """Keep a receipt for a row."""
        place = jnp.where(row > 0, row, self.phase.shape[0])
        held = IncLockRefResult(
            self.receipt.path.at[place].set(receipt.path, **DROP),
            self.receipt.scalars.at[place].set(receipt.scalars, **DROP),
        )
        return dataclasses.replace(self, receipt=held)


class Arrivals(eqx.Module):
    """New requests, padded: those of row 0 are none. The host makes it."""

    row: Int32[HostArray, " lanes"]
    arrival: Int32[HostArray, " lanes"]
    token_ids: Int32[HostArray, " lanes tokens"]
    length: Int32[HostArray, " lanes"]
    limit: Int32[HostArray, " lanes"]
    stop_tokens: Int32[HostArray, " lanes stops"]
    temperature: Float[HostArray, " lanes"]
    seed: Int32[HostArray, " lanes"]
    namespace: Int32[HostArray, " lanes 4"]


def init_requests(config: ServeConfig) -> Requests:
    """Nobody there."""
    rows, pages = config.num_requests + 1, config.max_pages
    zeros = lambda *shape: jnp.zeros((rows, *shape), jnp.int32)
    receipt = IncLockRefResult(
        jnp.full((rows, pages), NULL, jnp.int32), zeros(_RECEIPT_SCALARS)
    )
    return Requests(
        phase=zeros(),
        arrival=zeros(),
        token_ids=zeros(pages * config.cache.page_size),
        length=zeros(),
        prompt_length=zeros(),
        limit=zeros(),
        stop_tokens=jnp.full((rows, MAX_STOP_TOKENS), -1, jnp.int32),
        temperature=jnp.zeros(rows, jnp.float32),
        seed=zeros(),
        namespace=zeros(4),
        hit_length=zeros(),
        branching=zeros(),
        swa_evicted=zeros(),
        receipt=receipt,
    )


def empty_arrivals(config: ServeConfig, lanes: int) -> Arrivals:
    """NumPy arrays for the host to fill."""
    zeros = lambda *shape: np.zeros((lanes, *shape), np.int32)
    return Arrivals(
        row=zeros(),
        arrival=zeros(),
        token_ids=zeros(config.max_pages * config.cache.page_size),
        length=zeros(),
        limit=zeros(),
        stop_tokens=np.full((lanes, MAX_STOP_TOKENS), -1, np.int32),
        temperature=np.zeros(lanes, np.float32),
        seed=zeros(),
        namespace=zeros(4),
    )


def enqueue(requests: Requests, arrivals: Arrivals) -> Requests:
    """Let new requests wait in the rows that the host chose for them, idle ones."""
    rows = requests.phase.shape[0]
    place = jnp.where(arrivals.row > 0, arrivals.row, rows)
    shared = {f.name: getattr(arrivals, f.name) for f in dataclasses.fields(arrivals)}
    del shared["row"]
    zeros = jnp.zeros_like(arrivals.row)
    new = {
        **shared,
        "phase": zeros + int(Phase.WAITING),
        "prompt_length": arrivals.length,
        "hit_length": zeros,
        "branching": zeros,
        "swa_evicted": zeros,
    }
    write = lambda name: getattr(requests, name).at[place].set(new[name], **DROP)
    return dataclasses.replace(requests, **{name: write(name) for name in new})


def oldest_first(wanted, arrival, lanes: int):
    """Rows for `lanes` lanes, the oldest of those `wanted` first; 0 for an idle one."""
    never = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(wanted, arrival, never))[:lanes].astype(jnp.int32)
    return jnp.where(wanted[order], order, 0)


def oldest(wanted, arrival):
    """The row that is oldest of those `wanted`; 0 for none."""
    never = jnp.iinfo(jnp.int32).max
    row = jnp.argmin(jnp.where(wanted, arrival, never)).astype(jnp.int32)
    return jnp.where(wanted[row], row, 0)


def youngest(wanted, arrival):
    """The row that is youngest of those `wanted`; 0 for none."""
    row = jnp.argmax(jnp.where(wanted, arrival, -1)).astype(jnp.int32)
    return jnp.where(wanted[row], row, 0)
