"""What a file must say to be a state of given classes, settings and shapes.

A reader makes the header that it wants from the state that it is given and compares
bytes, so nothing is allocated or built by what a file says. Only to name a difference
is a header parsed.
"""

import dataclasses
import enum
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


def describe(state) -> bytes:
    """The header of a state, as JSON.

    Raises:
      ValueError: a leaf is no array, or a static setting cannot be compared.
    """
    arrays = {n: f"{x.dtype.name}{list(x.shape)}" for n, x in named_leaves(state)}
    settings = {"byte order": sys.byteorder} | dict(_settings(state, ""))
    return json.dumps({"settings": settings, "arrays": arrays}).encode()


def named_leaves(state) -> list[tuple[str, Any]]:
    """The arrays of a state with their names.

    Raises:
      ValueError: a leaf is no array.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    named = [(_name(jax.tree_util.keystr(path)), leaf) for path, leaf in leaves]
    for name, leaf in named:
        # JAX's own types, as of random keys, are no types of NumPy.
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.hasobject:
            raise ValueError(
                f"{name} is a {type(leaf).__name__} of dtype {dtype}; wanted an array "
                "of numbers. Make it one, or leave it out of what is saved."
            )
    return named


def differences(came: bytes, wanted: bytes) -> list[str]:
    """Name what differs between the header of a file and the one wanted."""
    try:
        found = list(_differences(json.loads(came), json.loads(wanted)))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        found = []
    return found or ["its header is none that save writes"]


def _differences(came: dict, wanted: dict) -> Iterator[str]:
    for section in wanted:  # settings, the cause, come before shapes
        for name in wanted[section] | came[section]:
            pair = [x[section].get(name, "absent") for x in (came, wanted)]
            if pair[0] != pair[1]:
                yield f"{name} is {pair[0]!r} in the file, wanted {pair[1]!r}"


def _settings(node, path: str) -> Iterator[tuple[str, Any]]:
    """Name the class and the static fields of each record in a state."""
    is_below = lambda x: x is not node
    below = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_below)[0]
    if below and below[0][1] is node:
        return  # an array
    yield _name(path), type(node).__name__
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if field.metadata.get("static"):
                value = getattr(node, field.name)
                yield from _plain(value, f"{path}.{field.name}")
    for key, child in below:
        yield from _settings(child, path + jax.tree_util.keystr(key))


def _plain(value, path: str) -> Iterator[tuple[str, Any]]:
    """A static setting, in parts that JSON can hold."""
    if dataclasses.is_dataclass(value):
        yield _name(path), type(value).__name__
        for field in dataclasses.fields(value):
            yield from _plain(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple | list):
        yield _name(path), f"{len(value)} entries"
        for at, entry in enumerate(value):
            yield from _plain(entry, f"{path}[{at}]")
    elif path.endswith(".hash_seed"):  # may be secret: neither stored nor shown
        seed = hashlib.blake2b(str(value).encode(), digest_size=16)
        yield _name(path), f"BLAKE2b {seed.hexdigest()}"
    elif isinstance(value, enum.Enum):
        yield _name(path), value.name
    elif value is None or isinstance(value, bool | int | float | str):
        yield _name(path), value
    else:
        raise ValueError(
            f"{_name(path)} is a {type(value).__name__}; wanted numbers, strings and "
            "records of them, which a reader can compare. Leave it out of what is "
            "saved."
        )


def _name(path: str) -> str:
    return path.removeprefix(".") or "the state"
