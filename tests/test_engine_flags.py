"""Flags, and which cache they choose for which model."""

import argparse
import warnings
from typing import Any

import pytest

from uhrc_fn.components import REGISTRY, SWAComponent
from uhrc_fn.config import ComponentType
from uhrc_fn.engine.build import build_kv_cache
from uhrc_fn.engine.flags import (
    UNIFIED_ENV,
    CacheFlags,
    add_cache_arguments,
    check_model,
)
from uhrc_fn.engine.registry import (
    BuildContext,
    choose_cache,
    register_cache,
    register_component,
)
from uhrc_fn.engine.swa_radix_cache import SWARadixCache
from uhrc_fn.serving.models.traits import traits_from_hf_config

FULL, SWA, RECURRENT = ComponentType


class Model:
    def __init__(self, *components):
        self.components = components


def parse(text: str) -> CacheFlags:
    parser = argparse.ArgumentParser()
    add_cache_arguments(parser)
    return CacheFlags.from_args(parser.parse_args(text.split()))


def build(flags=None, components=("FULL",), **settings) -> Any:
    sizes = {"num_pages": 32, "max_request_tokens": 64 * 4}
    if "SWA" in components:
        sizes["sliding_window_size"] = 4
    if "RECURRENT" in components:
        sizes["num_recurrent_slots"] = 12
    flags = CacheFlags() if flags is None else flags
    return build_kv_cache(flags, Model(*components), **{**sizes, **settings})


def kind(cache) -> str:
    return type(cache).__name__


def test_flag_default_off(monkeypatch):
    monkeypatch.delenv(UNIFIED_ENV, raising=False)
    assert not parse("").enable_unified_radix_tree
    assert parse("") == CacheFlags()
    assert parse("").dp_schedule_policy == "min_running_queue"
    assert parse("").chunked_prefill_size == 4096


def test_flag_cli_parse():
    assert parse("--enable-unified-radix-tree").enable_unified_radix_tree
    flags = parse(
        "--page-size 128 --chunked-prefill-size 512 --enable-recurrent-extra-buffer "
        "--dp-schedule-policy cache_aware --dp-size 4 --disable-radix-cache"
    )
    assert (flags.page_size, flags.dp_size) == (128, 4)
    assert flags.recurrent_track_interval == 512
    assert flags.dp_schedule_policy == "cache_aware" and flags.disable_radix_cache


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), (None, False)])
def test_flag_env_honor(monkeypatch, value, on):
    monkeypatch.delenv(UNIFIED_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(UNIFIED_ENV, value)
    assert parse("").enable_unified_radix_tree is on
    assert parse("--enable-unified-radix-tree").enable_unified_radix_tree


def test_an_engine_keeps_its_own_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--model")
    add_cache_arguments(parser, skip=("page_size",))
    assert CacheFlags.from_args(parser.parse_args([])).page_size == 64
    assert CacheFlags.from_args({"page_size": 2, "port": 80}).page_size == 2


def test_factory_flag_off_returns_the_legacy_caches():
    assert kind(build()) == "RadixCache"
    assert not build().disable
    assert kind(build(components=("FULL", "SWA"))) == "SWARadixCache"


def test_factory_flag_on_returns_unified():
    cache = build(CacheFlags(enable_unified_radix_tree=True))
    assert kind(cache) == "UnifiedRadixCache"
    assert cache.config.components == (FULL,)
    assert not cache.supports_swa() and not cache.supports_recurrent()


def test_factory_flag_on_hybrid_unaffected():
    on = CacheFlags(enable_unified_radix_tree=True)
    off = CacheFlags(enable_unified_radix_tree=True, disable_radix_cache=True)
    cache = build(on, ("FULL", "SWA"))
    assert kind(cache) == "SWARadixCache" and cache.supports_swa()
    cache = build(off, ("FULL", "SWA"))
    assert kind(cache) == "SWAChunkCache" and cache.supports_swa()


def test_unified_serves_windows_by_name():
    cache = build(None, ("FULL", "SWA"), cache="unified")
    assert kind(cache) == "UnifiedRadixCache" and cache.supports_swa()
    assert cache.config.num_swa_pages == int(32 * 0.8)


@pytest.mark.parametrize("on", [False, True])
def test_factory_disabled_radix_unaffected(on):
    common = {"enable_unified_radix_tree": on, "disable_radix_cache": True}
    assert kind(build(CacheFlags(**common))) == "ChunkCache"
    cache = build(CacheFlags(**common, chunked_prefill_size=-1))
    assert kind(cache) == "RadixCache" and cache.disable
    cache = build(CacheFlags(**common), ("FULL", "RECURRENT"))
    assert kind(cache) == "ChunkCache" and not cache.supports_recurrent()


def test_recurrent_models():
    cache = build(CacheFlags(enable_unified_radix_tree=True), ("FULL", "RECURRENT"))
    assert kind(cache) == "UnifiedRadixCache" and cache.supports_recurrent()
    assert not cache.recurrent_extra_buffer_active()
    flags = CacheFlags(
        enable_unified_radix_tree=True,
        enable_recurrent_extra_buffer=True,
        page_size=4,
        chunked_prefill_size=16,
    )
    cache = build(flags, ("FULL", "RECURRENT"))
    assert cache.recurrent_extra_buffer_active()
    assert cache.config.recurrent_track_interval == 16


def test_gla_is_allowed_with_the_extra_buffer():
    config = {
        "model_type": "bailing_moe_linear",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "layer_group_size": 2,
    }
    traits = traits_from_hf_config(config)
    assert traits.recurrent_family == "gla"
    flags = CacheFlags(
        enable_unified_radix_tree=True,
        enable_recurrent_extra_buffer=True,
        page_size=4,
        chunked_prefill_size=16,
        max_recurrent_state_size=12,
        max_total_tokens=128,
        max_running_requests=2,
    )
    cache: Any = build_kv_cache(flags, traits, max_request_tokens=64)
    assert cache.recurrent_extra_buffer_active()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"page_size": 0}, "--page-size 0"),
        ({"dp_size": 0}, "--dp-size 0"),
        ({"dp_schedule_policy": "best"}, "cache_aware"),
        ({"chunked_prefill_size": 0}, "-1 for whole prompts"),
        ({"page_size": 128, "chunked_prefill_size": 200}, "multiple of the page"),
        ({"page_size": 4, "recurrent_track_interval": 6}, "whole pages"),
        ({"recurrent_track_interval": 0}, "positive multiple"),
        ({"swa_full_tokens_ratio": 0.0}, "positive ratio"),
        ({"recurrent_state_memory_ratio": -1.0}, "positive ratio"),
        ({"max_recurrent_state_size": 10, "dp_size": 4}, "multiple of the ranks"),
        ({"max_running_requests": 3, "dp_size": 4}, "one a rank"),
        ({"max_total_tokens": 0}, "--max-total-tokens 0"),
    ],
)
def test_flags_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        CacheFlags(**settings)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"page_size": 1}, "Set --page-size 128"),
        ({"speculative_algorithm": "EAGLE"}, "Drop --speculative-algorithm"),
        ({"enable_mixed_chunk": True}, "Drop --enable-mixed-chunk"),
        ({"recurrent_track_interval": 0}, "positive multiple"),
    ],
)
def test_extra_buffer_refuses(settings, words):
    base = {"enable_recurrent_extra_buffer": True, "page_size": 128}
    with pytest.raises(ValueError, match=words):
        CacheFlags(**{**base, "chunked_prefill_size": 512, **settings})


def test_without_the_extra_buffer_nothing_is_refused():
    flags = CacheFlags(enable_mixed_chunk=True, speculative_algorithm="EAGLE")
    assert flags.recurrent_track_interval is None


def test_track_interval_defaults():
    base = {"enable_recurrent_extra_buffer": True, "page_size": 64}
    chunked = CacheFlags(**base, chunked_prefill_size=256)
    assert chunked.recurrent_track_interval == 256
    whole = CacheFlags(**base, chunked_prefill_size=-1)
    assert whole.recurrent_track_interval == 64
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CacheFlags(**base, chunked_prefill_size=256, recurrent_track_interval=512)
        CacheFlags(**base, chunked_prefill_size=256, recurrent_track_interval=128)
    assert len(caught) == 2


RECURRENT_RULES = [
    ({}, "Add --enable-unified-radix-tree"),
    (
        {"enable_unified_radix_tree": True, "page_size": 2},
        "Add --enable-recurrent-extra-buffer",
    ),
    (
        {
            "enable_unified_radix_tree": True,
            "enable_recurrent_extra_buffer": True,
            "page_size": 2,
            "chunked_prefill_size": 8,
            "disable_radix_cache": True,
        },
        "Drop one of the two",
    ),
]


@pytest.mark.parametrize("settings, words", RECURRENT_RULES)
def test_recurrent_rules(settings, words):
    flags = CacheFlags(**settings)
    with pytest.raises(ValueError, match=words):
        check_model(flags, has_swa=False, has_recurrent=True)
    check_model(flags, has_swa=False, has_recurrent=False)


def test_three_components_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match=r"\(FULL, SWA, RECURRENT\); wanted"):
        build(None, ("FULL", "SWA", "RECURRENT"))


def test_pools_that_cannot_serve_are_refused():
    on = CacheFlags(enable_unified_radix_tree=True)
    with pytest.raises(ValueError, match="--max-total-tokens"):
        build(num_pages=None)
    with pytest.raises(ValueError, match="--max-recurrent-state-size"):
        build(on, ("FULL", "RECURRENT"), num_recurrent_slots=None)
    paged = CacheFlags(
        enable_unified_radix_tree=True,
        enable_recurrent_extra_buffer=True,
        page_size=4,
        chunked_prefill_size=16,
    )
    with pytest.raises(ValueError, match="wait for ever"):
        build(paged, ("FULL", "RECURRENT"), num_recurrent_slots=2)
    with pytest.raises(ValueError, match="window"):
        build(None, ("FULL", "SWA"), sliding_window_size=0)


def test_pool_sizes_by_flags():
    flags = CacheFlags(
        max_total_tokens=1024, dp_size=4, page_size=2, max_running_requests=8
    )
    cache = build(flags, num_pages=None)
    assert cache.available_size(3) == 256 and len(cache.requests.free_rows) == 8
    cache = build(flags, ("FULL", "SWA"), num_pages=None)
    assert cache.swa_available_size(3) == int(128 * 0.8) * 2


def test_third_parties_register_caches_by_name():
    seen = []

    def factory(ctx: BuildContext):
        seen.append(ctx.num_pages)
        return SWARadixCache(
            ctx.requests, ctx.swa_allocator(), sliding_window_size=ctx.num_swa_pages
        )

    register_cache("mine", factory)
    cache = build(None, ("FULL", "SWA"), cache="mine", num_swa_pages=6)
    assert seen == [32] and cache.sliding_window_size == 6
    with pytest.raises(ValueError, match="Register it first"):
        build(cache="theirs")
    with pytest.raises(ValueError, match="wanted a name"):
        register_cache("", factory)
    assert choose_cache(CacheFlags(), (FULL,)) == "radix"


def test_third_parties_register_components(monkeypatch):
    class Mine(SWAComponent):
        """Serves no boundary at all."""

        def accepts(self, value):
            return value < -1

    monkeypatch.setitem(REGISTRY, SWA, SWAComponent)
    register_component("swa", Mine)
    assert REGISTRY[SWA] is Mine
    with pytest.raises(ValueError, match="slots only"):
        register_component("MAMBA", Mine)
    with pytest.raises(ValueError, match="subclass of Component"):
        register_component("FULL", Mine)
