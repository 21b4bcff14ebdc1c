"""Lines of a trace file, and checks whose errors name the file and the line."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn

from ..workload import MAX_TOKEN


class TraceError(Exception):
    """A trace cannot be used; the message is one sentence for the user."""


class Line:
    """One parsed line of a trace, which knows where it stands."""

    def __init__(self, path: pathlib.Path, number: int, value: Any):
        self.path, self.number, self.value = path, number, value

    def fail(self, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {self.number}: {problem}.")

    def require(self, ok: Any, problem: str) -> None:
        if not ok:
            self.fail(problem)

    def get(self, key: str, kind: type, low: int | None = None) -> Any:
        """The field `key` of this line, which must be of `kind` (and >= `low`)."""
        return self.field(self.value, key, kind, low)

    def field(self, record: Any, key: Any, kind: type, low: int | None = None) -> Any:
        """The same for a record inside this line: a dict by key, a list by index."""
        shape, name = (dict, f"field {key!r}")
        if isinstance(key, int):
            shape, name = (list, f"entry {key}")
        if not isinstance(record, shape):
            self.fail(f"found {shorten(record)}, wanted {NAMES[shape]} with {name}")
        try:
            value = record[key]
        except (KeyError, IndexError):
            self.fail(f"{name} is missing")
        wanted = (int, float) if kind is float else kind
        if not isinstance(value, wanted) or isinstance(value, bool):
            self.fail(f"{name} is {shorten(value)}, wanted {NAMES[kind]}")
        if low is not None and value < low:
            self.fail(f"{name} is {value}, wanted at least {low}")
        if kind is int and value > MAX_TOKEN:
            self.fail(f"{name} is {value}, wanted less than 2^31")
        if kind is float and not abs(value) < 2**63:  # also true of nan
            self.fail(f"{name} is {shorten(value)}, wanted a number below 2^63")
        return value

    def ids(self, ids: Any) -> list[int]:
        """A list of block ids, each in [0, 2^31)."""
        self.require(isinstance(ids, list), f"ids are {shorten(ids)}, wanted a list")
        if ids:
            # One type check over the set is far cheaper than one an element.
            kinds = set(map(type, ids))
            self.require(
                kinds == {int}, "a block id is not an integer: " + shorten(ids)
            )
            low, high = min(ids), max(ids)
            bad = low if low < 0 else high
            self.require(
                0 <= low and high <= MAX_TOKEN,
                f"block id {bad} is outside [0, 2^31)",
            )
        return ids


NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_text_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of every line that is not blank; `.gz` or plain."""
    number = 0
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                text = raw.decode("utf-8").strip()
                if text:
                    yield number, text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(
            f"{path}, line {number + 1}: the gzip stream is damaged ({error})."
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}, line {number}: not UTF-8 text (byte {error.start})."
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}).") from None


def parse_lines(path: pathlib.Path) -> Iterator[Line]:
    """Yield every line parsed as JSON."""
    for number, text in read_text_lines(path):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise TraceError(f"{path}, line {number}: not JSON ({reason}).") from None
        yield Line(path, number, value)
