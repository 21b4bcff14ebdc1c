"""What a serving engine would put around the operations, as jitted programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import uhrc_fn as u
from uhrc_fn.pools.boundaries import cut_prefill
from uhrc_fn.pools.sliding import swa_frontier, swa_release_range
from uhrc_fn.pools.tracking import TrackMetadata, advance_tracks

# The programs run on a few pages: compile them fast rather than well.
_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def _jit(op, donate=0, **static):
    return jax.jit(op, donate_argnums=donate, compiler_options=_OPTIONS, **static)


@_jit
def match(cache, key):
    params = u.MatchPrefixParams(key=key, cow_recurrent=True)
    return u.match_prefix(cache, params)


@_jit
def seat(tables, row, pages, swa_pages, slots, length):
    """Give a row what its match and its allocations brought."""
    rows = row[None]
    zero = jnp.zeros((1,), jnp.int32)
    swa_pages = swa_pages[None] if tables.config.has_swa else None
    tables = tables.write_pages(rows, zero, pages[None], swa_pages)
    tables = tables.set_lengths(rows, length[None], length[None])
    if isinstance(tables, u.HybridReqToTokenPool):
        tracks = slots[None, 1 : 1 + tables.config.num_track_slots]
        tables, _ = tables.assign_slots(rows, slots[:1], tracks)
    return tables


@functools.partial(_jit, donate=(0, 1), static_argnames="interval")
def forward(tables, states, row, start, pages, swa_pages, lengths, marks, interval):
    """Write what a forward of `num_new` tokens leaves; lengths: see `extend`."""
    rows = row[None]
    swa_pages = swa_pages[None] if tables.config.has_swa else None
    tables = tables.write_pages(rows, start[None], pages[None], swa_pages)
    length, num_new, branching = lengths
    protected = tables.protected_length[rows]
    tables = tables.set_lengths(rows, length[None], protected)
    if states is None:
        return tables, None
    meta = TrackMetadata(jnp.zeros((1,), jnp.int32), jnp.zeros((1,), bool))
    if tables.config.num_track_slots:
        tracks, meta = advance_tracks(
            tables.tracks(rows),
            length[None],
            num_new[None],
            interval=interval,
            branching_length=branching[None],
        )
        tables = tables.put_tracks(rows, tracks)
    running = tables.running_slots(rows)
    for layer, (temporal, conv) in zip(states.config.layers, marks, strict=True):
        states = states.put_state(layer, running, temporal[None], conv[None], meta)
    return tables, states


@functools.partial(_jit, donate=(0, 1))
def slide(cache, tables, row, first, end):
    """Free the SWA pages of a row from page `first` to `end`."""
    column = jnp.arange(tables.swa_pages.shape[1], dtype=jnp.int32)
    goes = (column >= first) & (column < end)
    held = tables.swa_pages[row]
    cache = u.free_swa_pages(cache, jnp.where(goes, held, 0))
    swa_pages = tables.swa_pages.at[row].set(jnp.where(goes, 0, held))
    return cache, dataclasses.replace(tables, swa_pages=swa_pages)


@functools.partial(_jit, donate=())
def owned(tables):
    return tables.owned()


cut_prefill = jax.jit(cut_prefill, static_argnames=("interval", "page_size"))


@functools.partial(jax.jit, static_argnames=("window", "page_size"))
def release_range(written, evicted, shared, window, page_size):
    """What a request may let go of: see `pools.sliding`."""
    frontier = swa_frontier(written, window, page_size)
    return swa_release_range(frontier, evicted, shared)


inc_lock_ref = _jit(u.inc_lock_ref)
release_window = _jit(u.release_window)
cow_clone = _jit(u.cow_clone, (0, 1))
cow_move = _jit(u.cow_move)
alloc_request = _jit(
    u.alloc_request, static_argnames=("max_pages", "max_swa_pages", "max_slots")
)
evict = _jit(u.evict)
free_slots = _jit(u.free_slots)
cache_unfinished_req = _jit(u.cache_unfinished_req, (0, 1))
cache_finished_req = _jit(u.cache_finished_req, (0, 1))
abort_req = _jit(u.abort_req, (0, 1))
