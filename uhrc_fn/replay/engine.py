"""Replay a workload through the jitted cache: one scan over a chunk of requests.

Per request: match, lock, allocate what is missing (evicting; where nothing more can
be evicted, what there is), insert, unlock. Several static lengths are compiled into
the step and the scan switches between them, so that a short request costs a short
program.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .. import jitted
from ..config import CLOCK_LIMIT, CacheConfig
from ..ops.free import free_pages
from ..ops.insert import insert
from ..ops.lock import dec_lock_ref
from ..ops.once import once_if
from ..params import NO_NAMESPACE, InsertParams
from ..state import CacheState, init
from ..status import Status, describe
from .hybrid import Hybrid, full_blocks, replay_hybrid
from .ideal import prefix_nodes
from .progress import Progress, ProgressFile
from .progress import begin as begin_progress
from .records import ReplayProgress, ReplayResult
from .request import Requests, begin
from .workload import Workload

# Each compiled length is this many times the next shorter one. More lengths would fit
# requests closer, but their code then falls out of the processor's caches.
_LENGTH_STEP = 4
_MAX_LENGTHS = 3
_SHORTEST = 16

# Bits that a replay may meet and go on: the key was cut, or the clock wants winding.
_HARMLESS = Status.TABLE_FULL | Status.CLOCK_HIGH


def replay(
    workload: Workload,
    *,
    capacity_pages: int,
    batch: int = 512,
    measure_from: float = 0.0,
    reserved_pages: int = 0,
    hybrid: Hybrid | None = None,
    progress_file: ProgressFile | None = None,
    on_progress: Callable[[ReplayProgress], None] | None = None,
) -> ReplayResult:
    """Replay every request of a workload, in order.

    Args:
      workload: the requests.
      capacity_pages: pages of the pool; 0 means one for every page of the workload.
      batch: requests a device call; it changes speed only.
      measure_from: fraction of the requests that only warm the cache.
      reserved_pages: pages of the pool that the replay never gets. A pool of 1,000
        with 900 reserved hits as one of 100 does, and needs no compilation of its own.
      hybrid: components beside FULL; None for FULL alone.
      progress_file: keeps the progress; where the file is there, it is gone on from.
      on_progress: called after each device call.

    Returns:
      A `ReplayResult`.

    Raises:
      ValueError: `capacity_pages`, `batch` or `reserved_pages` is out of range.
      SavedStateError: the file is damaged, or that of another replay.
      RuntimeError: the cache met trouble that a replay should never meet.
    """
    lengths = np.diff(workload.page_offsets).astype(np.int32)
    if capacity_pages < 0 or batch < 1:
        raise ValueError(
            f"capacity_pages={capacity_pages}, batch={batch}; wanted a capacity of at "
            "least 0 (0 is enough for everything) and a batch of at least 1."
        )
    widths = _widths(int(lengths.max(initial=1)))
    num_pages = capacity_pages or max(prefix_nodes(workload).num_nodes, 1)
    hybrid = hybrid or Hybrid()
    if hybrid.components != ("FULL",) and not capacity_pages:
        # A request owns copies of pages beyond its hit until they are duplicates.
        num_pages += widths[-1]
    config = CacheConfig(
        page_size=workload.page_size,
        num_pages=num_pages,
        max_prefix_pages=widths[-1],
        max_live_receipts=1,
        **hybrid.settings(workload, num_pages),
    )
    run_chunk = functools.partial(
        _replay_chunk, widths=widths, checkpoints=hybrid.checkpoints
    )
    if not 0 <= reserved_pages < config.num_pages:
        raise ValueError(
            f"reserved_pages={reserved_pages} of a pool of {config.num_pages}; wanted "
            "at least 0 and less than the pool. What is left serves the requests."
        )
    cache = _start(config, reserved_pages)
    progress = begin_progress(workload, cache, hybrid, reserved_pages)
    if progress_file is not None:
        progress = progress_file.resume(progress)
    tokens = _padded_tokens(workload, widths[-1])
    chunks = _chunks(workload, lengths, batch, first=int(progress.done))
    started = time.perf_counter()
    nothing = jax.tree.map(np.zeros_like, chunks[0]) if chunks else None
    if nothing is not None:  # requests of no pages: compiles and changes nothing
        warm, _ = run_chunk(init(config), tokens, nothing)
        jax.block_until_ready(warm)
    compile_s = time.perf_counter() - started

    run_chunk = functools.partial(run_chunk, tokens=tokens)
    # A match and at most three inserts.
    ticks = batch * 4 * (widths[-1] + 1)
    progress = _run(progress, chunks, run_chunk, ticks, progress_file, on_progress)
    _check(progress.cache)
    rows = progress.outcomes
    measured = rows[workload.first_measured(measure_from) :]
    return ReplayResult(
        hit_pages=rows[:, 0],
        evicted_pages=int(measured[:, 1].sum(dtype=np.int64)),
        inserted_pages=int(measured[:, 2].sum(dtype=np.int64)),
        wall_s=float(progress.wall_s),
        compile_s=compile_s,
        cache=progress.cache,
    )


def _run(
    progress: Progress,
    chunks: list[Requests],
    run_chunk: Callable,
    ticks: int,
    progress_file: ProgressFile | None,
    on_progress: Callable[[ReplayProgress], None] | None,
) -> Progress:
    """Replay the chunks, each of which advances the clock by at most `ticks`."""
    total, done = len(progress.outcomes), int(progress.done)
    if done and on_progress is not None:
        hits = progress.outcomes[:done, 0]
        on_progress(ReplayProgress(done=done, hit_pages=hits))
    cache, outcomes, saved = progress.cache, [], done
    clock = int(cache.clock)
    started = time.perf_counter()

    def so_far() -> Progress:
        jax.block_until_ready(cache)
        return progress.after(cache, outcomes, time.perf_counter() - started)

    for chunk in chunks:
        if clock + ticks >= CLOCK_LIMIT:
            cache, clock = jitted.compact_clock(cache), cache.config.num_nodes + 1
        clock += ticks
        cache, outcome = run_chunk(cache, chunk=chunk)
        outcomes.append(outcome)
        before, done = done, min(done + len(chunk.start), total)
        if progress_file and progress_file.is_due(done - saved, done == total):
            progress = so_far()
            progress_file.save(progress)
            saved, outcomes, started = done, [], time.perf_counter()
        if on_progress is not None:
            hits = np.asarray(outcome)[: done - before, 0]
            on_progress(ReplayProgress(done=done, hit_pages=hits))
    return so_far()


def _start(config: CacheConfig, reserved_pages: int) -> CacheState:
    """Build an empty cache; a request that never ends owns the reserved pages."""
    cache = init(config)
    if reserved_pages:
        wanted = np.int32(reserved_pages)  # traced, so that one program serves all
        cache, _ = jitted.alloc_pages(cache, wanted, max_new=config.num_pages)
    return jax.block_until_ready(cache)


def _widths(longest: int) -> tuple[int, ...]:
    """Static page counts to compile, shortest first; multiples of 8 vectorise."""
    widths = [max(-(-longest // 8) * 8, 8)]
    while len(widths) < _MAX_LENGTHS and widths[0] // _LENGTH_STEP >= _SHORTEST - 1:
        widths.insert(0, -(-widths[0] // (8 * _LENGTH_STEP)) * 8)
    return tuple(widths)


def _padded_tokens(workload: Workload, width: int):
    """All key tokens on the device, with room to slice past the end."""
    room = np.zeros(width * workload.page_size, np.int32)
    return jnp.asarray(np.concatenate([workload.keys, room]))


def _chunks(workload: Workload, lengths, batch: int, first: int = 0) -> list[Requests]:
    """Requests from `first` on in chunks; the last is filled with empty ones."""
    count = workload.num_requests - first
    total = -(-count // batch) * batch
    namespaces = workload.namespaces
    if namespaces is None:
        namespaces = np.broadcast_to(NO_NAMESPACE, (len(lengths), 4))
    starts = workload.offsets[:-1].astype(np.int32)
    rows = Requests(starts, lengths, namespaces, full_blocks(workload, lengths))
    rows = [
        np.concatenate([x[first:], np.zeros((total - count, *x.shape[1:]), x.dtype)])
        for x in rows
    ]
    return [Requests(*(x[i : i + batch] for x in rows)) for i in range(0, total, batch)]


@functools.partial(jax.jit, static_argnames=("widths", "checkpoints"), donate_argnums=0)
def _replay_chunk(
    cache: CacheState, tokens, chunk: Requests, *, widths, checkpoints: str = "ends"
):
    """Scan the step over a chunk; returns the cache and [requests, 3] outcomes."""
    one = _replay_one
    if len(cache.config.components) > 1:
        one = functools.partial(replay_hybrid, checkpoints=checkpoints)
    steps = [functools.partial(one, tokens=tokens, width=w) for w in widths]

    def step(cache, request):
        limits = jnp.array(widths[:-1], jnp.int32)
        which = jnp.sum(request.num_pages > limits, dtype=jnp.int32)
        return jax.lax.switch(which, steps, cache, request)

    return jax.lax.scan(step, cache, chunk)


def _replay_one(cache: CacheState, request: Requests, *, tokens, width: int):
    """One request of at most `width` pages: its outcome is hit, evicted, inserted."""
    size = cache.config.page_size
    cache, begun = begin(cache, request, tokens, width)
    params = InsertParams(
        key=dataclasses.replace(begun.key, length=begun.held * size),
        value=begun.pages,
        prev_prefix_len=begun.match.hit_length,
    )
    cache, result = insert(cache, params)
    cache, _ = dec_lock_ref(cache, begun.receipt)
    # What the tree did not take goes back; that is nothing unless a bucket was full.
    kept = result.inserted_len // size
    page = jnp.arange(width, dtype=jnp.int32)
    is_left = (page >= kept) & (page < begun.held)
    cache = _free_if_any(cache, jnp.where(is_left, begun.pages, 0))
    return cache, jnp.stack([begun.hit, begun.evicted, kept - begun.hit])


def _free_if_any(cache: CacheState, pages) -> CacheState:
    """Free the pages that are not 0; where there are none, do nothing at all."""
    is_any = lambda operands: jnp.any(operands[1] != 0)
    free = lambda operands: (free_pages(*operands), jnp.zeros_like(operands[1]))
    return once_if(is_any, free, (cache, pages))[0]


def _check(cache: CacheState) -> None:
    trouble = describe(np.asarray(cache.status) & ~int(_HARMLESS))
    if trouble:
        raise RuntimeError("The replay met trouble.\n  " + "\n  ".join(trouble))
