"""Put our classes where the peer's tests import the peer's."""

import importlib
import unittest
from typing import Any

import peer_checkout
from peer_flags import PeerServerArgs, choose_peer_cache
from peer_legacy import (
    PeerChunkCache,
    PeerRadixCache,
    PeerSWAChunkCache,
    PeerSWARadixCache,
)
from peer_unified import PeerUnifiedCache

from uhrc_fn.engine import RadixKey
from uhrc_fn.engine.tree_node import TreeNode, match_length


def install() -> None:
    """Replace caches, keys, flags and factory by ours, where tests import them from.

    Request tables, allocators, pools and records of parameters stay the peer's.
    """
    peer_checkout.stub("sgl_jax.test.test_utils", CustomTestCase=unittest.TestCase)
    peer_checkout.stub("sgl_jax.srt.server_args", ServerArgs=PeerServerArgs)
    _replace(
        "radix_cache",
        RadixCache=PeerRadixCache,
        RadixKey=RadixKey,
        TreeNode=TreeNode,
        _key_match_page_size1=match_length,
        _key_match_paged=match_length,
    )
    _replace("unified_radix_cache", UnifiedRadixCache=PeerUnifiedCache)
    _replace("swa_radix_cache", SWARadixCache=PeerSWARadixCache)
    _replace("chunk_cache", ChunkCache=PeerChunkCache, SWAChunkCache=PeerSWAChunkCache)
    _replace("registry", default_radix_cache_factory=choose_peer_cache)
    # Gigabytes of zeros for each test, which no cache reads.
    pools = importlib.import_module("sgl_jax.srt.mem_cache.memory_pool")
    pools.MHATokenToKVPool._create_buffers = _no_buffers


def _no_buffers(pool: Any) -> None:
    pool.kv_buffer = []


def _replace(module: str, **names: Any) -> None:
    found = importlib.import_module(f"sgl_jax.srt.mem_cache.{module}")
    for name, value in names.items():
        if not hasattr(found, name):
            raise RuntimeError(
                f"{found.__name__} has no {name}; the checkout is of another version"
            )
        setattr(found, name, value)
