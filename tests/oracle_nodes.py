"""What the hybrid oracle is built of: nodes of one page, keys, results."""

from collections.abc import Iterator
from dataclasses import dataclass, field

FULL, SWA, RECURRENT = range(3)

Freed = dict[int, list[int]]
"""Component -> ids, in order."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a cache is made for."""

    components: tuple[int, ...]
    page_size: int
    capacity: tuple[int, int, int]
    """FULL pages, SWA pages, slots."""
    max_prefix_pages: int
    """Clock ticks follow from it, not from a key's own length."""
    max_live_receipts: int
    window_pages: int = 0
    """Pages that cover the sliding window."""
    swa_inserts_are_recent: bool = False
    """Whether all SWA pages of a key that is inserted count as used."""
    grid: int = 1
    """Tokens between positions where a snapshot may stand."""


@dataclass(frozen=True)
class Key:
    """Whole pages, each a tuple of tokens; the first one is (namespace, tokens)."""

    pages: list[tuple]
    length: int
    """Tokens of the prompt, those past the pages too."""


class Node:
    """One page. Values, stamps and lock counts are by component."""

    def __init__(self, parent: "Node | None", page: tuple | None):
        self.parent = parent
        self.page = page
        self.depth = parent.depth + 1 if parent else 0
        self.children: dict[tuple, Node] = {}
        self.values: list = [None, None, None]
        self.stamps: list = [None, None, None]
        self.locks = [0, 0, 0]
        self.is_alive = True
        if parent:
            parent.children[page] = self

    def unlink(self) -> None:
        """Leave the tree."""
        assert not any(self.locks) and not any(self.values)
        self.is_alive = False
        del self.parent.children[self.page]

    def upwards(self) -> "Iterator[Node]":
        """This node and all above it, without the root."""
        node = self
        while node.parent:
            yield node
            node = node.parent

    def below(self) -> "Iterator[Node]":
        """Every node below this one."""
        for child in self.children.values():
            yield child
            yield from child.below()

    def name(self) -> tuple:
        """Namespace and tokens from the root."""
        pages: list = [node.page for node in self.upwards()]
        first, *rest = reversed(pages)
        namespace, tokens = first
        return namespace, tokens + sum(rest, ())


@dataclass(frozen=True)
class Match:
    """What a key hits, and why not more; vectors are by component."""

    pages: list[int]
    hit_length: int  # tokens
    full_length: int  # tokens of the FULL run
    branching: tuple[int, ...]
    lost: tuple[int, ...]
    slot: int  # of the snapshot at the hit, 0 for none
    path: list[Node] = field(repr=False, compare=False)
    full_only: bool = False


@dataclass(frozen=True)
class Receipt:
    """A lock to be given back once."""

    serial: int


def _lists() -> dict[int, list[int]]:
    return {FULL: [], SWA: [], RECURRENT: []}


@dataclass
class InsertResult:
    """Lengths in tokens; adopted and duplicate are pages of the key, by component."""

    prefix_len: int
    inserted_len: int = 0
    page_table: list[int] = field(default_factory=list)
    adopted: dict[int, list[int]] = field(default_factory=_lists)
    duplicate: dict[int, list[int]] = field(default_factory=_lists)
    recurrent_exist: bool = False
    recurrent_committed: bool = False
