"""Small hand-made trees for the tests of `uhrc_fn.debug`, one a component set.

    node (FULL page)            tokens      stamp
    root
      2 (2)                     1 2         28
        3 (3)                   3 4         27
          4 (4)                 5 6         26    anchor of a receipt
          5 (5)                 7 8         11
      6 (6)                     20 21       18
      7 (7)                     1 2         23    in the namespace of "lora"

Page 8 is a request's, page 1 and nodes 8 and 1 are free, the clock is 30.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import uhrc_fn
from uhrc_fn import CacheConfig, CacheState, Status, jitted
from uhrc_fn.state import HELD, Counter, Owner, Ring, init

SHAPE = {"page_size": 2, "num_pages": 8, "max_prefix_pages": 4, "max_live_receipts": 3}
CONFIG = CacheConfig(**SHAPE)
SWA_CONFIG = CacheConfig(
    components=("FULL", "SWA"), num_swa_pages=3, sliding_window_size=2, **SHAPE
)
RECURRENT_CONFIG = CacheConfig(
    components=("FULL", "RECURRENT"),
    num_recurrent_slots=2,
    enable_recurrent_extra_buffer=True,
    **SHAPE,
)
LORA = bytes(uhrc_fn.namespace("lora").view(np.uint8)).hex()


def key(tokens, extra_key=None):
    return uhrc_fn.radix_key(tokens, CONFIG, extra_key=extra_key, num_pages=4)


def insert(cache, tokens, extra_key=None):
    """Allocate what is new and insert it; one insert is five ticks of the clock."""
    wanted = key(tokens, extra_key)
    peek = jitted.peek_prefix_len(cache, wanted)
    num_new = np.int32((len(tokens) - int(peek.hit_length)) // 2)
    cache, alloc = jitted.alloc_pages(cache, num_new, max_new=4)
    value = uhrc_fn.page_table(peek, alloc)
    return jitted.insert(cache, uhrc_fn.InsertParams(key=wanted, value=value))[0]


def full_tree() -> CacheState:
    """The tree above; its victim plan holds the unlocked nodes 5, 6 and 7."""
    cache = insert(uhrc_fn.init(CONFIG), [30, 31])
    cache = insert(cache, [1, 2, 3, 4, 5, 6])
    cache = insert(cache, [1, 2, 3, 4, 7, 8])
    cache = insert(cache, [20, 21])
    cache = insert(cache, [1, 2], "lora")
    params = uhrc_fn.MatchPrefixParams(key=key([1, 2, 3, 4, 5, 6]))
    cache, match = jitted.match_prefix(cache, params)
    cache, _ = jitted.inc_lock_ref(cache, match)
    cache, evicted = jitted.evict(
        cache, uhrc_fn.EvictParams(num_tokens=2), max_victims=1
    )
    assert int(evicted.num_tokens_evicted) == 2
    cache, alloc = jitted.alloc_pages(cache, np.int32(1), max_new=4)
    assert alloc.ids.tolist() == [8, 0, 0, 0]
    assert cache.status == Status.OK
    return cache


def _with_component(config, k: int, values: dict, locked: int) -> CacheState:
    """The tree above, made by hand, with values of component `k` besides."""
    cache, empty = full_tree(), init(config)
    for node, value in values.items():
        cache = edit(cache, "tree.value", (k, node), value)
        stamp = cache.tree.last_access[0, node]
        cache = edit(cache, "tree.last_access", (k, node), stamp)
    cache = edit(cache, "tree.lock_ref", (k, locked), 1)
    counters = np.array(cache.counters)
    capacity = config.capacities[k]
    counters[Counter.RING_SIZE + k] = capacity - len(values)
    counters[Counter.RING_HEAD + k] = len(values)
    is_protected = int(locked in values)
    counters[Counter.PROTECTED + k] = is_protected
    counters[Counter.EVICTABLE + k] = len(values) - is_protected
    owner, free_ids = np.array(empty.owner), np.array(empty.free_ids)
    owner[: CONFIG.num_pages + 1] = np.asarray(cache.owner)[: CONFIG.num_pages + 1]
    start = CONFIG.num_pages + 1 + (k == 2)  # SWA has a dummy even where absent
    owner[[start + value for value in values.values()]] = Owner.TREE
    pages = CONFIG.num_pages
    free_ids[:pages] = np.asarray(cache.free_ids)[:pages]
    free_ids[pages + capacity :] = np.asarray(cache.free_ids)[pages:]
    ledger = cache.ledger.at[HELD, 0].set(1 | 1 << k)
    return CacheState(
        tree=cache.tree,
        free_ids=jnp.asarray(free_ids),
        owner=jnp.asarray(owner),
        ledger=ledger,
        victim_plan=cache.victim_plan,
        counters=jnp.asarray(counters),
        config=config,
    )


def swa_tree() -> CacheState:
    """SWA pages 1 and 2 on nodes 4 and 5; the lock holds a window of one page."""
    return _with_component(SWA_CONFIG, 1, {4: 1, 5: 2}, locked=4)


def recurrent_tree() -> CacheState:
    """A snapshot on node 2; the lock holds the anchor 4, which has none."""
    return _with_component(RECURRENT_CONFIG, 2, {2: 1}, locked=4)


def edit(cache: CacheState, name: str, index, value) -> CacheState:
    """Overwrite places of an array, named like ``ledger`` or ``tree.parent``.

    What the tree names may be packed in any way: its numbered places tell how.
    """
    if not name.startswith("tree."):
        array = getattr(cache, name).at[index].set(value)
        return dataclasses.replace(cache, **{name: array})
    leaves, form = jax.tree.flatten(cache.tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    shaped = [n.reshape(x.shape) for n, x in zip(numbers, leaves, strict=True)]
    numbered = jax.tree.unflatten(form, shaped)
    places = np.asarray(getattr(numbered, name.removeprefix("tree.")))[index]
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
    flat[places] = value
    parts = zip(np.split(flat, ends[:-1]), leaves, strict=True)
    edited = [jnp.asarray(part.reshape(leaf.shape)) for part, leaf in parts]
    return dataclasses.replace(cache, tree=jax.tree.unflatten(form, edited))


def edit_all(cache: CacheState, *edits) -> CacheState:
    """Overwrite several places, each ``(name, index, value)``."""
    for one in edits:
        cache = edit(cache, *one)
    return cache


def add(cache: CacheState, counter: int, amount: int) -> CacheState:
    """Add to a counter."""
    return edit(cache, "counters", counter, cache.counters[counter] + amount)


def ring_place(config, ring: Ring, cache: CacheState, rank: int) -> int:
    """Where the id `rank` places behind the front of a ring stands."""
    capacity = uhrc_fn.state.ring_capacity(config, ring)
    head = int(cache.counters[Counter.RING_HEAD + ring])
    return uhrc_fn.state.ring_offset(config, ring) + (head + rank) % capacity


BREAKS: dict[str, list] = {}


def breaks(build, found: str):
    """Register a way to break the invariant that the function's name starts with.

    The function edits what `build` makes; `found` is part of the error's text.
    """

    def register(function):
        name = function.__name__.split("__")[0]
        BREAKS.setdefault(name, []).append((build, function, found))
        return function

    return register
