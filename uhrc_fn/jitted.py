"""The operations under `jax.jit`. The cache, always the first argument, is donated.

After ``cache, result = jitted.match_prefix(cache, params)`` the old `cache` is dead:
its buffers live on in the new one. Peeks only read and donate nothing. This is the
only file that jits operations.
"""

import functools

import jax

from . import state as _state
from .ops import allocate, clock, copy_on_write, free, lock, match, request
from .ops import evict as _evict
from .ops.drop_requests import drop_requests as _drop_requests
from .ops.insert import insert as _insert
from .ops.insert_batch import insert_batch as _insert_batch

_donated = functools.partial(jax.jit, donate_argnums=0)

match_prefix = _donated(match.match_prefix)
match_prefix_batch = _donated(match.match_prefix_batch)
peek_prefix_len = jax.jit(match.peek_prefix_len)
peek_prefix_len_batch = jax.jit(match.peek_prefix_len_batch)
insert = _donated(_insert)
insert_batch = _donated(_insert_batch)
inc_lock_ref = _donated(lock.inc_lock_ref)
inc_lock_ref_batch = _donated(lock.inc_lock_ref_batch)
dec_lock_ref = _donated(lock.dec_lock_ref)
dec_lock_ref_batch = _donated(lock.dec_lock_ref_batch)
evict = _donated(_evict.evict, static_argnames="max_victims")
alloc_pages = _donated(allocate.alloc_pages, static_argnames=("max_new", "partial"))
alloc_pages_batch = _donated(
    allocate.alloc_pages_batch, static_argnames=("max_new", "partial")
)
alloc_swa_pages = _donated(
    allocate.alloc_swa_pages, static_argnames=("max_new", "partial")
)
alloc_slots = _donated(allocate.alloc_slots, static_argnames=("max_new", "partial"))
alloc_request = _donated(
    allocate.alloc_request, static_argnames=("max_pages", "max_swa_pages", "max_slots")
)
free_pages = _donated(free.free_pages)
free_swa_pages = _donated(free.free_swa_pages)
free_slots = _donated(free.free_slots)
release_window = _donated(lock.release_window)
release_window_batch = _donated(lock.release_window_batch)
cow_clone = jax.jit(copy_on_write.cow_clone, donate_argnums=(0, 1))
cow_move = _donated(copy_on_write.cow_move)
cache_finished_req = jax.jit(request.cache_finished_req, donate_argnums=(0, 1))
cache_unfinished_req = jax.jit(request.cache_unfinished_req, donate_argnums=(0, 1))
abort_req = jax.jit(request.abort_req, donate_argnums=(0, 1))
compact_clock = _donated(clock.compact_clock)
# These read little of the state, but its buffers are wanted.
drop_requests = _donated(_drop_requests, keep_unused=True)
reset = _donated(_state.reset, keep_unused=True)
