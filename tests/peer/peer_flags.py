"""Our flags and our choice of a cache where the peer's tests look for its own."""

import argparse
import dataclasses
from typing import Any

from peer_legacy import (
    PeerChunkCache,
    PeerRadixCache,
    PeerSWAChunkCache,
    PeerSWARadixCache,
)
from peer_unified import PeerUnifiedCache

from uhrc_fn.config import ComponentType
from uhrc_fn.engine import CacheFlags, add_cache_arguments
from uhrc_fn.engine.registry import choose_cache

FULL, SWA, RECURRENT = ComponentType


class _OtherFlags(type):
    """The scheduler copies the defaults of flags that no cache asks for."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class PeerServerArgs(metaclass=_OtherFlags):
    """The peer's record of all flags: those of the cache are ours."""

    def __init__(self, model_path: str, max_seq_len: int | None = None, **flags: Any):
        self.model_path = model_path
        self.max_seq_len = max_seq_len
        self.flags = CacheFlags(**flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flags, name)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", required=True)
        parser.add_argument("--max-seq-len", type=int, default=None)
        add_cache_arguments(parser)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "PeerServerArgs":
        names = {field.name for field in dataclasses.fields(CacheFlags)}
        flags = {k: v for k, v in vars(args).items() if k in names}
        return cls(args.model_path, args.max_seq_len, **flags)


def choose_peer_cache(ctx: Any) -> Any:
    """The peer's factory, by our table."""
    chunk = ctx.effective_chunked_prefill_size
    flags = dataclasses.replace(
        ctx.server_args.flags,
        disable_radix_cache=ctx.disable_radix_cache,
        chunked_prefill_size=-1 if chunk is None else chunk,
    )
    components = [FULL]
    components += [SWA] if ctx.is_hybrid_swa else []
    components += [RECURRENT] if ctx.is_hybrid_recurrent else []
    given = ctx.params
    common = dict(
        req_to_token_pool=given.req_to_token_pool,
        token_to_kv_pool_allocator=given.token_to_kv_pool_allocator,
        page_size=given.page_size,
    )
    window = {"sliding_window_size": given.sliding_window_size}
    disable = {"disable": ctx.disable_radix_cache}
    name = choose_cache(flags, tuple(components))
    if name == "swa_chunk":
        return PeerSWAChunkCache(**common, **window)
    if name == "swa_radix":
        return PeerSWARadixCache(**common, **window)
    if name == "chunk":
        return PeerChunkCache(**common)
    if name == "unified":
        return PeerUnifiedCache(**common, tree_components=components)
    return PeerRadixCache(**common, **disable)
