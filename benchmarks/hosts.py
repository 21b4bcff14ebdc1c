"""The host trees that `ops.py` compares with, behind one small interface."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import peer

ROOT = Path(__file__).resolve().parents[1]


class HostTree(Protocol):
    """A prefix tree in host memory; keys are made of Python lists of ints."""

    def key(self, tokens: list[int]) -> Any: ...
    def match(self, key: Any) -> Any: ...
    def insert(self, key: Any, value: Any) -> Any: ...
    def lock(self, match: Any) -> Any: ...
    def unlock(self, match: Any, receipt: Any) -> Any: ...
    def evict(self, num_pages: int) -> Any: ...
    def alloc(self, num_pages: int) -> Any: ...
    def hold_frees(self) -> Any: ...


MakeTree = Callable[[int, int], HostTree]


def peer_maker(path: Path) -> MakeTree:
    """Trees of the peer from the `python` folder of its checkout at `path`."""
    module, stubs = peer.load(path)
    if stubs:
        print(f"peer: stubbed {', '.join(stubs)}", file=sys.stderr)
    return lambda page_size, num_pages: peer.Peer(module, page_size, num_pages)


class OracleTree:
    """The plain-Python oracle of the tests; its keys are cut into pages beforehand."""

    def __init__(self, oracle: Any, page_size: int, num_pages: int) -> None:
        self.tree = oracle.Oracle(page_size, num_pages, max_live_receipts=1024)
        self.key = self.tree.key
        self.match = self.tree.match
        self.lock = self.tree.lock
        self.alloc = self.tree.alloc
        self._page_size = page_size

    def insert(self, key: Any, value: Any) -> Any:
        """Insert whole pages by id."""
        pages = value if isinstance(value, list) else value.tolist()
        return self.tree.insert(key, pages)

    def unlock(self, match: Any, receipt: Any) -> bool:
        """Undo one `lock`."""
        return self.tree.unlock(receipt)

    def evict(self, num_pages: int) -> list[int]:
        """Evict `num_pages`."""
        return self.tree.evict(num_pages * self._page_size)

    def hold_frees(self) -> None:
        """Do nothing: its free list is cheap."""


def oracle_maker() -> MakeTree:
    """Trees of the oracle."""
    sys.path.append(str(ROOT / "tests"))
    oracle = importlib.import_module("oracle")
    return lambda page_size, num_pages: OracleTree(oracle, page_size, num_pages)
