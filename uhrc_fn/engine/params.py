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

    A list is read once: keep the key from match to insert, and the insert pays nothing
    for it. A list that has changed since is read anew.

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
    _known: Any = dataclasses.field(default=None, init=False, repr=False)
    """The list as it was when it was read, and its ids."""

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
    def known_ids(self) -> np.ndarray | None:
        """What `remember` was given, unless the list has changed since.

        To compare a list with its copy takes a tenth of reading it: both hold the same
        objects, and CPython asks that first.
        """
        if self._known is None or self._known[0] != self.token_ids:
            return None
        return self._known[1]

    def remember(self, ids: np.ndarray) -> None:
        """Keep the ids of a list, from its start: nobody may write them."""
        if isinstance(self.token_ids, list | tuple):
            object.__setattr__(self, "_known", (self.token_ids[:], ids))

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


class InsertResult:
    """What went in. No cache frees anything on insert, whatever its kind.

    Where the tree lives on a device, the first field that is read waits for it.
    """

    def __init__(
        self,
        prefix_len: int = 0,
        inserted_len: int = 0,
        recurrent_exist: bool = False,
        recurrent_committed: bool = False,
    ):
        fields = prefix_len, inserted_len, recurrent_exist, recurrent_committed
        self._fields: Any = fields

    @classmethod
    def arriving(cls, scalars: Any) -> "InsertResult":
        """The same four as an int array, perhaps of a device that is still at it."""
        result = cls.__new__(cls)
        result._fields = scalars
        return result

    @property
    def prefix_len(self) -> int:
        """Tokens that the tree held before: past `prev_prefix_len` the caller's
        locations of them are duplicates and the caller's to free."""
        return self._read()[0]

    @property
    def inserted_len(self) -> int:
        """Tokens that it holds now; locations past them stay the caller's."""
        return self._read()[1]

    @property
    def recurrent_exist(self) -> bool:
        """The node already held a snapshot; the slot stays the caller's."""
        return bool(self._read()[2])

    @property
    def recurrent_committed(self) -> bool:
        """The tree took the slot."""
        return bool(self._read()[3])

    def _read(self) -> tuple:
        if not isinstance(self._fields, tuple):
            self._fields = tuple(np.asarray(self._fields).tolist())
        return self._fields

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, InsertResult):
            return NotImplemented
        return self._read() == other._read()

    def __hash__(self) -> int:
        return hash(self._read())

    def __repr__(self) -> str:
        return (
            f"InsertResult(prefix_len={self.prefix_len}, "
            f"inserted_len={self.inserted_len}, "
            f"recurrent_exist={self.recurrent_exist}, "
            f"recurrent_committed={self.recurrent_committed})"
        )


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
