"""Drive sglang-jax's host tree, `UnifiedRadixCache`, from a checkout of that project.

None of its code is in this repository: `load` imports it from the `python` folder of
a checkout that the caller points to, and runs its tree and its allocator unmodified.

The tree imports the memory pool, which imports kernels and a server's dependencies
that a benchmark of the index needs none of. Whatever of those cannot be found is
replaced by an empty module whose names raise when called. The modules in
`MEASURED` may never be replaced: `load` refuses instead.
"""

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

TREE = "sgl_jax.srt.mem_cache.unified_radix_cache"
MEASURED = (
    TREE,
    "sgl_jax.srt.mem_cache.radix_cache",
    "sgl_jax.srt.mem_cache.allocator",
    "sgl_jax.srt.mem_cache.base_prefix_cache",
    "sgl_jax.srt.mem_cache.unified_cache_components",
)
# Their `__init__` files pull the server in; the folders alone are enough. A name that
# such a file would have defined is a stub as well.
_BARE_PACKAGES = ("sgl_jax", "sgl_jax.srt", "sgl_jax.srt.kernels", "sgl_jax.srt.utils")


class _Stub(ModuleType):
    """A module that could not be imported: names exist, calling one raises."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        super().__init__(name)
        self.__path__ = [str(folder)] if folder else []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(
                f"{self.__name__}.{name} was called, but {self.__name__} is missing "
                "here; the benchmark should reach nothing but the tree"
            )

        return refuse


def load(path: str | Path) -> tuple[ModuleType, list[str]]:
    """Import the tree from the `python` folder at `path`.

    Returns:
        The module of the tree, and the names of the modules replaced by stubs.
    """
    root = Path(path).resolve()
    if not (root / (TREE.replace(".", "/") + ".py")).is_file():
        raise ValueError(
            f"{root} has no {TREE.replace('.', '/')}.py; give the `python` folder of "
            "a sglang-jax checkout that has the unified cache"
        )
    for name in _BARE_PACKAGES:
        sys.modules[name] = _Stub(name, root / name.replace(".", "/"))
    stubs: list[str] = []
    while True:
        try:
            return importlib.import_module(TREE), stubs
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not missing or missing in stubs or missing.startswith(MEASURED):
                raise
            sys.modules[missing] = _Stub(missing)
            stubs.append(missing)


class Peer:
    """One tree of the peer with the peer's own page allocator.

    Keys are Python lists of ints, as its scheduler hands them over; values are its
    token slots (`page * page_size + offset`), as its allocator returns them.
    """

    def __init__(self, tree: ModuleType, page_size: int, num_pages: int) -> None:
        allocators = sys.modules["sgl_jax.srt.mem_cache.allocator"]
        if page_size == 1:
            self.allocator = allocators.TokenToKVPoolAllocator(num_pages, kvcache=None)
        else:
            self.allocator = allocators.PagedTokenToKVPoolAllocator(
                num_pages * page_size, page_size, kvcache=None
            )
        self.tree = tree.UnifiedRadixCache(None, self.allocator, page_size=page_size)
        self.page_size = page_size
        self._holds_frees = False
        self._key = tree.RadixKey
        self._match = tree.MatchPrefixParams
        self._insert = tree.InsertParams
        self._evict = tree.EvictParams

    def key(self, tokens: list[int]) -> Any:
        """Wrap a token list as the peer's key type."""
        return self._key(tokens, None, None)

    def match(self, key: Any) -> Any:
        """Longest cached prefix; the result carries slots and the node to lock."""
        return self.tree.match_prefix(self._match(key=key))

    def insert(self, key: Any, value: np.ndarray) -> int:
        """Insert whole pages; returns how many tokens the tree held already."""
        return self.tree.insert(self._insert(key=key, value=value)).prefix_len

    def lock(self, match: Any) -> Any:
        """Lock the path that `match` found."""
        return self.tree.inc_lock_ref(match.last_device_node)

    def unlock(self, match: Any, receipt: Any) -> None:
        """Undo one `lock`."""
        self.tree.dec_lock_ref(match.last_device_node, receipt.to_dec_params())

    def evict(self, num_pages: int) -> int:
        """Evict at least `num_pages`, in whole nodes; returns the tokens freed.

        The allocator checks its whole free list on each `free`, so what one call
        evicts is freed together, by the allocator's own means for that.
        """
        params = self._evict(num_tokens=num_pages * self.page_size)
        if self._holds_frees:
            return self.tree.evict(params).num_tokens_evicted
        self.allocator.free_group_begin()
        evicted = self.tree.evict(params).num_tokens_evicted
        self.allocator.free_group_end()
        return evicted

    def hold_frees(self) -> None:
        """From now on only note what is freed: times the tree without the allocator."""
        self._holds_frees = True
        self.allocator.free_group_begin()

    def alloc(self, num_pages: int) -> np.ndarray | None:
        """Take the slots of some pages, or None where there are not enough."""
        return self.allocator.alloc(num_pages * self.page_size)

    def num_free(self) -> int:
        """Count the free pages."""
        return self.allocator.available_size() // self.page_size
