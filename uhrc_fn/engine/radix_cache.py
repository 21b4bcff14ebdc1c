"""`RadixCache`: the legacy tree of token edges, in plain host Python.

Edges hold runs of whole pages and split where keys part. A lock holds the path to the
root; eviction takes whole leaves, oldest first.
"""

import heapq
from collections.abc import Iterator
from typing import Any

import numpy as np

from .allocator import PageAllocator
from .host_cache import HostCache
from .params import (
    NO_INDICES,
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
    as_key,
)
from .request import RequestTable
from .tree_node import TreeNode, shared_length


class RadixCache(HostCache):
    """The legacy tree.

    Args:
      requests: the request table.
      allocator: of the pool.
      disable: publish nothing, hit nothing.
      num_recurrent_slots: see `HostCache`.

    A key without a rank is a namespace of its own, accounted to rank 0.
    """

    def __init__(
        self,
        requests: RequestTable,
        allocator: PageAllocator,
        *,
        disable: bool = False,
        num_recurrent_slots: int = 0,
    ):
        super().__init__(
            requests,
            allocator,
            disable=disable,
            num_recurrent_slots=num_recurrent_slots,
        )
        self._empty_tree()

    def reset(self) -> None:
        """Forget everything: tree, locks, pools and request table."""
        super().reset()
        self._empty_tree()

    def _empty_tree(self) -> None:
        self.root_node = TreeNode(value=NO_INDICES)
        self.root_node.lock_ref = self.root_node.swa_lock_ref = 1
        self._clock = 0
        self._evictable = [0] * self.dp_size
        self._protected = [0] * self.dp_size

    # Match.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix; the edge that it ends in is split there."""
        path, _ = self._walk(self._aligned(params.key))
        path = self._cut_last(path)
        self._touch([node for node, _ in path])
        return self._result([node for node, _ in path])

    def peek_prefix_len(self, key: RadixKey) -> int:
        """Tokens that `match_prefix` would hit; nothing changes."""
        return self._walk(self._aligned(key))[1]

    def _result(self, nodes: list[TreeNode]) -> MatchResult:
        values = [n.value for n in nodes if n.value is not None]
        indices = np.concatenate(values) if values else NO_INDICES
        last = nodes[-1] if nodes else self.root_node
        return MatchResult(indices, last, last, last, full_kv_hit_length=len(indices))

    def _aligned(self, key) -> RadixKey:
        """The whole pages of a key; nothing of it where the cache is disabled."""
        if self.disable:
            return RadixKey(NO_INDICES)
        key = as_key(key)
        self._rank(key.dp_rank)
        return key[: len(key) // self.page_size * self.page_size]

    def _child_key(self, namespace: tuple, tokens) -> tuple:
        return namespace, tokens[: self.page_size].tobytes()

    def _walk(self, key: RadixKey) -> tuple[list[tuple[TreeNode, int]], int]:
        """Follow a key: ``([(node, tokens of it that match)], tokens in all)``.

        Only the last node may match in part.
        """
        path, done, node = [], 0, self.root_node
        tokens, namespace = key.token_ids, key.namespace
        while done < len(tokens):
            rest = tokens[done:]
            child = node.children.get(self._child_key(namespace, rest))
            if child is None:
                break
            count = shared_length(child.key.token_ids, rest, self.page_size)
            path.append((child, count))
            done += count
            if count < len(child):
                break
            node = child
        return path, done

    def _cut_last(self, path):
        """Split the last node where it matches in part; its lower half stays behind.

        Nothing else of that half changes: who diverges from it did not use it.
        """
        if path and path[-1][1] < len(path[-1][0]):
            node, count = path[-1]
            path = [*path[:-1], (self._split(node, count), count)]
        return path

    def _touch(self, nodes: list[TreeNode]) -> None:
        for node in nodes:
            self._clock += 1
            node.last_access = self._clock

    def _split(self, node: TreeNode, count: int) -> TreeNode:
        """Put a node of the first `count` tokens above `node`; returns it."""
        assert node.value is not None and node.parent is not None
        upper = TreeNode(node.key[:count], node.value[:count].copy())
        upper.lock_ref = node.lock_ref
        upper.last_access = node.last_access
        upper.swa_tombstone = node.swa_tombstone
        upper.swa_lock_ref = node.swa_lock_ref
        upper.swa_uuid, node.swa_uuid = node.swa_uuid, None
        self._attach(node.parent, upper)
        node.key, node.value = node.key[count:], node.value[count:].copy()
        self._attach(upper, node)
        return upper

    def _attach(self, parent: TreeNode, node: TreeNode) -> None:
        node.parent = parent
        place = self._child_key(node.key.namespace, node.key.token_ids)
        parent.children[place] = node

    # Insert.

    def insert(self, params: InsertParams) -> InsertResult:
        """Put a key's whole pages into the tree; nothing is freed."""
        key = self._aligned(params.key)
        if not len(key):
            return InsertResult()
        value = self._value(params, key)
        path, done = self._walk(key)
        path = self._cut_last(path)
        nodes = [node for node, _ in path]
        if done < len(key):
            parent = nodes[-1] if nodes else self.root_node
            nodes.append(self._add(parent, key[done:], value[done:]))
        self._touch(nodes)
        return InsertResult(prefix_len=done, inserted_len=len(key))

    def _value(self, params: InsertParams, key: RadixKey) -> np.ndarray:
        value = key.token_ids if params.value is None else params.value
        value = np.asarray(value, np.int32)
        if len(value) < len(key):
            raise ValueError(
                f"value has {len(value)} locations for {len(key)} tokens; wanted one "
                "each. Pass the request's row of the table."
            )
        return value[: len(key)]

    def _add(self, parent: TreeNode, key: RadixKey, value: np.ndarray) -> TreeNode:
        node = TreeNode(key, value.copy())
        self._attach(parent, node)
        self._evictable[key.rank] += len(key)
        return node

    # Evict.

    def evict(self, params: EvictParams) -> EvictResult:
        """Free whole unlocked leaves of a rank, oldest first."""
        if self.disable:
            return EvictResult()
        self.hicache_write_back(params)
        rank = self._rank(params.dp_rank)
        wanted, count = int(params.num_tokens), 0
        leaves = [n for n in self._nodes() if self._is_victim(n, rank)]
        heapq.heapify(leaves)
        while count < wanted and leaves:
            node = heapq.heappop(leaves)
            count += len(node)
            parent = self._remove(node)
            if self._is_victim(parent, rank):
                heapq.heappush(leaves, parent)
        return EvictResult(num_tokens_evicted=count)

    def _is_victim(self, node: TreeNode, rank: int) -> bool:
        return not (node.children or node.lock_ref) and node.key.rank == rank

    def _remove(self, node: TreeNode) -> TreeNode:
        """Free an unlocked leaf; returns its parent."""
        parent, rank = node.parent, node.key.rank
        assert parent is not None
        del parent.children[self._child_key(node.key.namespace, node.key.token_ids)]
        self.allocator.free(node.value, rank)
        self._evictable[rank] -= len(node)
        node.value = node.parent = None
        return parent

    def _nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents first."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Locks.

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Lock the path from the root to a node."""
        delta = 0
        for each in self._ancestry(node):
            if each.lock_ref == 0:
                self._move(each, -1)
                delta -= len(each)
            each.lock_ref += 1
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(
        self, node: Any, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Give a lock back.

        Raises:
          RuntimeError: the path is not locked.
        """
        delta = 0
        for each in self._ancestry(node):
            if each.lock_ref == 0:
                raise RuntimeError(
                    f"{each} is not locked; wanted a lock to give back. Unlock once "
                    "for each inc_lock_ref."
                )
            each.lock_ref -= 1
            if each.lock_ref == 0:
                self._move(each, 1)
                delta += len(each)
        return DecLockRefResult(delta)

    def _ancestry(self, node: TreeNode) -> list[TreeNode]:
        """The node and those above it, the root left out.

        Raises:
          RuntimeError: the node has been evicted.
        """
        if self.disable:
            return []
        path = []
        while node is not self.root_node:
            if node.evicted or node.parent is None:
                raise RuntimeError(
                    f"{node} has left the tree; wanted a node of the last match. "
                    "Match and lock before anything allocates."
                )
            path.append(node)
            node = node.parent
        return path

    def _move(self, node: TreeNode, sign: int) -> None:
        """Count a node as evictable (+1) or protected (-1)."""
        self._evictable[node.key.rank] += sign * len(node)
        self._protected[node.key.rank] -= sign * len(node)

    # Sizes and text.

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Unlocked tokens of the tree."""
        return self._evictable[dp_rank]

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Locked tokens of the tree."""
        return self._protected[dp_rank]

    def tree_text(self) -> str:
        """The tree as text, a line a node."""
        lines, stack = ["root"], [(self.root_node, 1)]
        while stack:
            node, depth = stack.pop()
            if node is not self.root_node:
                head = list(node.key.token_ids[:10])
                mark = " no swa" if node.swa_tombstone else ""
                lines.append(
                    f"{'  ' * (depth - 1)}{len(node)} tokens {head} "
                    f"locks {node.lock_ref}{mark} {node.key.namespace}"
                )
            stack.extend((child, depth + 1) for child in node.children.values())
        return "\n".join(lines)
