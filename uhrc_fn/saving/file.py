"""The format of a file, and its bytes on disk; no JAX here.

A preamble (magic, format version, size of the header), a header, and arrays, C order,
one after another. Behind the header and behind each array stands a digest of all bytes
before it but the digests. They tell damage, not forgery.
"""

import contextlib
import hashlib
import os
import pathlib
import struct
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

FORMAT_VERSION = 1
"""Rises with any change of the layout of a file or of the meaning of an array."""

MAX_HEADER = 1 << 26
DIGEST_BYTES = 16
REMEDY = "Load another copy, or start with an empty cache."

_MAGIC = b"uhrc_fn\0"
_PREAMBLE = struct.Struct("<8sII")


class SavedStateError(ValueError):
    """A file is refused: damaged, of another format, or of other settings."""


class Writer:
    """Writes a file from the front, each part with its digest behind it."""

    def __init__(self, file: BinaryIO, header: bytes):
        self.file = file
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._put(_PREAMBLE.pack(_MAGIC, FORMAT_VERSION, len(header)) + header)

    def array(self, array: np.ndarray) -> None:
        """Write the next array."""
        self._put(_bytes_of(np.ascontiguousarray(array)))

    def _put(self, data) -> None:
        self.digest.update(data)
        self.file.write(data)
        self.file.write(self.digest.digest())


class Reader:
    """Reads a file from the front and compares each digest that it meets.

    Every method raises `SavedStateError` where the file is not what it must be.
    """

    def __init__(self, file: BinaryIO, path: str | os.PathLike):
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def header(self) -> bytes:
        """Read the header; it never takes more memory than the file has bytes."""
        preamble = self.file.read(_PREAMBLE.size)
        if preamble[: len(_MAGIC)] != _MAGIC or len(preamble) < _PREAMBLE.size:
            raise SavedStateError(
                f"{self.path} begins with {preamble[: len(_MAGIC)]!r}; wanted "
                f"{_MAGIC!r} and more: it is no saved state, or damaged. {REMEDY}"
            )
        _, version, length = _PREAMBLE.unpack(preamble)
        if version != FORMAT_VERSION:
            raise SavedStateError(
                f"{self.path} has format version {version}; wanted {FORMAT_VERSION}. "
                "Load it with the release of uhrc_fn that saved it, or start with an "
                "empty cache."
            )
        if length > min(self.size, MAX_HEADER):
            raise self._damaged(f"a header of {length} bytes in a file of {self.size}")
        header = self.file.read(length)
        self.digest.update(preamble + header)
        self._compare("the header")
        return header

    def expect_arrays(self, num_bytes: list[int]) -> None:
        """Check that the file ends where arrays of these sizes do."""
        arrays = sum(num_bytes) + DIGEST_BYTES * len(num_bytes)
        wanted = self.file.tell() + arrays
        if self.size != wanted:
            raise self._damaged(f"{self.size} bytes where {wanted} were saved")

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Read the next array."""
        array = np.empty(shape, dtype)
        data = _bytes_of(array)
        self.file.readinto(data)  # type: ignore[attr-defined]
        self.digest.update(data)
        self._compare(name)
        return array

    def _compare(self, what: str) -> None:
        if self.file.read(DIGEST_BYTES) != self.digest.digest():
            raise self._damaged(f"a wrong checksum behind {what}")

    def _damaged(self, found: str) -> SavedStateError:
        return SavedStateError(f"{self.path} is damaged: it has {found}. {REMEDY}")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is complete and on disk."""
    handle, name = tempfile.mkstemp(".tmp", f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
    """Make a rename last; where folders cannot be opened, the system sees to it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8)
