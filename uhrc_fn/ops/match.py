"""Match: the longest prefix that every component can serve.

A match refreshes the recency of what will be used and changes nothing else; a peek
changes nothing at all.
"""

import dataclasses

import jax.numpy as jnp

from ..components import component_rules
from ..config import CLOCK_LIMIT, NUM_COMPONENTS, ComponentType
from ..params import MatchPrefixParams, MatchResult, RadixKey
from ..state import CacheState, bump, flag
from ..status import Status
from ..tree_arrays import DROP, GENERATION, NULL, fence, num_rows, settle
from .path import check_key, first, first_false, one, page_index, propose, verify


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
    result, values, status = _find(cache, params.key, params.full_only)
    num_requests, num_pages = result.path.shape
    (result, values, status), fields = fence(
        (result, values, status), cache.tree.fields
    )
    clock = cache.clock + jnp.arange(num_requests, dtype=jnp.int32) * (num_pages + 1)
    hit = (result.hit_length // cache.config.page_size)[:, None]
    fields = refresh(cache, fields, result.path, hit, values, clock)
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
    """Match without side effect: ``(result, values of each component, status)``."""
    config, tree = cache.config, cache.tree
    check_key(key, config)
    pages = propose(tree, key, config)
    rules = component_rules(config)[: 1 if full_only else None]
    also = [GENERATION, *(r.value_field for r in rules)]
    ok, bad_token, (generation, *read) = verify(tree, pages, pages.node, also)
    run = first_false(ok)
    page = page_index(pages.node.shape[1])
    depth = page + 1
    in_run = page < run[:, None]
    values = {
        r.type: jnp.where(in_run, value, NULL)
        for r, value in zip(rules, read, strict=True)
    }
    deepest = {}
    joint = jnp.ones_like(in_run)
    for r in rules:
        deepest[r.type] = run
        if r.has_tombstones:
            accepted = r.accepts(values[r.type]) & in_run
            deepest[r.type] = jnp.max(jnp.where(accepted, depth, 0), -1)
            joint = joint & accepted
    hit = run
    if any(r.has_tombstones for r in rules):
        hit = jnp.max(jnp.where(joint, depth, 0), -1)
    anchor, generation, slot, num_bad = _at_hit(
        depth == hit[:, None], pages.node, generation, values, bad_token
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
    ]
    result = MatchResult(
        device_indices=jnp.where(page < hit[:, None], values[ComponentType.FULL], 0),
        path=jnp.where(in_run, pages.node, NULL),
        scalars=jnp.stack(scalars, -1),
    )
    return result, values, pages.status | flag(num_bad > 0, Status.BAD_TOKEN)


def _at_hit(at_hit, node, generation, values, bad_token):
    """Pick the anchor's entries, and count bad tokens, in one reduction."""
    slot = values.get(ComponentType.RECURRENT, jnp.zeros_like(node))
    rows = [jnp.where(at_hit, x, 0) for x in (node, generation, slot)]
    picked = jnp.sum(jnp.stack([*rows, bad_token.astype(jnp.int32)]), -1)
    return picked[0], picked[1], picked[2], picked[3]


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
        stamp = r.stamps(clock[:, None], num_pages)
        place = jnp.where(used, r.stamp_field * num_rows(fields) + path, nowhere)
        if num_requests == 1:
            fields = fields.at[place].set(stamp, unique_indices=True, **DROP)
        else:  # later requests stamp higher, so the highest is the last
            fields = fields.at[place].max(stamp, **DROP)
    return fields
