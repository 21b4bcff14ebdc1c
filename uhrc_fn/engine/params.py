"""Typed parameters and results of the host-facing caches: the RFC's names.

Here lengths and indices are in tokens, and everything is a host value. `EvictParams`
is the core's own. Index 0 of a pool is the dummy: it stands for "none".
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..params import EvictParams as EvictParams

NO_INDICES = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class RadixKey:
    """A prompt and what keeps it apart from others'.

    Args:
      token_ids: ids in [0, 2^31), any sequence of ints.
      extra_key: LoRA, modality or tenant name; see `uhrc_fn.namespace`.
      dp_rank: rank whose tree it belongs to.
      cache_salt: secret of a tenant.
    """

    token_ids: Sequence[int] | np.ndarray
    extra_key: Any = None
    dp_rank: int | None = None
    cache_salt: Any = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __getitem__(self, index: int | slice) -> "RadixKey":
        if not isinstance(index, slice):
            index = slice(index, index + 1 or None)
        return dataclasses.replace(self, token_ids=self.token_ids[index])

    def __repr__(self) -> str:
        head = list(self.token_ids[:10])
        more = "..." if len(self) > 10 else ""
        return (
            f"RadixKey(extra_key={self.extra_key!r}, dp_rank={self.dp_rank!r}, "
            f"token_ids={head}{more})"
        )

    @property
    def namespace(self) -> tuple:
        """What two keys must share to share anything."""
        return self.extra_key, self.cache_salt, self.dp_rank

    @property
    def rank(self) -> int:
        """Rank that it is accounted to."""
        return self.dp_rank or 0


def as_key(key: RadixKey | Sequence[int] | np.ndarray) -> RadixKey:
    """A key whose ids are NumPy int32; plain ids are a key without tags.

    Raises:
      ValueError: not a flat sequence of ids in [0, 2^31).
    """
    if not isinstance(key, RadixKey):
        key = RadixKey(key)
    ids = np.asarray(key.token_ids)
    if ids.size == 0:
        ids = np.zeros(0, np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"token_ids is {ids.dtype}{list(ids.shape)}; wanted a flat sequence of "
            "integers. Pass one prompt at a time."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 31):
        bad = ids[(ids < 0) | (ids >= 1 << 31)][0]
        raise ValueError(
            f"token_ids holds {bad}; wanted ids in [0, 2^31). Check the tokenizer."
        )
    return dataclasses.replace(key, token_ids=ids.astype(np.int32, copy=False))


@dataclasses.dataclass(frozen=True)
class MatchPrefixParams:
    """What to match."""

    key: RadixKey | Sequence[int] | np.ndarray
    full_only: bool = False
    """Ask the FULL component alone, as a running request does."""
    cow_recurrent: bool = False
    """Write the slot to clone from to ``req.recurrent_cow_src_index``."""
    req: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class MatchResult:
    """The longest prefix that every component can serve."""

    device_indices: np.ndarray
    """Token locations of the hit in the FULL pool."""
    last_device_node: Any
    """Where the hit ends: what `inc_lock_ref` takes. The engine looks not inside."""
    last_host_node: Any
    """The same: there is no host tier."""
    best_match_node: Any
    """The same: the anchor of locks and clones."""
    swa_indices: np.ndarray | None = None
    """Token locations in the SWA pool, 0 where let go; `None` without SWA."""
    full_kv_hit_length: int = 0
    """Tokens of the FULL run, which may go on past the hit."""
    swa_branching_seqlen: int = 0
    recurrent_branching_seqlen: int = 0
    """Where a snapshot taken now would let the next such request hit, else 0."""
    cow_src_slot: int = 0
    """Recurrent slot to clone from, 0 for none."""
    lost_tokens: tuple[int, int, int] = (0, 0, 0)
    """Tokens of the FULL run that each component could not serve."""
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    recurrent_host_hit_length: int = 0

    @property
    def hit_length(self) -> int:
        """Tokens that every component can serve."""
        return len(self.device_indices)

    @property
    def cache_protected_len(self) -> int:
        """Tokens that a lock on this match protects."""
        return self.hit_length


@dataclasses.dataclass(frozen=True, eq=False)
class InsertParams:
    """What to insert; `value` past the key's whole pages is ignored."""

    key: RadixKey | Sequence[int] | np.ndarray
    value: Any = None
    """Location of each token in the FULL pool."""
    prev_prefix_len: int = 0
    """Tokens at the front that the request already shares with the tree."""
    swa_value: Any = None
    """Locations in the SWA pool; legacy caches know them from their allocator."""
    swa_evicted_seqlen: int = 0
    """Tokens at the front whose SWA locations the request has let go."""
    recurrent_value: int = 0
    """Slot of a snapshot at the end of the key, 0 for none."""


@dataclasses.dataclass(frozen=True)
class InsertResult:
    """What went in. No cache frees anything on insert, whatever its kind."""

    prefix_len: int = 0
    """Tokens that the tree held before: past `prev_prefix_len` the caller's locations
    of them are duplicates and the caller's to free."""
    inserted_len: int = 0
    """Tokens that it holds now; locations past them stay the caller's."""
    recurrent_exist: bool = False
    """The node already held a snapshot; the slot stays the caller's."""
    recurrent_committed: bool = False
    """The tree took the slot."""


@dataclasses.dataclass(frozen=True)
class EvictResult:
    """What was freed; less than asked where the rest is locked."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    recurrent_num_evicted: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class DecLockRefParams:
    """What `dec_lock_ref` needs of the lock that it gives back."""

    swa_uuid_for_lock: int | None = None
    """Names the node at which a legacy SWA lock ends; `None` for the root."""
    receipt: Any = None
    """Receipt of the unified cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class IncLockRefResult(DecLockRefParams):
    """A lock; each is given back once, with its own `to_dec_params()`."""

    delta: int = 0
    """FULL tokens that moved from evictable to protected, as a negative number."""

    def to_dec_params(self) -> DecLockRefParams:
        """What `dec_lock_ref` needs."""
        return DecLockRefParams(self.swa_uuid_for_lock, self.receipt)


@dataclasses.dataclass(frozen=True)
class DecLockRefResult:
    """What an unlock moved back."""

    delta: int = 0
    """FULL tokens that moved from protected to evictable."""


@dataclasses.dataclass(frozen=True, eq=False)
class Locations:
    """Token locations that now belong to a request."""

    full: np.ndarray
    swa: np.ndarray | None = None
    """The same tokens in the SWA pool; `None` without SWA."""
