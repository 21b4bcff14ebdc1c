"""A node of the legacy trees, and how keys compare."""

import itertools
from typing import Any

import numpy as np

from .params import NO_INDICES, RadixKey, as_key

_IDS = itertools.count()


class TreeNode:
    """An edge and the node at its end."""

    def __init__(self, key: RadixKey | None = None, value: np.ndarray | None = None):
        self.id = next(_IDS)
        self.key = RadixKey(NO_INDICES) if key is None else key
        self.value = value
        """Token locations; `None` once evicted."""
        self.parent: TreeNode | None = None
        self.children: dict[tuple, TreeNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        """Tick of the last use; of one use, a child's is later than its parent's."""
        # Sliding windows only.
        self.swa_tombstone = False
        """Whether its SWA locations are gone."""
        self.swa_lock_ref = 0
        self.swa_uuid: int | None = None
        """Names it as the end of SWA locks."""

    @property
    def evicted(self) -> bool:
        """Whether it has left the tree, or never was in it."""
        return self.value is None

    def __len__(self) -> int:
        return len(self.key)

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access < other.last_access

    def __repr__(self) -> str:
        return f"TreeNode({self.id}, {len(self)} tokens, lock_ref={self.lock_ref})"


def match_length(left: RadixKey, right: RadixKey, page_size: int = 1) -> int:
    """Tokens that two keys share at the front, in whole pages.

    Raises:
      ValueError: they are of different namespaces.
    """
    if left.namespace != right.namespace:
        raise ValueError(
            f"keys of {left.namespace} and {right.namespace} (extra_key, cache_salt, "
            "dp_rank); wanted one namespace. Keys of two are never compared."
        )
    ids = [np.asarray(as_key(key).token_ids) for key in (left, right)]
    return shared_length(ids[0], ids[1], page_size)


def shared_length(left: Any, right: Any, page_size: int) -> int:
    """The same for bare ids, as arrays."""
    count = min(len(left), len(right))
    differs = left[:count] != right[:count]
    first = int(np.argmax(differs)) if differs.any() else count
    return first // page_size * page_size
