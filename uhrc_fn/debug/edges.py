"""The path-compressed tree that people see: unary chains of pages as one edge.

A node merges with its only child when both are locked alike in every component and the
upper one holds no snapshot: then nothing but the page size sets them apart.

    pages      root - a - b - c        edges      [a b] - [c d]
                              |                         \\
                          e - b' - d                     [e]
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..config import ComponentType
from ..state import CacheState, Counter, Owner, Ring
from ..tree_arrays import NULL, ROOT
from .host import HostCache, read


@dataclasses.dataclass(frozen=True)
class Edge:
    """A run of pages without a branch."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    pages: dict[str, tuple[int | None, ...]]
    """Pool entry of each page, by component; None is a tombstone."""
    lock_ref: dict[str, int]
    last_access: dict[str, int | None]
    """Newest stamp of the run, by component; None where it holds no value."""
    children: tuple["Edge", ...]

    @property
    def is_locked(self) -> bool:
        """Whether a receipt holds the FULL pages."""
        return self.lock_ref["FULL"] > 0

    @property
    def has_snapshot(self) -> bool:
        """Whether the last page holds a recurrent snapshot."""
        return self.pages.get("RECURRENT", (None,))[-1] is not None

    def walk(self) -> Iterator["Edge"]:
        """Yield this edge and all below it, parents first."""
        stack: list[Edge] = [self]
        while stack:
            edge = stack.pop()
            yield edge
            stack.extend(reversed(edge.children))


@dataclasses.dataclass(frozen=True)
class Namespace:
    """The part of the tree that one namespace sees."""

    digest: str
    """The 16 bytes in hexadecimal; empty for requests without a namespace."""
    children: tuple[Edge, ...]


def namespaces(c: HostCache) -> list[Namespace]:
    """Compress a tree: the default namespace first, then by digest.

    Siblings are ordered by their tokens, so that the result does not depend on node
    ids.
    """
    children: dict[int, list[int]] = {int(n): [] for n in c.live_nodes}
    tops: dict[str, list[int]] = {}
    for node in c.live_nodes.tolist():
        parent = int(c.parent[node])
        if parent == ROOT:
            space = c.namespace[node]
            digest = space.astype("<i4").tobytes().hex() if space.any() else ""
            tops.setdefault(digest, []).append(node)
        else:
            children[parent].append(node)
    return [Namespace(d, _edges(c, tops[d], children)) for d in sorted(tops)]


def _edges(c: HostCache, tops: list[int], children) -> tuple[Edge, ...]:
    """Build the edges from `tops` down, children first and without recursion."""
    runs: dict[int, list[int]] = {}
    order, stack = [], list(tops)
    while stack:
        first = stack.pop()
        run = [first]
        while _merges(c, run[-1], children[run[-1]]):
            run.append(children[run[-1]][0])
        runs[first] = run
        order.append(first)
        stack.extend(children[run[-1]])
    edges: dict[int, Edge] = {}
    sort = lambda nodes: tuple(
        sorted((edges[n] for n in nodes), key=lambda e: e.tokens)
    )
    for first in reversed(order):
        edges[first] = _edge(c, runs[first], sort(children[runs[first][-1]]))
    return sort(tops)


def _merges(c: HostCache, node: int, children: list[int]) -> bool:
    if len(children) != 1 or c.value[ComponentType.RECURRENT, node] != NULL:
        return False
    return bool(np.all(c.lock_ref[:, node] == c.lock_ref[:, children[0]]))


def _edge(c: HostCache, run: list[int], children: tuple[Edge, ...]) -> Edge:
    pages, locks, stamps = {}, {}, {}
    for k in c.config.components:
        value = c.value[k, run].tolist()
        pages[k.name] = tuple(None if v == NULL else v for v in value)
        locks[k.name] = int(c.lock_ref[k, run[0]])
        held = c.last_access[k, run][c.value[k, run] != NULL]
        stamps[k.name] = int(held.max()) if held.size else None
    tokens = tuple(c.tokens[run].ravel().tolist())
    return Edge(tuple(run), tokens, pages, locks, stamps, children)


def pool_sizes(c: HostCache) -> dict[str, dict[str, int]]:
    """Entries of each pool by where they are."""
    return {
        k.name: {
            "capacity": c.config.capacities[k],
            "free": c.counter(Counter.RING_SIZE + Ring(k)),
            "evictable": c.counter(Counter.EVICTABLE + k),
            "protected": c.counter(Counter.PROTECTED + k),
            "requests": int(np.sum(c.owners[k] == Owner.REQUEST)),
        }
        for k in c.config.components
    }


def to_pydict(cache: CacheState) -> Any:
    """The path-compressed tree and the totals as plain dicts, lists and ints.

    The result does not depend on node ids or on the order of insertion, so two trees
    with the same content compare equal when their pages and stamps do.

    Args:
      cache: a `CacheState`; a stack of them gives a list, one a rank.

    Returns:
      ``{"page_size", "nodes", "clock", "status", "pools", "namespaces"}``. A
      namespace is ``{"namespace": hex, "children": edges}``; an edge has ``tokens``,
      ``pages`` (entry of each page by component, None for a tombstone), ``lock_ref``
      and ``last_access`` (newest stamp) by component, and ``children``.
    """
    dicts = [_as_dict(c) for c in read(cache)]
    return dicts if cache.counters.ndim > 1 else dicts[0]


def _as_dict(c: HostCache) -> dict:
    return {
        "page_size": c.config.page_size,
        "nodes": int(c.live_nodes.size),
        "clock": c.clock,
        "status": c.status,
        "pools": pool_sizes(c),
        "namespaces": [
            {"namespace": n.digest, "children": [_edge_dict(e) for e in n.children]}
            for n in namespaces(c)
        ],
    }


def _edge_dict(top: Edge) -> dict:
    """An edge and all below it; chains may be deeper than Python's stack."""
    done: dict[int, dict] = {}
    for edge in reversed(list(top.walk())):
        done[id(edge)] = {
            "tokens": list(edge.tokens),
            "pages": {name: list(ids) for name, ids in edge.pages.items()},
            "lock_ref": dict(edge.lock_ref),
            "last_access": dict(edge.last_access),
            "children": [done.pop(id(child)) for child in edge.children],
        }
    return done[id(top)]
