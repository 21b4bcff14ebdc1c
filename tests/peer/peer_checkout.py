"""Import sglang-jax's modules from a plain checkout, where a server's packages lack.

A package that is missing here is replaced by an empty module, but only for code of
the checkout: names of it exist and can be subclassed, and do nothing.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FOREIGN = ("sgl_jax", "uhrc_fn", "jax", "numpy")


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __iter__(cls):
        return iter(())

    def __contains__(cls, _item: Any) -> bool:
        return False


class _Anything(metaclass=_AnyMeta):
    """Stands for a name of a missing package: call it, subclass it, decorate by it."""

    def __init__(self, *_args: Any, **_kwargs: Any):
        pass

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __class_getitem__(cls, _item: Any) -> Any:
        return cls

    def __or__(self, other: Any) -> Any:
        return self


class _EmptyModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what nobody else does, for importers inside the checkout only."""

    def __init__(self, root: Path):
        self.root = str(root)
        self.names: list[str] = []

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top in _FOREIGN or not self._is_asked_by_checkout():
            return None
        self.names.append(fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _EmptyModule(spec.name)

    def exec_module(self, module):
        pass

    def _is_asked_by_checkout(self) -> bool:
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name != __file__ and "importlib" not in name:
                return name.startswith(self.root)
            frame = frame.f_back
        return False


def open_checkout(root: Path) -> list[str]:
    """Make the checkout's packages importable.

    Args:
      root: its `python` folder.

    Returns:
      a list that names the packages that were missing, as they are asked for.
    """
    sys.path.insert(0, str(root))
    # Made when the project is installed; a checkout has none.
    stub("sgl_jax.version", __version__="0", version="0")
    finder = _MissingPackages(root)
    sys.meta_path.append(finder)
    return finder.names


def stub(name: str, **names: Any) -> ModuleType:
    """Put a module in place of one that the tests import."""
    module = _EmptyModule(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module
