"""Match: the longest prefix that every component can serve.

A match refreshes the recency of what will be used and changes nothing else; a peek
changes nothing at all.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..by_platform import by_platform
from ..components import component_rules
from ..config import CLOCK_LIMIT, NUM_COMPONENTS, ComponentType
from ..params import MatchPrefixParams, MatchResult, RadixKey
from ..state import CacheState, bump, flag
from ..status import Status
from ..tree_arrays import DROP, GENERATION, NULL, fence, num_rows, settle
from .path import (
    check_key,
    first,
    one,
    page_index,
    propose,
    read_path,
    verified_run,
)


def match_prefix(
    cache: CacheState, params: MatchPrefixParams
) -> tuple[CacheState, MatchResult]:
    """Find the longest cached prefix of a key and refresh it.

    Args:
      cache: the state.
      params: the key; `full_only` asks the FULL component alone.

    Returns:
      ``(cache, result)``. Only whole pages of the key count.

    Status:
      BAD_LENGTH, BAD_TOKEN: the key was cut there. CLOCK_HIGH: compact the clock.

    Ownership:
      unchanged; lock the result before anything allocates.
    """
    cache, result = match_prefix_batch(cache, one(params))
    return cache, first(result)


def match_prefix_batch(
    cache: CacheState, params: MatchPrefixParams
) -> tuple[CacheState, MatchResult]:
    """Match a batch of keys, as if one after another; one parallel program."""
    reads = _find(cache, params.key, params.full_only)
    (result, hit, values, status), fields = _order(reads, cache.tree.fields)
    num_requests, num_pages = result.path.shape
    clock = cache.clock + jnp.arange(num_requests, dtype=jnp.int32) * (num_pages + 1)
    fields = refresh(cache, fields, result.path, hit[:, None], values, clock)
    tree = dataclasses.replace(cache.tree, fields=fields)
    elapsed = num_requests * (num_pages + 1)
    status = status | flag(cache.clock + elapsed >= CLOCK_LIMIT, Status.CLOCK_HIGH)
    counters = bump(cache.counters, clock=elapsed, status=status)
    cache = dataclasses.replace(cache, tree=tree, counters=counters)
    return settle(cache, result)


def peek_prefix_len(cache: CacheState, key: RadixKey) -> MatchResult:
    """Report the match of a key without touching the cache: routing, admission.

    Args:
      cache: the state; it is only read.
      key: one key.

    Returns:
      What `match_prefix` would report.
    """
    return first(peek_prefix_len_batch(cache, one(key)))


def peek_prefix_len_batch(cache: CacheState, key: RadixKey) -> MatchResult:
    """Peek for a batch of keys."""
    return _find(cache, key, False)[0]


def _find(cache: CacheState, key: RadixKey, full_only: bool):
    """Match without side effect.

    Returns:
      ``(result, hit in pages, values of each component, status)``.
    """
    config, tree = cache.config, cache.tree
    check_key(key, config)
    pages = propose(tree, key, config)
    rules = component_rules(config)[: 1 if full_only else None]
    also = [GENERATION, *(r.value_field for r in rules)]
    reading = read_path(tree, pages, pages.node, also)
    run, has_bad_token, anchor, generation = verified_run(reading)
    page = page_index(pages.node.shape[1])
    depth = page + 1
    in_run = page < run[:, None]
    values = {
        r.type: jnp.where(in_run, reading.column(k), NULL)
        for k, r in enumerate(rules, start=1)
    }
    deepest = {}
    joint = jnp.ones_like(in_run)
    for r in rules:
        deepest[r.type] = run
        if r.has_tombstones:
            accepted = r.accepts(values[r.type]) & in_run
            deepest[r.type] = jnp.max(jnp.where(accepted, depth, 0), -1)
            joint = joint & accepted
    hit, slot = run, jnp.zeros_like(run)
    if any(r.has_tombstones for r in rules):
        hit = jnp.max(jnp.where(joint, depth, 0), -1)
        anchor, generation, slot = _at_hit(
            depth == hit[:, None],
            pages.node,
            reading.column(0),
            values.get(ComponentType.RECURRENT, jnp.zeros_like(pages.node)),
        )
    zero = jnp.zeros_like(hit)
    branching, lost = {}, [zero] * NUM_COMPONENTS
    for r in rules:
        branching[r.type] = r.branching_seqlen(run, deepest[r.type])
        lost[r.type] = (run - deepest[r.type]) * config.page_size
    scalars = [
        hit * config.page_size,
        run * config.page_size,
        anchor,
        generation,
        branching.get(ComponentType.SWA, zero),
        branching.get(ComponentType.RECURRENT, zero),
        slot,
        *lost,
        jnp.full_like(hit, int(full_only)),
    ]
    result = MatchResult(
        device_indices=jnp.where(page < hit[:, None], values[ComponentType.FULL], 0),
        path=jnp.where(in_run, pages.node, NULL),
        scalars=_stack(*scalars),
    )
    status = pages.status | flag(has_bad_token, Status.BAD_TOKEN)
    return result, hit, values, status


def _at_hit_default(at_hit, *rows):
    """Pick the anchor's entries in one reduction."""
    rows = [jnp.where(at_hit, x, 0) for x in rows]
    picked = jnp.sum(jnp.stack(rows), -1)
    return [picked[k] for k in range(len(rows))]


def _at_hit_tpu(at_hit, *rows):
    """One by one: a TPU reduces them in one kernel, and stacking costs it more."""
    return [jnp.sum(jnp.where(at_hit, x, 0), -1) for x in rows]


_at_hit = by_platform(_at_hit_default, tpu=_at_hit_tpu)


def _stack_default(*entries):
    return jnp.stack(entries, -1)


def _stack_tpu(*entries):
    """Select, entry by entry: one kernel, not a copy for each."""
    stacked = jnp.zeros_like(entries[0])[:, None]
    for k, entry in enumerate(entries):
        is_it = np.arange(len(entries))[None] == k
        stacked = jnp.where(is_it, entry[:, None], stacked)
    return stacked


_stack = by_platform(_stack_default, tpu=_stack_tpu)
# A TPU program needs no order here, and it would keep steps from being one kernel.
_order = by_platform(fence, tpu=lambda *arrays: arrays)


def refresh(cache, fields, path, hit_pages, values, clock):
    """Stamp what a hit uses, component by component.

    Args:
      cache: gives the settings.
      fields: `TreeArrays.fields` to write into.
      path: [requests, pages] nodes.
      hit_pages: [requests, 1].
      values: component -> [requests, pages].
      clock: [requests] first stamp of each request.

    Returns:
      `fields`.
    """
    num_requests, num_pages = path.shape
    page = page_index(num_pages)
    # Dropped lanes get places of their own: the scatter may then assume no clash.
    nowhere = fields.shape[0] + jnp.arange(path.size, dtype=jnp.int32)
    nowhere = nowhere.reshape(path.shape)
    for r in component_rules(cache.config):
        if r.type not in values:
            continue
        used = r.refreshes(page, hit_pages, values[r.type])
        # Chosen like the places, so that a TPU computes both in one kernel.
        stamp = jnp.where(used, r.stamps(clock[:, None], num_pages), NULL)
        place = jnp.where(used, r.stamp_field * num_rows(fields) + path, nowhere)
        if num_requests == 1:
            fields = fields.at[place].set(stamp, unique_indices=True, **DROP)
        else:  # later requests stamp higher, so the highest is the last
            fields = fields.at[place].max(stamp, **DROP)
    return fields
