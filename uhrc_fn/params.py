"""Typed parameters and results of the operations.

Lengths are in tokens, ids in pages; the index of a token in its pool is
``page * page_size + offset``. In what requests see, 0 stands for "none". Every record
may carry leading batch axes. Scalars of a result share one vector, since each array
that a jitted call returns costs dispatch time; they are read as attributes.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from .config import NUM_COMPONENTS

# What the host may hand over: a JAX array, a NumPy array or a NumPy scalar.
HostArray = Any

NO_NAMESPACE = np.zeros(4, np.int32)


class RadixKey(eqx.Module):
    """A prompt as pages: `radix_key` builds one on the host."""

    token_ids: Int32[HostArray, " *batch tokens"]
    """Ids in [0, 2^31), padded to whole pages; its shape is the static page count."""
    length: Int32[HostArray, " *batch"]
    """Tokens of the prompt that `token_ids` holds."""
    namespace: Int32[HostArray, " *batch 4"] = eqx.field(
        default_factory=NO_NAMESPACE.copy
    )
    """Digest of (extra_key, cache_salt); zeros for neither."""
    is_truncated: Bool[HostArray, " *batch"] = eqx.field(
        default_factory=lambda: np.zeros((), bool)
    )
    """Whether the prompt went on past `max_prefix_pages`."""


class MatchPrefixParams(eqx.Module):
    """What to match."""

    key: RadixKey
    full_only: bool = eqx.field(default=False, static=True)
    """Ask the FULL component alone, as a running request does (static)."""
    cow_recurrent: bool = eqx.field(default=False, static=True)
    """Report the snapshot's slot in `cow_src_slot` for a clone (static)."""


class _Scalars(eqx.Module):
    """Base of results whose scalars share the last axis of one vector."""

    def _scalar(self, place: int):
        return self.scalars[..., place]  # type: ignore[attr-defined]


class MatchResult(_Scalars):
    """The longest prefix that every component can serve, and why not more."""

    device_indices: Int32[Array, " *batch pages"]
    """FULL pages of the hit, 0-padded."""
    path: Int32[Array, " *batch pages"]
    """Nodes of the FULL run, which may be longer than the hit; `NULL`-padded."""
    scalars: Int32[Array, " *batch 11"]

    @property
    def hit_length(self):
        """Tokens that every component can serve."""
        return self._scalar(0)

    @property
    def full_kv_hit_length(self):
        """Tokens of the FULL run."""
        return self._scalar(1)

    @property
    def best_match_node(self):
        """Node at the end of the hit: the anchor of locks and clones."""
        return self._scalar(2)

    @property
    def last_device_node(self):
        """The same node: one node is one page, and nothing lives on a host."""
        return self._scalar(2)

    @property
    def last_host_node(self):
        """The same node; there is no host tier."""
        return self._scalar(2)

    @property
    def generation(self):
        """Generation of `best_match_node`; its ancestors cannot outlive it."""
        return self._scalar(3)

    @property
    def swa_branching_seqlen(self):
        """Where a window kept now would let the next such request hit, else 0."""
        return self._scalar(4)

    @property
    def recurrent_branching_seqlen(self):
        """Where a snapshot taken now would let the next such request hit, else 0."""
        return self._scalar(5)

    @property
    def cow_src_slot(self):
        """Recurrent slot to clone from, 0 for none."""
        return self._scalar(6)

    @property
    def lost_tokens(self):
        """[3] tokens of the FULL run that each component could not serve."""
        return self.scalars[..., 7 : 7 + NUM_COMPONENTS]

    @property
    def is_full_only(self):
        """Whether FULL alone was asked; a lock on it then holds no RECURRENT."""
        return self._scalar(10)

    @property
    def cache_protected_len(self):
        """Tokens that a lock on this match protects."""
        return self.hit_length

    @property
    def host_hit_length(self):
        """0: there is no host tier."""
        return jnp.zeros_like(self.hit_length)

    @property
    def swa_host_hit_length(self):
        """0: there is no host tier."""
        return jnp.zeros_like(self.hit_length)

    @property
    def recurrent_host_hit_length(self):
        """0: there is no host tier."""
        return jnp.zeros_like(self.hit_length)


class InsertParams(eqx.Module):
    """What to insert; entries of `value` past the key's whole pages are ignored."""

    key: RadixKey
    value: Int32[HostArray, " *batch pages"]
    """FULL page of each page of the key."""
    prev_prefix_len: Int32[HostArray, " *batch"] | int = 0
    """Tokens at the front that the request already shares with the tree."""
    swa_value: Int32[HostArray, " *batch pages"] | None = None
    swa_evicted_seqlen: Int32[HostArray, " *batch"] | None = None
    recurrent_value: Int32[HostArray, " *batch"] | None = None
    recurrent_length: Int32[HostArray, " *batch"] | None = None


class InsertResult(_Scalars):
    """What went in, and what stays the caller's to free."""

    path: Int32[Array, " *batch pages"]
    """Nodes of the key's pages that are now in the tree; `NULL`-padded."""
    page_table: Int32[Array, " *batch pages"]
    """The request's new table: the tree's pages, then the caller's own."""
    page_flags: Int32[Array, " *batch pages"]
    """Bits: adopted by component 0..2, duplicate by component 3..5."""
    scalars: Int32[Array, " *batch 4"]

    @property
    def prefix_len(self):
        """Tokens that the tree held before."""
        return self._scalar(0)

    @property
    def inserted_len(self):
        """Tokens of the key that the tree holds now."""
        return self._scalar(1)

    @property
    def recurrent_exist(self):
        """Whether the node already held a snapshot; the slot stays the caller's."""
        return self._scalar(2) != 0

    @property
    def recurrent_committed(self):
        """Whether the tree took the slot."""
        return self._scalar(3) != 0

    @property
    def last_device_node(self):
        """Node at the end of what is in the tree; 0 (the root) for nothing."""
        # The deepest entry; a path holds no id twice, so a sum picks it.
        in_tree = self.path >= 0
        last = in_tree & (jnp.cumsum(in_tree, -1) == jnp.sum(in_tree, -1)[..., None])
        return jnp.sum(jnp.where(last, self.path, 0), -1)

    def adopted(self):
        """[pages, 3] entries that the tree took, by component."""
        return self._flags(0)

    def duplicate(self):
        """[pages, 3] entries that the tree already had, by component."""
        return self._flags(NUM_COMPONENTS)

    def _flags(self, start):
        bits = start + np.arange(NUM_COMPONENTS, dtype=np.int32)
        bits = bits.reshape((1,) * self.page_flags.ndim + (-1,))
        bits = bits.reshape((1,) * self.page_flags.ndim + (NUM_COMPONENTS,))
        return (self.page_flags[..., None] >> bits) & 1 != 0


class EvictParams(eqx.Module):
    """How much to free at least, by component; rounded up to pages."""

    num_tokens: Int32[HostArray, ""] | int = 0
    swa_num_tokens: Int32[HostArray, ""] | int = 0
    recurrent_num: Int32[HostArray, ""] | int = 0
    dp_rank: int | None = eqx.field(default=None, static=True)
    """For shells that hold one tree a rank; a single tree ignores it (static)."""


class EvictResult(_Scalars):
    """What was freed; less than asked where the rest is locked."""

    scalars: Int32[Array, " 3"]

    @property
    def num_tokens_evicted(self):
        """FULL tokens freed."""
        return self._scalar(0)

    @property
    def swa_num_tokens_evicted(self):
        """SWA tokens freed."""
        return self._scalar(1)

    @property
    def recurrent_num_evicted(self):
        """Recurrent slots freed."""
        return self._scalar(2)


class DecLockRefParams(_Scalars):
    """A receipt as `dec_lock_ref` takes it."""

    path: Int32[Array, " *batch pages"]
    scalars: Int32[Array, " *batch 6"]

    @property
    def serial(self):
        """Number of the receipt; 0 where nothing was locked."""
        return self._scalar(0)

    @property
    def ledger_row(self):
        """Where the ledger keeps it."""
        return self._scalar(1)

    @property
    def anchor(self):
        """Deepest node of the lock."""
        return self._scalar(2)

    @property
    def held(self):
        """Bits of the components that the receipt holds."""
        return self._scalar(3)

    @property
    def num_pages(self):
        """Pages from the root to the anchor."""
        return self._scalar(4)

    @property
    def delta(self):
        """FULL tokens that moved from evictable to protected, as a negative number."""
        return self._scalar(5)


class IncLockRefResult(DecLockRefParams):
    """The receipt of a lock; every lock is given back by its own receipt, once."""

    def to_dec_params(self) -> DecLockRefParams:
        """What `dec_lock_ref` needs of the receipt."""
        return DecLockRefParams(path=self.path, scalars=self.scalars)


class DecLockRefResult(_Scalars):
    """What an unlock moved back."""

    scalars: Int32[Array, " *batch 2"]

    @property
    def is_released(self):
        """Whether the receipt was live."""
        return self._scalar(0) != 0

    @property
    def delta(self):
        """FULL tokens that moved from protected to evictable."""
        return self._scalar(1)


class AllocResult(_Scalars):
    """Pages (or slots) that now belong to the request."""

    ids: Int32[Array, " *batch max_new"]
    """Ids in order, 0-padded."""
    scalars: Int32[Array, " *batch 2"]

    @property
    def count(self):
        """How many ids were given."""
        return self._scalar(0)

    @property
    def ok(self):
        """Whether all that was asked was given."""
        return self._scalar(1) != 0
