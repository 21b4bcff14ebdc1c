"""A functional prefix cache for hybrid models, as a JAX pytree.

The tour:

    config = CacheConfig(page_size=128, num_pages=4096, max_prefix_pages=1024)
    cache = init(config)                       # a pytree of device arrays
    key = radix_key(tokens, config)            # on the host: pads to a page bucket

    cache, match = match_prefix(cache, MatchPrefixParams(key=key))
    cache, receipt = inc_lock_ref(cache, match)
    cache, alloc = alloc_pages(cache, num_new, max_new=64)
    params = InsertParams(key=key, value=page_table(match, alloc),
                          prev_prefix_len=match.hit_length)
    cache, result = insert(cache, params)
    cache, _ = dec_lock_ref(cache, receipt)
    raise_if_bad(cache)                        # on the host, when you like

Every operation is a pure function of arrays: jit it, scan it, vmap it over ranks,
donate the cache. `uhrc_fn.jitted` has the jitted twins with the cache donated.
"""

from . import jitted as jitted
from .config import CacheConfig as CacheConfig
from .config import ComponentType as ComponentType
from .debug import InvariantError as InvariantError
from .debug import check_invariants as check_invariants
from .debug import draw_tree as draw_tree
from .debug import to_pydict as to_pydict
from .debug import tree_string as tree_string
from .keys import namespace as namespace
from .keys import radix_key as radix_key
from .keys import stack_keys as stack_keys
from .ops.allocate import alloc_pages as alloc_pages
from .ops.allocate import alloc_pages_batch as alloc_pages_batch
from .ops.allocate import alloc_request as alloc_request
from .ops.allocate import alloc_slots as alloc_slots
from .ops.allocate import alloc_swa_pages as alloc_swa_pages
from .ops.allocate import alloc_swa_pages_batch as alloc_swa_pages_batch
from .ops.allocate import page_table as page_table
from .ops.clock import compact_clock as compact_clock
from .ops.copy_on_write import cow_clone as cow_clone
from .ops.copy_on_write import cow_move as cow_move
from .ops.drop_requests import drop_requests as drop_requests
from .ops.evict import evict as evict
from .ops.free import free_pages as free_pages
from .ops.free import free_slots as free_slots
from .ops.free import free_swa_pages as free_swa_pages
from .ops.insert import insert as insert
from .ops.insert_batch import insert_batch as insert_batch
from .ops.lock import dec_lock_ref as dec_lock_ref
from .ops.lock import dec_lock_ref_batch as dec_lock_ref_batch
from .ops.lock import inc_lock_ref as inc_lock_ref
from .ops.lock import inc_lock_ref_batch as inc_lock_ref_batch
from .ops.lock import release_window as release_window
from .ops.lock import release_window_batch as release_window_batch
from .ops.match import match_prefix as match_prefix
from .ops.match import match_prefix_batch as match_prefix_batch
from .ops.match import peek_prefix_len as peek_prefix_len
from .ops.match import peek_prefix_len_batch as peek_prefix_len_batch
from .ops.request import abort_req as abort_req
from .ops.request import cache_finished_req as cache_finished_req
from .ops.request import cache_unfinished_req as cache_unfinished_req
from .params import AllocResult as AllocResult
from .params import DecLockRefParams as DecLockRefParams
from .params import DecLockRefResult as DecLockRefResult
from .params import EvictParams as EvictParams
from .params import EvictResult as EvictResult
from .params import IncLockRefResult as IncLockRefResult
from .params import InsertParams as InsertParams
from .params import InsertResult as InsertResult
from .params import MatchPrefixParams as MatchPrefixParams
from .params import MatchResult as MatchResult
from .params import RadixKey as RadixKey
from .pools.admission import Admission as Admission
from .pools.boundaries import resolve_track_interval as resolve_track_interval
from .pools.kv import KVConfig as KVConfig
from .pools.kv import KVPool as KVPool
from .pools.kv import SWAKVPool as SWAKVPool
from .pools.kv import init_kv_pool as init_kv_pool
from .pools.kv import init_swa_kv_pool as init_swa_kv_pool
from .pools.limits import check_pools as check_pools
from .pools.mla import MLAConfig as MLAConfig
from .pools.mla import MLAPool as MLAPool
from .pools.mla import init_mla_pool as init_mla_pool
from .pools.recurrent_state import RecurrentConfig as RecurrentConfig
from .pools.recurrent_state import RecurrentStatePool as RecurrentStatePool
from .pools.recurrent_state import (
    init_recurrent_state_pool as init_recurrent_state_pool,
)
from .pools.req_to_token import HybridReqToTokenPool as HybridReqToTokenPool
from .pools.req_to_token import ReqToTokenPool as ReqToTokenPool
from .pools.req_to_token import RequestConfig as RequestConfig
from .pools.req_to_token import (
    init_hybrid_req_to_token_pool as init_hybrid_req_to_token_pool,
)
from .pools.req_to_token import init_req_to_token_pool as init_req_to_token_pool
from .pools.sizing import request_owned_slots as request_owned_slots
from .pools.sliding import swa_frontier as swa_frontier
from .saving import SavedStateError as SavedStateError
from .saving import load as load
from .saving import save as save
from .state import CacheState as CacheState
from .state import init as init
from .state import reset as reset
from .status import Status as Status
from .status import raise_if_bad as raise_if_bad
