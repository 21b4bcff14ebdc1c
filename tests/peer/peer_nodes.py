"""Nodes of our tree as the peer's tests look at one."""

from typing import Any

import numpy as np

from uhrc_fn.engine import RadixKey
from uhrc_fn.engine.unified import TreeHandle


class PeerNode:
    """A node that a match ended in; one object for each use of a node's id."""

    def __init__(self, cache: Any, handle: TreeHandle, key: RadixKey):
        self.cache = cache
        self.handle = handle
        """Of the last match: what a lock takes."""
        self._key = key

    @property
    def key(self) -> RadixKey:
        """Tokens of its edge: since the last branch above, or the root."""
        tree = self.cache.mine.states[self.handle.dp_rank].tree
        parent, children = np.asarray(tree.parent), np.asarray(tree.num_children)
        node, pages = self.handle.id, 0
        while node and (pages == 0 or children[node] == 1):
            node, pages = int(parent[node]), pages + 1
        return self._key[len(self._key) - pages * self.cache.page_size :]

    @property
    def evicted(self) -> bool:
        """Whether it has left the tree."""
        tree = self.cache.mine.states[self.handle.dp_rank].tree
        node = self.handle.id
        is_alive = int(tree.parent[node]) != -1
        return not is_alive or int(tree.generation[node]) != self.handle.generation

    @property
    def component_data(self) -> "_ComponentValues":
        """Its values, by component."""
        return _ComponentValues(self)


class _ComponentValues:
    def __init__(self, node: PeerNode):
        self.node = node

    def __getitem__(self, component: int) -> "_Value":
        handle = self.node.handle
        state = self.node.cache.mine.states[handle.dp_rank]
        held = int(state.tree.value[component, handle.id])
        return _Value(None if self.node.evicted or held < 0 else held)


class _Value:
    def __init__(self, value: int | None):
        self.value = value
        self.host_value = None
