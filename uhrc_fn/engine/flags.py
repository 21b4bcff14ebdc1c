"""The flags of an engine that concern its cache, as an argparse group and a record.

Each rule is checked with a message that names the remedy: those of the flags alone by
`CacheFlags`, those that depend on the model by `check_model`.
"""

import argparse
import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from ..pools.boundaries import resolve_track_interval
from .dp_routing import DEFAULT_POLICY, DpSchedulePolicy

UNIFIED_ENV = "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE"
DP_POLICIES = tuple(str(policy) for policy in DpSchedulePolicy)
DEFAULT_CHUNK = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFlags:
    """Flags that concern the cache, validated and with defaults resolved.

    Args:
      enable_unified_radix_tree: the unified tree instead of the legacy caches. The
        environment variable `SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE` turns it on too.
      enable_recurrent_extra_buffer: snapshots through track slots, for page_size > 1.
      recurrent_track_interval: tokens between snapshots; `None` for the chunk, else
        the page.
      page_size: tokens a page.
      chunked_prefill_size: tokens of a prefill chunk; -1 for whole prompts, `None`
        for 4096.
      dp_schedule_policy: how requests are spread over ranks.
      disable_radix_cache: cache nothing.
      dp_size: data-parallel ranks.
      max_total_tokens: tokens of the FULL pools of all ranks; `None` if it is sized by
        memory.
      swa_full_tokens_ratio: SWA tokens for each FULL token.
      max_recurrent_state_size: slots of all ranks; `None` for the ratio.
      recurrent_state_memory_ratio: recurrent bytes for each byte of KV.
      max_running_requests: of all ranks; `None` for what the pools carry.
      enable_mixed_chunk: prompts and decoding requests in one forward.
      speculative_algorithm: name of one, `None` for none.

    Raises:
      ValueError: a flag is out of range or contradicts another.

    Warns:
      where the track interval and the chunk differ.
    """

    enable_unified_radix_tree: bool = False
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None
    page_size: int = 1
    chunked_prefill_size: int | None = None
    dp_schedule_policy: str = str(DEFAULT_POLICY)
    disable_radix_cache: bool = False
    dp_size: int = 1
    max_total_tokens: int | None = None
    swa_full_tokens_ratio: float = 0.8
    max_recurrent_state_size: int | None = None
    recurrent_state_memory_ratio: float = 0.9
    max_running_requests: int | None = None
    enable_mixed_chunk: bool = False
    speculative_algorithm: str | None = None

    def __post_init__(self):
        settle = lambda name, value: object.__setattr__(self, name, value)
        if os.environ.get(UNIFIED_ENV) == "1":
            settle("enable_unified_radix_tree", True)
        if self.chunked_prefill_size is None:
            settle("chunked_prefill_size", DEFAULT_CHUNK)
        _check_ranges(self)
        if self.enable_recurrent_extra_buffer:
            _check_extra_buffer(self)
            interval = resolve_track_interval(
                self.recurrent_track_interval,
                page_size=self.page_size,
                chunked_prefill_size=self.chunked_prefill_size,
            )
            settle("recurrent_track_interval", interval)

    @property
    def effective_chunk(self) -> int | None:
        """Tokens of a prefill chunk; `None` for whole prompts."""
        chunk = self.chunked_prefill_size
        return chunk if chunk is not None and chunk > 0 else None

    @classmethod
    def from_args(cls, args: argparse.Namespace | Mapping[str, Any]) -> "CacheFlags":
        """Read what an argument parser found; other options are left alone."""
        found = args if isinstance(args, Mapping) else vars(args)
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: found[name] for name in names & set(found)})


def check_model(flags: CacheFlags, *, has_swa: bool, has_recurrent: bool) -> None:
    """Check the rules that depend on the model's layers.

    Raises:
      ValueError: the flags do not suit it.
    """
    if has_swa and has_recurrent:
        raise ValueError(
            "the model has sliding windows and recurrent layers: (FULL, SWA, "
            "RECURRENT); wanted (FULL,), (FULL, SWA) or (FULL, RECURRENT), for one "
            "tree cannot hold all three. Choose another model."
        )
    if not has_recurrent:
        return
    extra = flags.enable_recurrent_extra_buffer
    _require(
        not (extra and flags.disable_radix_cache),
        "--enable-recurrent-extra-buffer with --disable-radix-cache",
        "a tree to publish snapshots to",
        "Drop one of the two.",
    )
    _require(
        flags.enable_unified_radix_tree or flags.disable_radix_cache,
        "a recurrent model without --enable-unified-radix-tree",
        "the unified tree, the only one that holds snapshots",
        "Add --enable-unified-radix-tree (add --enable-recurrent-extra-buffer too for "
        "--page-size above 1), or --disable-radix-cache.",
    )
    _require(
        flags.disable_radix_cache or extra or flags.page_size == 1,
        f"a recurrent model with --page-size {flags.page_size} and no extra buffer",
        "--page-size 1, or the extra buffer",
        "Add --enable-recurrent-extra-buffer.",
    )


def _check_extra_buffer(flags: CacheFlags) -> None:
    _require(
        flags.page_size > 1,
        f"--enable-recurrent-extra-buffer with --page-size {flags.page_size}",
        "a page above 1",
        "Set --page-size 128, or drop the extra buffer.",
    )
    _require(
        flags.speculative_algorithm is None,
        f"--enable-recurrent-extra-buffer with --speculative-algorithm "
        f"{flags.speculative_algorithm}",
        "no speculation: a rejected draft would be in the snapshot",
        "Drop --speculative-algorithm.",
    )
    _require(
        not flags.enable_mixed_chunk,
        "--enable-recurrent-extra-buffer with --enable-mixed-chunk",
        "prefill that ends at track boundaries",
        "Drop --enable-mixed-chunk.",
    )


def _check_ranges(flags: CacheFlags) -> None:
    for name in ("page_size", "dp_size"):
        _require_count(name, getattr(flags, name))
    for name in (
        "max_total_tokens",
        "max_recurrent_state_size",
        "max_running_requests",
    ):
        if getattr(flags, name) is not None:
            _require_count(name, getattr(flags, name))
    for name in ("swa_full_tokens_ratio", "recurrent_state_memory_ratio"):
        ratio = getattr(flags, name)
        _require(
            ratio > 0, f"{_flag(name)} {ratio}", "a positive ratio", "Use the default."
        )
    _require(
        flags.dp_schedule_policy in DP_POLICIES,
        f"--dp-schedule-policy {flags.dp_schedule_policy}",
        f"one of {', '.join(DP_POLICIES)}",
        f"Leave it out for {DEFAULT_POLICY}.",
    )
    interval = flags.recurrent_track_interval
    _require(
        interval is None or (interval > 0 and interval % flags.page_size == 0),
        f"--recurrent-track-interval {interval} with --page-size {flags.page_size}",
        "a positive multiple of the page",
        "Round it to whole pages.",
    )
    chunk = flags.chunked_prefill_size or 0
    _require(
        chunk == -1 or chunk > 0,
        f"--chunked-prefill-size {chunk}",
        "a positive count, or -1 for whole prompts",
        "Leave it out for 4096.",
    )
    _require(
        chunk < 0 or chunk % flags.page_size == 0,
        f"--chunked-prefill-size {chunk} with --page-size {flags.page_size}",
        "whole pages",
        "Round the chunk to a multiple of the page.",
    )
    for name in ("max_recurrent_state_size", "max_running_requests"):
        value = getattr(flags, name)
        _require(
            value is None or value >= flags.dp_size,
            f"{_flag(name)} {value} with {flags.dp_size} ranks",
            "one a rank at least",
            "Raise it, or use fewer ranks.",
        )
    slots = flags.max_recurrent_state_size
    _require(
        slots is None or slots % flags.dp_size == 0,
        f"--max-recurrent-state-size {slots} with {flags.dp_size} ranks",
        "a multiple of the ranks",
        "Round it.",
    )


def _require_count(name: str, value) -> None:
    _require(
        isinstance(value, int) and not isinstance(value, bool) and value > 0,
        f"{_flag(name)} {value!r}",
        "a positive integer",
        "Correct it.",
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(ok, came: str, wanted: str, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{came}; wanted {wanted}. {remedy}")


def add_cache_arguments(
    parser: argparse.ArgumentParser, skip: Collection[str] = ()
) -> None:
    """Add the group "prefix cache" to a parser; `CacheFlags.from_args` reads it.

    Args:
      parser: of the engine.
      skip: names of fields whose options the engine has already.
    """
    group = parser.add_argument_group("prefix cache")
    defaults = CacheFlags.__dataclass_fields__

    def add(name: str, help_text: str, **how):
        if name in skip:
            return
        default = defaults[name].default
        group.add_argument(_flag(name), default=default, help=help_text, **how)

    switch = {"action": "store_true"}
    add(
        "enable_unified_radix_tree",
        f"use the unified tree (environment: {UNIFIED_ENV}=1)",
        **switch,
    )
    add(
        "enable_recurrent_extra_buffer",
        "publish recurrent snapshots through track slots; for pages above 1",
        **switch,
    )
    add(
        "recurrent_track_interval",
        "tokens between snapshots, whole pages (default: the chunk, else the page)",
        type=int,
    )
    add("page_size", "tokens a page", type=int)
    add("chunked_prefill_size", "tokens of a prefill chunk, -1 for off", type=int)
    add(
        "dp_schedule_policy",
        "how requests are spread over data-parallel ranks",
        choices=DP_POLICIES,
    )
    add("disable_radix_cache", "cache nothing", **switch)
    add("dp_size", "data-parallel ranks", type=int)
    add("max_total_tokens", "tokens of the FULL pools of all ranks", type=int)
    add("swa_full_tokens_ratio", "SWA tokens for each FULL token", type=float)
    add("max_recurrent_state_size", "recurrent slots of all ranks", type=int)
    add(
        "recurrent_state_memory_ratio",
        "recurrent bytes for each byte of KV",
        type=float,
    )
    add("max_running_requests", "running requests of all ranks", type=int)
    add("enable_mixed_chunk", "refused with the extra buffer", **switch)
    add("speculative_algorithm", "refused with the extra buffer", type=str)
