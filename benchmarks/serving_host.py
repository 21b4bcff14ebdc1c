"""The same model served with its index on the host: what an engine does today.

The tree is in host memory. Before each step the host matches and locks who comes in,
allocates pages, and uploads page tables, positions and tokens; after it, it reads the
new tokens back and publishes. Forward and sampling are those of the fused step, jitted,
the pools donated. Scheduling is the fused step's: the oldest prompts go on, whoever has
one token to compute decodes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.lanes import Lanes, Pools
from uhrc_fn.serving.models.model import forward
from uhrc_fn.serving.sampling import sample


class HostIndex(Protocol):
    """A prefix tree on the host with its page allocator; pages are ids from 1."""

    def match(self, tokens: list[int]) -> tuple[Any, list[int]]:
        """What to lock, and the pages that hit."""
        ...

    def lock(self, match: Any) -> Any: ...
    def unlock(self, match: Any, receipt: Any) -> Any: ...

    def insert(self, tokens: list[int], pages: list[int]) -> int:
        """Insert whole pages; how many of them the tree held already."""
        ...

    def take(self, count: int) -> list[int]:
        """Allocate pages, evicting what is short."""
        ...

    def give(self, pages: list[int]) -> None: ...


class OracleIndex:
    """The plain-Python oracle of the tests."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self.lock = tree.lock

    def match(self, tokens: list[int]) -> tuple[Any, list[int]]:
        match = self._tree.match(self._tree.key(tokens))
        return match, match.pages

    def unlock(self, match: Any, receipt: Any) -> None:
        self._tree.unlock(receipt)

    def insert(self, tokens: list[int], pages: list[int]) -> int:
        tree = self._tree
        return tree.insert(tree.key(tokens), pages).prefix_len // tree.page_size

    def take(self, count: int) -> list[int]:
        pages = self._tree.alloc(count)
        return _all_of(pages, count)

    def give(self, pages: list[int]) -> None:
        self._tree.free(pages)


class PeerIndex:
    """The peer's tree and allocator; its values are token slots, not pages."""

    def __init__(self, tree: Any) -> None:
        self._tree, self._size = tree, tree.page_size
        self.lock, self.unlock = tree.lock, tree.unlock

    def match(self, tokens: list[int]) -> tuple[Any, list[int]]:
        match = self._tree.match(self._tree.key(tokens))
        return match, self._pages(match.device_indices)

    def insert(self, tokens: list[int], pages: list[int]) -> int:
        key = self._tree.key(tokens[: len(pages) * self._size])
        return self._tree.insert(key, self._slots(pages)) // self._size

    def take(self, count: int) -> list[int]:
        short = count - self._tree.num_free()
        if short > 0:
            self._tree.evict(short)
        slots = self._tree.alloc(count) if count else ()
        return _all_of(self._pages([] if slots is None else slots), count)

    def give(self, pages: list[int]) -> None:
        if pages:
            self._tree.allocator.free(self._slots(pages))

    def _pages(self, slots: Any) -> list[int]:
        return (np.asarray(slots, np.int32)[:: self._size] // self._size).tolist()

    def _slots(self, pages: list[int]) -> np.ndarray:
        first = np.asarray(pages, np.int32)[:, None] * self._size
        return (first + np.arange(self._size, dtype=np.int32)).reshape(-1)


def _all_of(pages: list[int], count: int) -> list[int]:
    if len(pages) < count:
        raise SystemExit(
            f"{count} pages wanted, {len(pages)} given: a benchmark's pool must hold "
            "all that runs at once; raise its number of pages"
        )
    return pages


@dataclasses.dataclass(eq=False)
class HostRequest:
    """A request; its row of the tables is its own while it runs."""

    prompt: np.ndarray
    limit: int
    row: int = -1
    output: list[int] = dataclasses.field(default_factory=list)
    hit_length: int = 0
    is_finished: bool = False
    match: Any = None
    receipt: Any = None
    num_shared: int = 0
    """Pages of its table that are the tree's."""


class HostEngine:
    """`Engine`, with the index on the host and a call of the device for each step."""

    def __init__(
        self, model: Any, config: ServeConfig, pools: Pools, index: HostIndex
    ) -> None:
        rows = config.decode_lanes
        self.model, self.config, self.pools, self.index = model, config, pools, index
        self._run: Callable = _jitted()
        self._waiting: list[HostRequest] = []
        self._by_row: dict[int, HostRequest] = {}  # oldest first
        self._tokens = np.zeros((rows, config.max_length), np.int32)
        self._length = np.zeros(rows, np.int32)  # known tokens
        self._computed = np.zeros(rows, np.int32)  # tokens whose KV there is
        self._pages = np.zeros((rows, config.max_pages), np.int32)
        self._num_pages = np.zeros(rows, np.int32)
        self._limit = np.zeros(rows, np.int32)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self._waiting and not self._by_row

    def submit(self, prompt: np.ndarray, max_tokens: int) -> HostRequest:
        """Hand over a request."""
        request = HostRequest(prompt, prompt.size + max_tokens)
        self._waiting.append(request)
        return request

    def step(self) -> list[tuple[HostRequest, list[int]]]:
        """Run a step; the requests that got a token, with it."""
        self._admit()
        left = self._length - self._computed
        rows = np.fromiter(self._by_row, np.int32, len(self._by_row))
        prefill = rows[left[rows] > 1][: self.config.prefill_lanes]
        decode = rows[left[rows] == 1]
        num_new = np.minimum(left, self.config.chunk_tokens)
        given = []
        for chosen, lanes, tokens in (
            (prefill, self.config.prefill_lanes, self.config.chunk_tokens),
            (decode, self.config.decode_lanes, 1),
        ):
            if chosen.size:
                self._extend(chosen, num_new)
                upload = self._upload(chosen, lanes, tokens, num_new)
                self.pools, token = self._run(self.model, self.pools, *upload)
                given.append((chosen, token))
                self._computed[chosen] += num_new[chosen]
        news = []
        for chosen, token in given:
            news += self._append(chosen, np.asarray(token)[: chosen.size])
        self._publish(prefill)
        return news

    def _admit(self) -> None:
        """Match, lock and allocate for whoever there is a row for."""
        size = self.config.cache.page_size
        free = [row for row in range(self.config.decode_lanes)
                if row not in self._by_row]  # fmt: skip
        for row in free[: len(self._waiting)]:
            request = self._waiting.pop(0)
            tokens = request.prompt.tolist()
            request.match, pages = self.index.match(tokens[:-1])
            request.receipt = self.index.lock(request.match)
            request.num_shared = len(pages)
            request.hit_length = len(pages) * size
            wanted = min(len(tokens) // size + 1, self.config.max_pages)
            pages = pages + self.index.take(wanted - len(pages))
            request.row = row
            self._by_row[row] = request
            self._tokens[row, : len(tokens)] = request.prompt
            self._length[row], self._limit[row] = len(tokens), request.limit
            self._computed[row] = request.hit_length
            self._pages[row, : len(pages)] = pages
            self._num_pages[row] = len(pages)

    def _extend(self, rows: np.ndarray, num_new: np.ndarray) -> None:
        """Give rows the pages that their new tokens lie in."""
        end = self._computed[rows] + num_new[rows]
        wanted = -(-end // self.config.cache.page_size)
        for row, count in zip(rows, wanted, strict=True):
            held = self._num_pages[row]
            if count > held:
                self._pages[row, held:count] = self.index.take(int(count - held))
                self._num_pages[row] = count

    def _upload(self, rows, lanes: int, tokens: int, num_new: np.ndarray) -> tuple:
        """What the device is told: tokens, positions and page tables of the lanes."""
        pad = lambda values: np.concatenate(
            [values, np.zeros((lanes - len(values), *values.shape[1:]), values.dtype)]
        )
        start, new = self._computed[rows], num_new[rows]
        column = start[:, None] + np.arange(tokens)[None]
        known = self._tokens[rows[:, None], np.minimum(column, self._limit.max() - 1)]
        ids = np.where(np.arange(tokens)[None] < new[:, None], known, 0)
        none = np.zeros(lanes, np.int32)
        told = Lanes(
            token_ids=pad(ids.astype(np.int32)),
            start=pad(start),
            num_new=pad(new),
            pages=pad(self._pages[rows]),
            swa_pages=np.zeros((lanes, 0), np.int32),
            slots=none,
            track=TrackMetadata(none, np.zeros(lanes, bool)),
        )
        return told, np.zeros(lanes, np.float32), none

    def _append(self, rows, token: np.ndarray) -> list:
        """Append the tokens of rows that are computed whole; end who is done."""
        news = []
        for row, value in zip(rows.tolist(), token.tolist(), strict=True):
            if self._computed[row] < self._length[row]:
                continue
            request = self._by_row[row]
            request.output.append(value)
            news.append((request, [value]))
            if self._length[row] < self.config.max_length:
                self._tokens[row, self._length[row]] = value
            self._length[row] += 1
            if self._length[row] >= request.limit:
                self._finish(request)
        return news

    def _insert(self, request: HostRequest) -> tuple[list[int], int]:
        """Insert what is computed, in whole pages; the twins are free."""
        row, size = request.row, self.config.cache.page_size
        whole = int(self._computed[row]) // size
        tokens = self._tokens[row, : whole * size].tolist()
        pages = self._pages[row, :whole].tolist()
        held = self.index.insert(tokens, pages)
        self.index.give(pages[request.num_shared : held])
        return tokens, whole

    def _publish(self, rows: np.ndarray) -> None:
        """Publish chunks of requests that go on, and lock what is the tree's now."""
        for row in rows.tolist():
            request = self._by_row.get(row)
            if request is None:
                continue
            tokens, whole = self._insert(request)
            match, pages = self.index.match(tokens)
            receipt = self.index.lock(match)
            self.index.unlock(request.match, request.receipt)
            request.match, request.receipt = match, receipt
            self._pages[row, :whole], request.num_shared = pages, whole

    def _finish(self, request: HostRequest) -> None:
        """Publish a request that ended, and empty its row."""
        row = request.row
        _, whole = self._insert(request)
        self.index.give(self._pages[row, whole : self._num_pages[row]].tolist())
        self.index.unlock(request.match, request.receipt)
        self._pages[row] = 0
        self._num_pages[row] = self._length[row] = self._computed[row] = 0
        request.is_finished = True
        del self._by_row[row]


@functools.cache
def _jitted() -> Callable:
    def run(model, pools, lanes: Lanes, temperature, seed):
        pools, logits = forward(model, pools, lanes)
        position = lanes.start + lanes.num_new
        return pools, sample(logits, temperature, seed, position)

    return jax.jit(run, donate_argnums=1)
