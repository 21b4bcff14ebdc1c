"""GGUF files: metadata by name, and quantised tensors as float32 arrays."""

import pathlib
from typing import Any

import numpy as np


class GGUFFile:
    """A file of weights, mapped into memory and read part by part."""

    def __init__(self, path: str | pathlib.Path):
        """Open it.

        Raises:
          ModuleNotFoundError: the package `gguf` is not installed.
          FileNotFoundError: there is no such file.
          ValueError: it is no GGUF file.
        """
        try:
            import gguf  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ModuleNotFoundError(
                "reading GGUF needs the package 'gguf', which is not installed; "
                "install it with pip install 'uhrc_fn[weights]'."
            ) from None
        self.path = pathlib.Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file; wanted a GGUF.")
        try:
            self._reader = gguf.GGUFReader(self.path)
        except ValueError as error:
            raise ValueError(f"{path}: not a GGUF file ({error}).") from None
        self._dequantize = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @property
    def tensors(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def get(self, key: str, default=None) -> Any:
        """A metadata value as Python has it, or `default` where there is none."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A metadata value that must be there.

        Raises:
          ValueError: it is not.
        """
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.path}: no metadata {key!r}; wanted a complete GGUF. Convert "
                "the model anew."
            )
        return value

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, outputs first: [outer, inner] of a linear map.

        Raises:
          ValueError: there is none of this name.
        """
        if name not in self._tensors:
            raise ValueError(
                f"{self.path}: no tensor {name!r}; wanted a complete GGUF. Convert "
                "the model anew."
            )
        tensor = self._tensors[name]
        return self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
