"""What a cache could reach at best: without a capacity, and with perfect foresight."""

import dataclasses
import heapq

import numpy as np

from .workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrefixNodes:
    """The prefix tree of a whole workload, without any capacity.

    Args:
      nodes: int32 `[pages]`, the node (page together with all pages before it) of each
        page of the workload.
      num_nodes: unique nodes.
      request_of: int32 `[pages]`, the request of each page.
    """

    nodes: np.ndarray
    num_nodes: int
    request_of: np.ndarray


def prefix_nodes(workload: Workload) -> PrefixNodes:
    """Name the tree node of every page."""
    bounds = workload.page_offsets
    page_ids = name_pages(workload)
    starts = bounds[:-1][np.diff(bounds) > 0]
    if workload.namespaces is None:
        roots = None
    else:
        used = np.diff(bounds) > 0
        _, inverse = np.unique(workload.namespaces[used], axis=0, return_inverse=True)
        roots = inverse.ravel()
    nodes, count = nodes_if_chained(page_ids, starts, roots)
    if nodes is None:
        nodes, count = nodes_by_parent(page_ids, starts, roots)
    requests = np.arange(workload.num_requests, dtype=np.int32)
    return PrefixNodes(
        nodes=nodes, num_nodes=count, request_of=np.repeat(requests, np.diff(bounds))
    )


def name_pages(workload: Workload) -> np.ndarray:
    """An id for the content of each page; the key itself where a page is one token."""
    if workload.page_size == 1:
        return workload.keys
    width = workload.page_size * 4
    raw = workload.keys.tobytes()
    seen: dict[bytes, int] = {}
    ids = (
        seen.setdefault(raw[i : i + width], len(seen))
        for i in range(0, len(raw), width)
    )
    return np.fromiter(ids, np.int32, len(raw) // width)


def nodes_if_chained(page_ids, starts, roots) -> tuple[np.ndarray | None, int]:
    """Use the ids as they are where each already names its whole prefix.

    That holds exactly if every id has one parent; Mooncake and Claude Code ids do.
    """
    if not len(page_ids) or roots is not None:
        return None, 0
    highest = int(page_ids.max())
    if highest > 4 * len(page_ids) + 1024:
        return None, 0  # sparse ids: the tables below would not pay
    before = np.empty_like(page_ids)
    before[1:] = page_ids[:-1]
    before[starts] = -1
    parent = np.full(highest + 1, -2, np.int32)
    parent[page_ids] = before
    if not np.array_equal(parent[page_ids], before):
        return None, 0
    alive = parent != -2
    names = np.cumsum(alive, dtype=np.int32) - 1
    return names[page_ids], int(alive.sum())


def nodes_by_parent(page_ids, starts, roots) -> tuple[np.ndarray, int]:
    """Number (parent, page) pairs in order of appearance."""
    seen: dict[int, int] = {}
    is_start = np.zeros(len(page_ids), bool)
    is_start[starts] = True
    root_of = iter([-1] * len(starts) if roots is None else (-1 - roots).tolist())
    nodes = np.empty(len(page_ids), np.int32)
    node = -1
    pages = zip(page_ids.tolist(), is_start.tolist(), strict=True)
    for position, (page, starts_here) in enumerate(pages):
        if starts_here:
            node = next(root_of)
        # A parent and a page id, both of 32 bits, in one key.
        node = seen.setdefault((node << 32) + page, len(seen))
        nodes[position] = node
    return nodes, len(seen)


def ideal_hit_pages(workload: Workload, tree: PrefixNodes) -> np.ndarray:
    """int64 `[requests]`: pages that some earlier request already brought."""
    first = np.empty(tree.num_nodes, np.int32)
    # Of repeated indices the last one written stays, so write backwards.
    first[tree.nodes[::-1]] = tree.request_of[::-1]
    # An earlier request brought all pages before this one too: hits are contiguous.
    is_hit = first[tree.nodes] < tree.request_of
    return np.bincount(tree.request_of[is_hit], minlength=workload.num_requests)


class BeladyBound:
    """The offline optimum: evict what is used again last, and bypass what is worse.

    A parent is used whenever its child is, so it is never used again later than the
    child: with ties broken by depth the optimum keeps whole prefixes, as a tree must,
    and no cache of the same pages has more page hits. (In tokens that is exact where
    all pages weigh the same.)

    Pages that every request visits together form a run, kept as one entry with the
    number of its leading pages that are cached.
    """

    def __init__(self, workload: Workload, tree: PrefixNodes):
        bounds = workload.page_offsets
        self.num_requests = workload.num_requests
        visits = np.bincount(tree.nodes, minlength=tree.num_nodes)[tree.nodes]
        starts = bounds[:-1][np.diff(bounds) > 0]
        # A page opens a run if it is visited less often than the page before it.
        is_head = np.ones(len(tree.nodes), bool)
        is_head[1:] = visits[1:] != visits[:-1]
        is_head[starts] = True
        heads = np.flatnonzero(is_head)
        self.requests = tree.request_of[heads]
        self.lengths = np.diff(heads, append=len(tree.nodes))
        self.depths = heads - bounds[self.requests]
        _, runs = np.unique(tree.nodes[heads], return_inverse=True)
        self.runs = runs.ravel()
        self.next_use = next_uses(self.runs, self.requests, self.num_requests)

    def hit_pages(self, capacity_pages: int) -> np.ndarray:
        """int64 `[requests]`: hit pages of each request."""
        never = self.num_requests
        hits = [0] * self.num_requests
        cached = [0] * (int(self.runs.max(initial=-1)) + 1)
        due = [0] * len(cached)  # next use of each run, to spot stale heap entries
        free = capacity_pages
        latest: list[tuple[int, int, int]] = []  # (-next use, -depth, run)
        columns = (self.requests, self.runs, self.lengths, self.depths, self.next_use)
        visits = zip(*(c.tolist() for c in columns), strict=True)
        for request, run, length, depth, again in visits:
            held = cached[run]
            hits[request] += held
            due[run] = again
            if again == never:
                free += held
                cached[run] = 0
                continue
            want = length - held
            taken = min(want, free)
            free -= taken
            want -= taken
            while want and latest:
                minus_due, _, victim = latest[0]
                if due[victim] != -minus_due or not cached[victim]:
                    heapq.heappop(latest)
                    continue
                if (minus_due, latest[0][1]) >= (-again, -depth):
                    break  # everything cached is used sooner: bypass the rest
                part = min(want, cached[victim])
                cached[victim] -= part
                want -= part
            cached[run] = length - want
            if cached[run]:
                heapq.heappush(latest, (-again, -depth, run))
        return np.array(hits, np.int64)


def next_uses(runs: np.ndarray, requests: np.ndarray, never: int) -> np.ndarray:
    """For each visit the request that visits the same run next, or `never`."""
    order = np.argsort(runs, kind="stable")
    following = np.full(len(runs), never, np.int64)
    same = runs[order[1:]] == runs[order[:-1]]
    following[order[:-1][same]] = requests[order[1:][same]]
    return following
