"""The host trees that `ops.py` compares with, behind one small interface."""

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


def oracle_maker() -> MakeTree | None:
    """Trees of the plain-Python oracle of the tests; None where it is not there."""
    return None
