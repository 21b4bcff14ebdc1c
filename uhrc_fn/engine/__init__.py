"""The engine's side: host-facing objects around the functional cache.

    flags = CacheFlags(page_size=128, enable_unified_radix_tree=True)
    cache = build_kv_cache(flags, traits, num_pages=4096, max_request_tokens=32768)
    match = cache.start_req(req)               # None: wait
    cache.extend_req(req, num_tokens)          # locations for the next forward
    cache.cache_finished_req(req)

Every cache is a `BasePrefixCache`; ask it what it supports, not what it is.
"""

from .allocator import PageAllocator as PageAllocator
from .allocator import SWAPageAllocator as SWAPageAllocator
from .base import BasePrefixCache as BasePrefixCache
from .build import build_kv_cache as build_kv_cache
from .chunk_cache import ChunkCache as ChunkCache
from .chunk_cache import SWAChunkCache as SWAChunkCache
from .flags import CacheFlags as CacheFlags
from .flags import add_cache_arguments as add_cache_arguments
from .params import DecLockRefParams as DecLockRefParams
from .params import DecLockRefResult as DecLockRefResult
from .params import EvictParams as EvictParams
from .params import EvictResult as EvictResult
from .params import IncLockRefResult as IncLockRefResult
from .params import InsertParams as InsertParams
from .params import InsertResult as InsertResult
from .params import Locations as Locations
from .params import MatchPrefixParams as MatchPrefixParams
from .params import MatchResult as MatchResult
from .params import RadixKey as RadixKey
from .radix_cache import RadixCache as RadixCache
from .registry import BuildContext as BuildContext
from .registry import register_cache as register_cache
from .registry import register_component as register_component
from .request import Request as Request
from .request import RequestTable as RequestTable
from .swa_radix_cache import SWARadixCache as SWARadixCache
from .unified import UnifiedRadixCache as UnifiedRadixCache
