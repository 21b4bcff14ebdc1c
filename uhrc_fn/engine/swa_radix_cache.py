"""`SWARadixCache`: the legacy tree with sliding windows, in plain host Python.

A node whose SWA locations are gone is a tombstone. A leaf never is one; of the others
every SWA location is there. A prefix can serve a hit where the live tokens before its
end cover the window, or reach the root.
"""

import heapq
import itertools
import math
from typing import Any

import numpy as np

from .allocator import SWAPageAllocator
from .chunk_cache import slide
from .params import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
)
from .radix_cache import RadixCache
from .request import Request, RequestTable
from .tree_node import TreeNode

_UUIDS = itertools.count(1)
# Where a lock found no live node to begin with.
_NOTHING_LOCKED = 0


class SWARadixCache(RadixCache):
    """The legacy tree for models with sliding windows.

    Args:
      requests: the request table, with SWA locations.
      allocator: of both pools.
      sliding_window_size: window, in tokens.
      disable: publish nothing, hit nothing.
    """

    def __init__(
        self,
        requests: RequestTable,
        allocator: SWAPageAllocator,
        *,
        sliding_window_size: int,
        disable: bool = False,
    ):
        if sliding_window_size < 1:
            raise ValueError(
                f"sliding_window_size={sliding_window_size}; wanted a positive count. "
                "Use RadixCache for a model without windows."
            )
        super().__init__(requests, allocator, disable=disable)
        self.allocator: SWAPageAllocator = allocator
        self.sliding_window_size = sliding_window_size

    def _empty_tree(self) -> None:
        super()._empty_tree()
        self._swa_evictable = [0] * self.dp_size
        self._swa_protected = [0] * self.dp_size

    # Match.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest prefix whose window is live; see `RadixCache`."""
        path, done = self._walk(self._aligned(params.key))
        served = len(path) if params.full_only else self._served(path)
        if served == len(path):
            path = self._cut_last(path)
            used = path
        else:  # what is walked in part beyond the hit is not used
            used = path if not path or path[-1][1] == len(path[-1][0]) else path[:-1]
        self._touch([node for node, _ in used])
        match = self._result([node for node, _ in path[:served]])
        rank = match.last_device_node.key.rank
        branching = done if match.hit_length < done else 0
        return MatchResult(
            match.device_indices,
            match.last_device_node,
            match.last_host_node,
            match.best_match_node,
            swa_indices=self.allocator.to_swa(match.device_indices, rank),
            full_kv_hit_length=done,
            swa_branching_seqlen=branching,
            lost_tokens=(0, done - match.hit_length, 0),
        )

    def peek_prefix_len(self, key: RadixKey) -> int:
        """Tokens that `match_prefix` would hit; nothing changes."""
        path, _ = self._walk(self._aligned(key))
        return sum(count for _, count in path[: self._served(path)])

    def _served(self, path) -> int:
        """Nodes of a path that can serve a hit."""
        best, live = 0, math.inf
        for place, (node, count) in enumerate(path):
            if node.swa_tombstone:
                if live >= self.sliding_window_size:
                    best = place
                live = 0
            else:
                live += count
        return len(path) if live >= self.sliding_window_size else best

    # Insert.

    def insert(self, params: InsertParams) -> InsertResult:
        """Put a key's whole pages into the tree; nothing of the caller's is freed.

        A tombstone takes the caller's SWA locations where it still has them, and keeps
        its own FULL ones, which others may be reading. New tokens whose SWA part is
        gone become a tombstone, or stay out where nothing live would follow them.
        """
        key = self._aligned(params.key)
        if not len(key):
            return InsertResult()
        value = self._value(params, key)
        path, done = self._walk(key)
        path = self._cut_last(path)
        gone = self.allocator.pages_of(params.swa_evicted_seqlen)
        shared = self.allocator.pages_of(params.prev_prefix_len)
        nodes, start = [], 0
        for node, count in path:
            first = max(gone, shared, start)
            part = value[start : start + count]
            nodes += self._revive(node, part, first - start)
            start += count
        inserted = done
        if done < len(key) and gone < len(key):
            parent = nodes[-1] if nodes else self.root_node
            nodes += self._add_tail(parent, key[done:], value[done:], gone - done)
            inserted = len(key)
        self._touch(nodes)
        return InsertResult(prefix_len=done, inserted_len=inserted)

    def _live_from(self, value: np.ndarray, first: int, rank: int) -> int:
        """From where on, at or after `first`, every location has its SWA twin."""
        dead = np.flatnonzero(self.allocator.to_swa(value, rank) == 0)
        return max(first, int(dead[-1]) + 1 if dead.size else 0)

    def _revive(self, node: TreeNode, value: np.ndarray, first: int) -> list[TreeNode]:
        """Let a tombstone take the SWA part of `value` from `first` on.

        Returns:
          the nodes that stand for it now: it was split where only its end could live.
        """
        if not node.swa_tombstone:
            return [node]
        rank = node.key.rank
        first = self._live_from(value, first, rank)
        if first >= len(node):
            return [node]
        nodes = [self._split(node, first)] if first else []
        self.allocator.move_swa(value[first:], node.value, rank)
        node.swa_tombstone = False
        self._swa_evictable[rank] += len(node)
        return [*nodes, node]

    def _add_tail(self, parent, key: RadixKey, value, gone: int) -> list[TreeNode]:
        cut = self._live_from(value, max(gone, 0), key.rank)
        if cut >= len(key):
            raise ValueError(
                "value has locations without SWA twins past swa_evicted_seqlen; wanted "
                "all of them live. Raise swa_evicted_seqlen to what was let go."
            )
        nodes = []
        if cut:
            parent = self._add(parent, key[:cut], value[:cut])
            parent.swa_tombstone = True
            # A page that straddles the cut is dead for the tree.
            self.allocator.free_swa(value[:cut], key.rank)
            self._swa_evictable[key.rank] -= cut
            nodes.append(parent)
        return [*nodes, self._add(parent, key[cut:], value[cut:])]

    def _add(self, parent: TreeNode, key: RadixKey, value: np.ndarray) -> TreeNode:
        self._swa_evictable[key.rank] += len(key)
        return super()._add(parent, key, value)

    # Evict.

    def evict(self, params: EvictParams) -> EvictResult:
        """Free whole leaves for FULL; then SWA, on leaves and internal nodes."""
        if self.disable:
            return EvictResult()
        self.hicache_write_back(params)
        rank = self._rank(params.dp_rank)
        full = swa = 0
        leaves = [n for n in self._nodes() if self._is_victim(n, rank)]
        heapq.heapify(leaves)
        while full < int(params.num_tokens) and leaves:
            node = heapq.heappop(leaves)
            swa += 0 if node.swa_tombstone else len(node)
            freed, parent = self._remove_branch(node)
            full += freed
            if self._is_victim(parent, rank):
                heapq.heappush(leaves, parent)
        if swa < int(params.swa_num_tokens):
            more, swa_more = self._evict_swa(int(params.swa_num_tokens) - swa, rank)
            full, swa = full + more, swa + swa_more
        return EvictResult(full, swa)

    def _evict_swa(self, wanted: int, rank: int) -> tuple[int, int]:
        full = swa = 0
        for node in sorted(n for n in self._nodes() if self._has_free_swa(n, rank)):
            if swa >= wanted:
                break
            swa += len(node)
            if node.children or node.lock_ref:
                self.allocator.free_swa(node.value, rank)
                node.swa_tombstone = True
                self._swa_evictable[rank] -= len(node)
            else:
                full += self._remove_branch(node)[0]
        return full, swa

    def _has_free_swa(self, node: TreeNode, rank: int) -> bool:
        is_free = not (node.swa_tombstone or node.swa_lock_ref)
        # A locked leaf whose window lock has ended stays whole: it must not be a
        # tombstone.
        is_stuck = bool(node.lock_ref) and not node.children
        return is_free and not is_stuck and node.key.rank == rank

    def _remove_branch(self, node: TreeNode) -> tuple[int, TreeNode]:
        """Free a leaf, then the tombstones above it that would become leaves.

        Returns:
          ``(FULL tokens freed, the node above)``.
        """
        rank = node.key.rank
        count, parent = len(node), self._remove(node)
        while parent.swa_tombstone and self._is_victim(parent, rank):
            count += len(parent)
            parent = self._remove(parent)
        return count, parent

    def _remove(self, node: TreeNode) -> TreeNode:
        if not node.swa_tombstone:
            self._swa_evictable[node.key.rank] -= len(node)
        return super()._remove(node)

    # Locks.

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock FULL to the root, SWA until the window is covered.

        Returns:
          a lock with the uuid of the node where its SWA part ends.
        """
        path = self._ancestry(node)
        delta = super().inc_lock_ref(node).delta
        locked, last = 0, None
        for each in path:
            if locked >= self.sliding_window_size or each.swa_tombstone:
                break
            if each.swa_lock_ref == 0:
                self._move_swa(each, -1)
            each.swa_lock_ref += 1
            locked, last = locked + len(each), each
        else:
            if locked < self.sliding_window_size:
                return IncLockRefResult(delta=delta)
        if last is None:
            return IncLockRefResult(_NOTHING_LOCKED, delta=delta)
        if last.swa_uuid is None:
            last.swa_uuid = next(_UUIDS)
        return IncLockRefResult(last.swa_uuid, delta=delta)

    def dec_lock_ref(
        self, node: Any, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Give a lock back.

        Raises:
          ValueError: `params` are missing, so that its end is not known.
          RuntimeError: the path is not locked.
        """
        path = self._ancestry(node)
        if params is None and path:
            raise ValueError(
                "dec_lock_ref got no params; wanted those of the lock, which say where "
                "its window ends. Pass lock.to_dec_params()."
            )
        result = super().dec_lock_ref(node)
        uuid = params.swa_uuid_for_lock if params else None
        for each in path if uuid != _NOTHING_LOCKED else []:
            each.swa_lock_ref -= 1
            if each.swa_lock_ref == 0:
                self._move_swa(each, 1)
            if uuid is not None and each.swa_uuid == uuid:
                break
        return result

    def _move_swa(self, node: TreeNode, sign: int) -> None:
        self._swa_evictable[node.key.rank] += sign * len(node)
        self._swa_protected[node.key.rank] -= sign * len(node)

    # Requests and sizes.

    def evict_req_swa(self, req: Request, num_tokens: int) -> int:
        """Let go of a request's own SWA pages behind its window; not the tree's."""
        floor = 0
        if req.last_node is not None:
            floor = sum(len(n) for n in self._ancestry(req.last_node))
        frontier = self._swa_frontier(num_tokens, self.sliding_window_size)
        return slide(self.allocator, self.requests, req, floor, frontier)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of the SWA pool."""
        return self.allocator.swa_available_size(dp_rank)

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked SWA tokens of the tree."""
        return self._swa_evictable[dp_rank]

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """Locked SWA tokens of the tree."""
        return self._swa_protected[dp_rank]
