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
from ..tree_arrays import GENERATION, NULL, fence, num_rows, settle
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
    status = pages.status | flag(bad_token, Status.BAD_TOKEN)
    run = first_false(ok)
    page = page_index(pages.node.shape[1])
    in_run = page < run[:, None]
    path = jnp.where(in_run, pages.node, NULL)
    values = {
        r.type: jnp.where(in_run, value, NULL)
        for r, value in zip(rules, read, strict=True)
    }
    accepted = {r.type: r.accepts(values[r.type]) & in_run for r in rules}
    depth = page + 1
    deepest = {c: jnp.max(jnp.where(a, depth, 0), -1) for c, a in accepted.items()}
    joint = jnp.stack(list(accepted.values())).all(0)
    hit = jnp.max(jnp.where(joint, depth, 0), -1)
    at_hit = depth == hit[:, None]
    anchor = jnp.sum(jnp.where(at_hit, path, 0), -1)
    in_hit = page < hit[:, None]
    indices = jnp.where(in_hit, values[ComponentType.FULL], 0)
    zero = jnp.zeros_like(hit)
    branching, lost = {}, [zero] * NUM_COMPONENTS
    for r in rules:
        branching[r.type] = r.branching_seqlen(run, deepest[r.type])
        lost[r.type] = (run - deepest[r.type]) * config.page_size
    slot = values.get(ComponentType.RECURRENT)
    slot = zero if slot is None else jnp.sum(jnp.where(at_hit, slot, 0), -1)
    scalars = [
        hit * config.page_size,
        run * config.page_size,
        anchor,
        jnp.sum(jnp.where(at_hit, generation, 0), -1),
        branching.get(ComponentType.SWA, zero),
        branching.get(ComponentType.RECURRENT, zero),
        slot,
        *lost,
    ]
    return MatchResult(indices, path, jnp.stack(scalars, -1)), values, status


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
            fields = fields.at[place].set(stamp, mode="drop", unique_indices=True)
        else:  # later requests stamp higher, so the highest is the last
            fields = fields.at[place].max(stamp, mode="drop")
    return fields
