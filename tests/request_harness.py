"""Requests of a cache with their tables, pages, slots and states, under checks."""

import dataclasses

import numpy as np
import request_checks as checks
import request_programs as programs
from harness import numpy, pad, with_counter
from request_states import check_clone, marks, state_config

import uhrc_fn as u
from uhrc_fn import ComponentType, Status
from uhrc_fn.state import Counter

FULL, SWA, RECURRENT = ComponentType
NOTHING = Status(0)
EXHAUSTED = Status.PAGES_EXHAUSTED | Status.SWA_PAGES_EXHAUSTED | Status.SLOTS_EXHAUSTED


@dataclasses.dataclass
class Request:
    """What an engine knows of a running request."""

    row: int
    tokens: np.ndarray
    """Prompt, and the output that it will have."""
    prompt: int
    receipt: u.IncLockRefResult
    hit: int
    branching: int = 0
    written: int = 0
    shared: int = 0
    """Tokens at the front that are the tree's, and locked."""
    has_window: bool = True
    """Whether the lock holds an SWA window."""
    evicted: int = 0
    snapshot: int = 0
    """Tokens of the snapshot that it has kept to publish; extra buffer only."""


class RequestHarness:
    """A cache, its request tables and its states; `check` follows every step."""

    def __init__(self, config: u.CacheConfig, num_requests: int = 4):
        self.config = config
        self.cache = u.init(config)
        self.tracks = 2 if config.enable_recurrent_extra_buffer else 0
        shape = u.RequestConfig(
            num_requests=num_requests,
            max_pages=config.max_prefix_pages,
            page_size=config.page_size,
            has_swa=config.has_swa,
            num_track_slots=self.tracks,
        )
        self.states = None
        if config.has_recurrent:
            self.tables = u.init_hybrid_req_to_token_pool(shape)
            self.states = u.init_recurrent_state_pool(state_config(config))
        else:
            self.tables = u.init_req_to_token_pool(shape)
        self.live: dict[int, Request] = {}
        self.set_aside: list[int] = []
        """Slots that a test has allocated and no request owns."""

    # Reading.

    def key(self, tokens):
        pages = self.config.max_prefix_pages
        return u.radix_key(np.asarray(tokens), self.config, num_pages=pages)

    def known(self, request: Request):
        """The tokens with a known id: the last one is not written yet."""
        return self.key(request.tokens[: max(request.prompt, request.written + 1)])

    def table(self, request: Request) -> list[int]:
        """FULL pages of a request in order, without the zeros behind them."""
        pages = np.asarray(self.tables.pages)[request.row]
        return pages[: -(-request.written // self.config.page_size)].tolist()

    def free(self, component) -> int:
        """Free entries of a pool."""
        return int(self.cache.num_free[component])

    def in_tree(self, component) -> int:
        """Entries of a pool on nodes."""
        return int(self.cache.evictable[component] + self.cache.protected[component])

    def room(self, component) -> int:
        """Entries of a pool that a request could get."""
        return int(self.cache.num_free[component] + self.cache.evictable[component])

    # Steps; each ends with a check.

    def match(self, tokens):
        self.cache, match = programs.match(self.cache, self.key(tokens))
        return match

    def admit(
        self,
        tokens,
        prompt: int,
        match=None,
        trouble=Status.SLOTS_EXHAUSTED,
        move: bool = False,
    ) -> Request | None:
        """Match, clone, move or lock, take slots and a row; None where that fails."""
        tokens = np.asarray(tokens, np.int32)
        if match is None:
            match = self.match(tokens[: prompt - 1])
        match = numpy(match)
        slots = np.zeros(1 + self.tracks, np.int32)
        before = None if self.states is None else numpy(self.states)
        if self.states is None:
            self.cache, receipt = programs.inc_lock_ref(self.cache, match)
            ok = int(numpy(receipt).serial) != 0
        else:
            if move:
                self.cache, clone = programs.cow_move(self.cache, match)
            else:
                self.cache, self.states, clone = programs.cow_clone(
                    self.cache, self.states, match
                )
            receipt, ok, slots[0] = clone.receipt, bool(clone.ok), int(clone.slot)
        if not ok:
            assert int(numpy(receipt).serial) == 0 and slots[0] == 0
            self.check(trouble)
            return None
        hit = int(match.hit_length)
        if before is not None:
            after = numpy(self.states)
            source = int(match.cow_src_slot)
            check_clone(before, after, source, slots[0], tokens[:hit])
        if self.tracks:
            slots[1:] = self.allocate(slots=self.tracks).slots.ids
        row = min(set(range(1, self.tables.pages.shape[0])) - set(self.live))
        swa_pages = self._window(match)
        pages = np.asarray(match.device_indices)
        length = np.int32(hit)
        self.tables = programs.seat(
            self.tables, np.int32(row), pages, swa_pages, slots, length
        )
        branching = int(match.recurrent_branching_seqlen) if self.tracks else 0
        request = Request(row, tokens, prompt, receipt, hit, branching, hit, hit)
        request.evicted = hit
        self.live[row] = request
        if self.tracks and not slots[1:].all():
            self.abort(request, trouble)
            return None
        self.check()
        return request

    def start(self, tokens, written: int, prompt: int | None = None) -> Request:
        """Admit a request and write so many tokens of its prompt, chunk by chunk."""
        request = self.admit(tokens, min(prompt or len(tokens), len(tokens)))
        assert request is not None
        while request.written < written:
            count = min(self.chunk(request, 1 << 10), written - request.written)
            assert self.extend(request, count)
        return request

    def hit(self, tokens) -> int:
        """Tokens that a new request would resume from."""
        return int(numpy(self.match(tokens)).hit_length)

    def _window(self, match):
        """The tree's SWA pages that a lock on a match holds, by page."""
        path, value = np.asarray(match.path), np.asarray(self.cache.tree.value)[SWA]
        last = int(match.hit_length) // self.config.page_size
        page = np.arange(len(path))
        inside = (page >= last - self.config.window_pages) & (page < last)
        return np.where(inside, np.maximum(value[np.maximum(path, 0)], 0), 0)

    def allocate(self, pages: int = 0, swa_pages: int = 0, slots: int = 0):
        """All or none; the caller looks at `ok`."""
        most = self.config.max_prefix_pages
        self.cache, result = programs.alloc_request(
            self.cache,
            np.int32(pages),
            np.int32(swa_pages),
            np.int32(slots),
            max_pages=most,
            max_swa_pages=most if self.config.has_swa else 1,
            max_slots=max(self.tracks, 1),
        )
        result = numpy(result)
        given = [np.count_nonzero(part.ids) for part in result]
        assert given == ([pages, swa_pages, slots] if result.ok else [0, 0, 0])
        return result

    def set_slots_aside(self, count: int) -> None:
        """Let nobody have so many slots."""
        for _ in range(count):
            self.set_aside.append(int(self.allocate(slots=1).slots.ids[0]))
        self.check()

    def chunk(self, request: Request, budget: int) -> int:
        """Tokens of the next forward of a prefill."""
        cut = programs.cut_prefill(
            request.written,
            request.prompt,
            budget,
            interval=self.config.recurrent_grid if self.tracks else 0,
            page_size=self.config.page_size,
            branching_length=request.branching,
        )
        return int(cut.num_tokens)

    def extend(self, request: Request, num_new: int) -> bool:
        """Run a forward of a prefill or of a decode; False where pages are wanting."""
        size, most = self.config.page_size, self.config.max_prefix_pages
        length = request.written + num_new
        start = -(-request.written // size)
        need = -(-length // size) - start
        given = self.allocate(need, need if self.config.has_swa else 0)
        if not given.ok:
            self.check(EXHAUSTED)
            return False
        interval = self.config.recurrent_grid if self.tracks else 0
        self.tables, self.states = programs.forward(
            self.tables,
            self.states,
            np.int32(request.row),
            np.int32(start),
            given.pages.ids,
            pad(given.swa_pages.ids, most),
            tuple(map(np.int32, (length, num_new, request.branching))),
            marks(self.states, request.tokens[:length]),
            interval=interval,
        )
        request.written = length
        if self.tracks and (length % interval == 0 or length == request.branching):
            request.snapshot = length
        self.check()
        return True

    def slide(self, request: Request) -> None:
        """Let go of own SWA pages that no window will want."""
        config = self.config
        ends = programs.release_range(
            request.written,
            request.evicted,
            request.shared,
            window=config.sliding_window_size,
            page_size=config.page_size,
        )
        start, end, request.evicted = map(int, ends)
        pages = (np.int32(x // config.page_size) for x in (start, end))
        self.cache, self.tables = programs.slide(
            self.cache, self.tables, np.int32(request.row), *pages
        )
        self.check()

    def release_window(self, request: Request) -> None:
        """Decode has moved past the window: only FULL stays locked."""
        self.cache, request.receipt = programs.release_window(
            self.cache, request.receipt
        )
        assert int(numpy(request.receipt).serial)
        request.has_window = False
        self.check()

    def publish(self, request: Request):
        """Publish what a request that goes on has written."""
        wanted = self._publishable(request)
        if self.tracks and not self.room(RECURRENT):
            wanted = 0
        self.cache, self.tables, published = programs.cache_unfinished_req(
            self.cache,
            self.tables,
            np.int32(request.row),
            self.known(request),
            request.receipt,
        )
        result = numpy(published.insert)
        assert int(result.inserted_len) == wanted
        request.receipt = published.receipt
        request.shared = max(request.shared, wanted)
        request.has_window = True
        request.snapshot = 0 if wanted else request.snapshot
        self.check()
        return result

    def _publishable(self, request: Request) -> int:
        if self.tracks:
            return request.snapshot
        return request.written // self.config.page_size * self.config.page_size

    def finish(self, request: Request):
        """End a request: what it has written is published."""
        self.cache, self.tables, result = programs.cache_finished_req(
            self.cache,
            self.tables,
            np.int32(request.row),
            self.known(request),
            request.receipt,
        )
        result = numpy(result)
        assert int(result.inserted_len) == self._publishable(request)
        del self.live[request.row]
        self.check()
        return result

    def abort(self, request: Request, trouble: Status = NOTHING) -> None:
        """End a request: nothing new is published."""
        nodes = int(self.cache.num_live_nodes)
        self.cache, self.tables = programs.abort_req(
            self.cache, self.tables, np.int32(request.row), request.receipt
        )
        assert int(self.cache.num_live_nodes) == nodes
        del self.live[request.row]
        self.check(trouble)

    def evict(self, pages: int = 0, swa_pages: int = 0, slots: int = 0):
        """Evict so many entries of each component; returns tokens and slots freed."""
        size = self.config.page_size
        params = u.EvictParams(
            num_tokens=np.int32(pages * size),
            swa_num_tokens=np.int32(swa_pages * size),
            recurrent_num=np.int32(slots),
        )
        self.cache, result = programs.evict(self.cache, params)
        self.check()
        return np.asarray(result.scalars).tolist()

    def check(self, trouble: Status = NOTHING) -> None:
        """Count every entry of every pool, then ask every invariant.

        Args:
          trouble: status bits that the step may have set; it must have set one.
        """
        cache, tables, states = numpy((self.cache, self.tables, self.states))
        status = Status(int(cache.status))
        assert bool(status) == bool(trouble) and not status & ~trouble, repr(status)
        if status:
            self.cache = with_counter(self.cache, Counter.STATUS, 0)
        owned = numpy(programs.owned(self.tables))
        slots = np.append(owned.slots, np.array(self.set_aside, np.int32))
        owned = owned._replace(slots=slots)
        checks.check_entries(cache, owned)
        u.check_invariants(cache, owned)
        nodes = checks.node_keys(cache)
        checks.check_locks(cache, nodes, self.live)
        checks.check_tables(cache, nodes, tables, self.live)
        if states is not None:
            checks.check_snapshots(cache, nodes, tables, states, self.live)
