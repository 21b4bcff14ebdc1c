"""`tree_string`: the path-compressed tree as a table, one line an edge."""

from collections.abc import Callable

from ..state import CacheState, Ring
from .edges import Edge, Namespace, namespaces, pool_sizes
from .host import HostCache, read

_COLUMNS = ("tokens", "pages", "locks", "holds", "age")
_IS_NUMBER = (True, False, True, False, True)
_MAX_TEXT = 40
_MAX_IDS = 4


def tree_string(
    cache: CacheState, *, max_tokens: int = 8, decode: Callable | None = None
) -> str:
    """Show the path-compressed tree, one line an edge, under a line for each pool.

    Columns: token count, FULL page ids, locks, the components whose values are there
    (``SWA 2/3``: two of three pages), and age in ticks since the newest refresh.
    Where a cache has several components, locks stand as ``FULL/SWA`` and the like.

    Args:
      cache: a `CacheState`; a stack of them is shown rank by rank.
      max_tokens: tokens of each edge that are shown.
      decode: turns a list of token ids into text, as a tokenizer's `decode` does;
        None shows the ids.

    Returns:
      The text.
    """
    hosts = read(cache)
    if cache.counters.ndim == 1:
        return _tree(hosts[0], max_tokens, decode)
    parts = (f"rank {r}\n{_tree(c, max_tokens, decode)}" for r, c in enumerate(hosts))
    return "\n\n".join(parts)


def preview(tokens: tuple[int, ...], max_tokens: int, decode: Callable | None) -> str:
    """The first tokens of an edge, as ids or as text in quotes."""
    shown, more = list(tokens[:max_tokens]), len(tokens) > max_tokens
    if decode is None:
        return " ".join(map(str, shown)) + (" …" if more else "")
    text = str(decode(shown))
    if len(text) > _MAX_TEXT:
        text, more = text[:_MAX_TEXT], True
    return repr(text) + (" …" if more else "")


def namespace_label(namespace: Namespace) -> str:
    """How a namespace is called: the start of its digest."""
    digest = namespace.digest
    return f"namespace {digest[:8]}…" if digest else "default namespace"


def lock_label(edge: Edge) -> str:
    """Locks of an edge, by component; ``-`` for none at all."""
    locks = edge.lock_ref.values()
    return "/".join(map(str, locks)) if any(locks) else "-"


def pool_line(sizes: dict[str, int]) -> str:
    """Where a pool's entries are, in words."""
    return (
        f"{sizes['free']} free, {sizes['evictable']} evictable, "
        f"{sizes['protected']} protected, {sizes['requests']} with requests, "
        f"of {sizes['capacity']}"
    )


def summary(c: HostCache) -> str:
    """Nodes, clock and status in a line."""
    status = ", ".join(c.status) or "OK"
    capacity = len(c.rings[Ring.NODES])
    tokens = f"{c.config.page_size} token{'s' * (c.config.page_size > 1)} a page"
    return (
        f"{c.live_nodes.size} of {capacity} nodes, {tokens}, clock {c.clock}, "
        f"status {status}"
    )


def _tree(c: HostCache, max_tokens: int, decode) -> str:
    pools = pool_sizes(c)
    width = max(map(len, pools))
    head = [summary(c)]
    head += [f"{name:<{width}}  {pool_line(sizes)}" for name, sizes in pools.items()]
    rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
    for namespace in namespaces(c):
        rows.append((namespace_label(namespace), *[""] * len(_COLUMNS)))
        rows += _rows(c, namespace.children, max_tokens, decode)
    if len(rows) == 1:
        return "\n".join([*head, "the tree is empty"])
    return "\n".join([*head, *_aligned(rows)])


def _rows(c: HostCache, tops, max_tokens: int, decode):
    """One row an edge, with the branches drawn in the first cell."""
    rows = []
    stack = [(e, "", e is tops[-1]) for e in reversed(tops)]
    while stack:
        edge, indent, is_last = stack.pop()
        branch = "└─ " if is_last else "├─ "
        text = preview(edge.tokens, max_tokens, decode)
        rows.append((indent + branch + text, *_cells(c, edge)))
        below = indent + ("   " if is_last else "│  ")
        stack += [(e, below, e is edge.children[-1]) for e in reversed(edge.children)]
    return rows


def _cells(c: HostCache, edge: Edge) -> tuple[str, ...]:
    newest = max(s for s in edge.last_access.values() if s is not None)
    return (
        str(len(edge.tokens)),
        _ranges(edge.pages["FULL"]),
        lock_label(edge),
        "+".join(filter(None, (_held(edge, name) for name in edge.pages))),
        str(c.clock - newest),
    )


def _held(edge: Edge, name: str) -> str:
    entries = edge.pages[name]
    present = sum(e is not None for e in entries)
    if not present:
        return ""
    # A snapshot stands for all tokens before it.
    is_whole = name == "RECURRENT" or present == len(entries)
    return name if is_whole else f"{name} {present}/{len(entries)}"


def _ranges(ids) -> str:
    """Page ids with runs drawn together: ``3-5,9``."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_MAX_IDS]]
    return ",".join(shown) + (",…" if len(runs) > _MAX_IDS else "")


def _aligned(rows) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *cells in rows:
        line = first.ljust(widths[0])
        for cell, width, is_number in zip(cells, widths[1:], _IS_NUMBER, strict=True):
            line += "  " + (cell.rjust(width) if is_number else cell.ljust(width))
        lines.append(line.rstrip())
    return lines
