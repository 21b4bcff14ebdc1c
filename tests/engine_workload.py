"""Random requests served by any cache of the engine, step by step."""

import dataclasses

import numpy as np

from uhrc_fn.engine.base import BasePrefixCache
from uhrc_fn.engine.request import Request


@dataclasses.dataclass(frozen=True)
class Workload:
    """Conversations over shared documents.

    A request takes a document or an earlier request's tokens, perhaps cuts them, often
    not at a whole page, and goes on with tokens of its own.
    """

    seed: int
    num_requests: int
    page_size: int
    max_pages: int
    dp_size: int
    max_running: int = 3
    branching: float = 0.3
    """Share of requests that cut what they take at a random token."""

    def requests(self) -> list[tuple[Request, list[int], bool]]:
        """``(request, its outputs, whether it is aborted)``, in order of arrival."""
        rng = np.random.default_rng(self.seed)
        longest = self.max_pages * self.page_size
        documents = [self._tokens(rng, longest // n) for n in (3, 4, 5)]
        sessions: list[np.ndarray] = []
        made = []
        for number in range(self.num_requests):
            base = documents[rng.integers(len(documents))]
            if sessions and rng.random() < 0.6:
                turn = sessions[rng.integers(max(len(sessions) - 8, 0), len(sessions))]
                base = turn if len(turn) < longest * 3 // 4 else base
            keep = len(base)
            if rng.random() < self.branching:
                keep = int(rng.integers(0, keep + 1))
            own = self._tokens(rng, int(rng.integers(1, longest // 2)))
            prompt = np.concatenate([base[:keep], own])[: longest - 4]
            outputs = self._tokens(rng, int(rng.integers(1, 4))).tolist()
            request = Request(
                prompt,
                extra_key=[None, None, "lora"][rng.integers(3)],
                dp_rank=int(rng.integers(self.dp_size)),
                rid=number,
            )
            sessions.append(np.concatenate([prompt, np.asarray(outputs, np.int32)]))
            made.append((request, outputs, bool(rng.random() < 0.1)))
        return made

    @staticmethod
    def _tokens(rng, count: int) -> np.ndarray:
        # Few ids, so that keys often part a token or two later than they were cut.
        return rng.integers(1, 8, count).astype(np.int32)


@dataclasses.dataclass
class Seen:
    """What a cache did."""

    hits: dict[int, int] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    accounts: list[tuple] = dataclasses.field(default_factory=list)
    short: int = 0
    """Requests dropped for want of pages."""
    evictions: int = 0

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits.values()) / self.tokens


def account(cache: BasePrefixCache) -> tuple:
    """Every size that two caches should agree on."""
    return tuple(
        (
            cache.full_evictable_size(rank),
            cache.protected_size(rank),
            cache.total_size(rank),
            cache.swa_total_size(rank),
            cache.available_size(rank),
            cache.swa_available_size(rank),
        )
        for rank in range(cache.dp_size)
    )


def run(cache: BasePrefixCache, load: Workload, slide=True, check=None) -> Seen:
    """Serve a workload, a chunk or a token of each running request in turn."""
    seen = Seen()
    hook = cache.hicache_write_back

    def count(params):
        seen.evictions += 1
        hook(params)

    cache.hicache_write_back = count
    waiting = load.requests()
    running: list[tuple[Request, list[int], bool]] = []
    while waiting or running:
        while waiting and len(running) < load.max_running:
            request, outputs, is_aborted = waiting.pop(0)
            probe = cache.peek_prefix_len(request.key(request.num_tokens - 1))
            match = cache.start_req(request)
            if match is None:  # no slots: it waits
                assert running
                waiting.insert(0, (request, outputs, is_aborted))
                break
            assert match.hit_length == probe
            seen.hits[request.rid] = probe
            seen.tokens += request.num_tokens
            running.append((request, outputs, is_aborted))
        for entry in list(running):
            if _advance(cache, entry, load, seen, slide):
                running.remove(entry)
            seen.accounts.append(account(cache))
            if check is not None:
                check(cache, [request for request, _, _ in running])
    return seen


def _advance(cache, entry, load: Workload, seen: Seen, slide: bool) -> bool:
    """One forward of a request; whether it ended."""
    request, outputs, is_aborted = entry
    chunk, interval = 3 * load.page_size, 2 * load.page_size
    prompt = len(request.origin_input_ids)
    if request.kv_committed_len >= prompt:
        if is_aborted or len(request.output_ids) == len(outputs):
            cache.cache_finished_req(request, is_insert=not is_aborted)
            return True
        request.output_ids.append(outputs[len(request.output_ids)])
        end = request.num_tokens - 1
    else:
        end = min(request.kv_committed_len + chunk, prompt)
    if cache.recurrent_extra_buffer_active():
        boundary = (request.kv_committed_len // interval + 1) * interval
        end = min(end, boundary)
    if not cache.extend_req(request, end):
        cache.cache_finished_req(request, is_insert=False)
        seen.short += 1
        return True
    request.kv_committed_len = end
    if cache.recurrent_extra_buffer_active() and end % interval == 0:
        tracks = len(request.recurrent_track_slots)
        request.recurrent_next_track_idx = (request.recurrent_next_track_idx + 1) % (
            tracks
        )
        request.recurrent_last_track_seqlen = end
    if end <= prompt:
        cache.cache_unfinished_req(request)
    if slide:
        cache.evict_req_swa(request, end)
    return False
