"""No operation walks: what is traced, and what XLA makes of it.

The traced programs are searched to the bottom: calls, branches, bodies of loops. Sizes
are odd, so that an array of one entry a node can be told from everything else.
"""

import collections
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]
from op_cases import LOOKS_AND_LOCKS, OPS, op_cases, shapes

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams
from uhrc_fn.replay import engine

LOOPS = {"while", "scan"}
SELECTIONS = {"sort", "top_k", "approx_top_k"}
# What leaves the program; callbacks go by several names.
CALLS_OUT = {"ffi_call", "pallas_call", "custom_partitioning", "debug_print"}


def equations(jaxpr: Jaxpr):
    """Every equation, of nested programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in nested(parameter):
                yield from equations(inner)


def nested(parameter):
    if isinstance(parameter, ClosedJaxpr):
        yield parameter.jaxpr
    elif isinstance(parameter, Jaxpr):
        yield parameter
    elif isinstance(parameter, tuple | list):
        for each in parameter:
            yield from nested(each)


def special(jaxpr: Jaxpr) -> dict[str, int]:
    """Count what needs a reason: loops, branches, selections, calls to elsewhere."""
    named = LOOPS | SELECTIONS | CALLS_OUT | {"cond"}
    names = [equation.primitive.name for equation in equations(jaxpr)]
    return dict(collections.Counter(n for n in names if n in named or "callback" in n))


def test_the_search_reaches_everything():
    @jax.custom_vjp
    def noisy(x):
        jax.debug.callback(lambda _: None, x)
        return jax.pure_callback(lambda v: v, x, x)

    noisy.defvjp(lambda x: (noisy(x), None), lambda _, g: (g,))

    @jax.jit
    def inner(x):
        x = jax.lax.while_loop(lambda v: v < 3, lambda v: v + 1, x)
        return jax.lax.cond(x > 1, noisy, lambda v: -v, x)

    def outer(x):
        total, _ = jax.lax.scan(lambda s, y: (s + inner(y), None), jnp.int32(0), x)
        return total, jax.lax.top_k(x, 1), jnp.sort(x)

    found = special(jax.make_jaxpr(outer)(jnp.arange(4, dtype=jnp.int32)).jaxpr)
    once = ("scan", "while", "cond", "top_k", "sort", "pure_callback", "debug_callback")
    assert found == dict.fromkeys(once, 1)


# What is traced.

PLAN, BATCH = 512, 65


@functools.cache
def traced(name: str, pages: int, nodes: int, batch: int = BATCH):
    config = traced_config(nodes)
    return op_cases(config, pages, batch)[name].jaxpr(config)


def traced_config(nodes: int, plan: int = PLAN) -> CacheConfig:
    return CacheConfig(
        page_size=16, num_pages=nodes, max_prefix_pages=1024, victim_plan_size=plan
    )


# One selection, in a form for each platform.
SELECTS = {"cond": 1, "top_k": 2}
MAY_HOLD = {
    # Nothing at all.
    **{name: {} for name in [*LOOKS_AND_LOCKS, "insert", "free"]},
    "evict_any_number": {},
    "reset": {},
    # The plan of victims is made anew under one condition.
    "evict": SELECTS,
    "alloc": SELECTS,
    # A loop over requests, see below.
    "insert_batch": {"while": 1},
    "alloc_batch": SELECTS | {"scan": 1},
    # Sorts by design; it runs between steps, once in 2^30 ticks.
    "compact_clock": {"sort": 1},
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("pages", [4, 64])
def test_what_an_operation_holds(name, pages):
    # Batches whose victims could be more than the plan holds need no plan.
    batch = 7 if pages * BATCH > PLAN and name == "alloc_batch" else BATCH
    assert special(traced(name, pages, 2**10, batch)) == MAY_HOLD[name]


@pytest.mark.parametrize("name", LOOKS_AND_LOCKS)
def test_looks_and_locks_lower_to_no_loop_branch_or_custom_call(name):
    config = traced_config(2**10)
    text = op_cases(config, 64, 3)[name].lower(config).as_text()
    assert "stablehlo.gather" in text
    assert not re.findall(r"custom_call|stablehlo\.(?:while|case|if|sort)\b|chlo", text)


def find(jaxpr: Jaxpr, primitive: str) -> Any:
    (found,) = [e for e in equations(jaxpr) if e.primitive.name == primitive]
    return found


def test_insert_batch_loops_over_irregular_requests_only():
    """From the first request that did not go in whole to the last of the batch."""
    loop = find(traced("insert_batch", 64, 2**10), "while")
    (compare,) = loop.params["cond_jaxpr"].jaxpr.eqns
    assert compare.primitive.name == "lt"
    assert compare.invars == loop.params["cond_jaxpr"].jaxpr.invars[:2]
    num_consts = loop.params["cond_nconsts"] + loop.params["body_nconsts"]
    first, end = loop.invars[num_consts : num_consts + 2]
    assert int(end.val) == BATCH
    # It only counts up by one: the requests that are dealt with come from outside.
    body = loop.params["body_jaxpr"].jaxpr
    counter = body.invars[loop.params["body_nconsts"]]
    (step,) = [e for e in body.eqns if e.outvars[0] is body.outvars[0]]
    assert step.primitive.name == "add" and step.invars[0] is counter
    assert int(step.invars[1].val) == 1
    assert not hasattr(first, "val")
    # One request inside needs no loop in turn, nor does a batch of one.
    assert not special(body)
    assert not special(traced("insert_batch", 64, 2**10, batch=1))


def test_alloc_batch_loops_over_counts_of_requests_only():
    """Who gets all that it asks for depends on what those before it got."""
    loop = find(traced("alloc_batch", 4, 2**10), "scan")
    assert loop.params["length"] == BATCH
    assert [v.aval.shape for v in loop.invars] == [(), (BATCH,)]


@pytest.mark.parametrize("name", ["evict", "alloc", "alloc_batch"])
def test_a_selection_takes_no_more_than_the_plan_holds(name):
    for nodes in (2**10, 2**14):
        jaxpr = traced(name, 4, nodes)
        branches = find(jaxpr, "cond").params["branches"]
        # Nobody is needed; the plan has them; the plan is made anew.
        assert [special(b.jaxpr) for b in branches] == [{}, {}, {"top_k": 2}]
        taken = [e for e in equations(jaxpr) if e.primitive.name == "top_k"]
        assert [e.params["k"] for e in taken] == [PLAN, PLAN]
        assert not special(jaxpr).get("sort")


@pytest.mark.parametrize("name", OPS)
def test_the_number_of_equations_knows_no_length_and_no_capacity(name):
    """Small batches have forms of their own, so all batches here are large ones."""

    def count(pages, nodes):
        # Whether a plan is used depends on shapes too: the same way for all four.
        config = traced_config(nodes, PLAN if name == "evict_any_number" else 2**13)
        jaxpr = op_cases(config, pages, BATCH)[name].jaxpr(config)
        return sum(1 for _ in equations(jaxpr))

    few = count(4, 2**10)
    assert few > 10
    assert {count(64, 2**10), count(4, 2**14), count(64, 2**14)} == {few}


@pytest.mark.parametrize("name", ["match", "peek", "lock", "unlock", "insert"])
def test_long_keys_add_no_equations_either(name):
    counts = {p: len(list(equations(traced(name, p, 2**10, 1)))) for p in (512, 1024)}
    assert counts[512] == counts[1024]


def test_a_session_traces_each_operation_once():
    config = CacheConfig(page_size=2, num_pages=16, max_prefix_pages=4)
    traces = collections.Counter()

    def counted(operation, *static):
        @functools.wraps(operation)
        def wrapped(*args, **options):
            traces[operation.__name__] += 1
            return operation(*args, **options)

        return jax.jit(wrapped, donate_argnums=0, static_argnames=static)

    match = counted(uhrc_fn.match_prefix)
    lock = counted(uhrc_fn.inc_lock_ref)
    unlock = counted(uhrc_fn.dec_lock_ref)
    insert = counted(uhrc_fn.insert)
    alloc = counted(uhrc_fn.alloc_pages, "max_new")
    free = counted(uhrc_fn.free_pages)
    evict = counted(uhrc_fn.evict, "max_victims")
    compact = counted(uhrc_fn.compact_clock)
    cache = uhrc_fn.init(config)
    for number in range(4):
        key = uhrc_fn.radix_key([1, 2, number, 4, 5], config, num_pages=4)
        cache, found = match(cache, MatchPrefixParams(key=key))
        cache, receipt = lock(cache, found)
        cache, new = alloc(cache, 4 - found.hit_length // 2, max_new=4)
        table = uhrc_fn.page_table(found, new)
        params = InsertParams(key=key, value=table, prev_prefix_len=found.hit_length)
        cache, result = insert(cache, params)
        cache, _ = unlock(cache, receipt)
        assert int(result.inserted_len) == 4
        cache = free(cache, jnp.where(jnp.arange(4) < 2, 0, table))
        cache, _ = evict(cache, EvictParams(jnp.int32(number)), max_victims=4)
        cache = compact(cache)
    uhrc_fn.raise_if_bad(cache)
    assert int(cache.num_live_nodes) > 0
    assert len(traces) == 8 and set(traces.values()) == {1}


# What is compiled.

ODD = CacheConfig(page_size=4, num_pages=16_411, max_prefix_pages=8)
COPY = re.compile(r" = \w+\[([\d,]*)\]\S* copy\(")


def large_copies(text: str) -> dict[str, int]:
    """Copies in a compiled program of at least one word a node: {line: words}."""
    found = {}
    for line in text.splitlines():
        if match := COPY.search(line):
            words = math.prod(int(d) for d in match[1].split(",") if d)
            if words > ODD.num_nodes:
                found[line.strip()[:120]] = words
    return found


def test_a_copy_of_the_state_would_be_seen():
    """Undonated, the state must be copied to be written to."""
    compiled = op_cases(ODD, 8, 3)["lock"].lower(ODD, donate=False).compile()
    fields = 18 * (ODD.num_nodes + 1)
    assert any(f"[{fields}]" in line for line in large_copies(compiled.as_text()))


@pytest.mark.parametrize("name", sorted({*OPS} - {"reset"}))  # it writes everything
def test_nothing_copies_an_array_of_nodes(name):
    text = op_cases(ODD, 8, 3)[name].lower(ODD).compile().as_text()
    found = large_copies(text)
    if name == "evict_any_number":
        # Its lanes are all the nodes, so lists of places are as long; no state is.
        sizes = {leaf.size for leaf in jax.tree.leaves(shapes(ODD))}
        found = {line: words for line, words in found.items() if words in sizes}
    assert not found


def test_a_scanned_step_copies_no_array_of_nodes():
    """Match, lock, allocate, insert, unlock and free, with a switch between lengths."""
    requests = engine._Requests(
        start=np.zeros(8, np.int32),
        num_pages=np.zeros(8, np.int32),
        namespace=np.zeros((8, 4), np.int32),
        full_blocks=np.zeros(8, np.int32),
    )
    tokens = np.zeros(64, np.int32)
    lowered = engine._replay_chunk.lower(shapes(ODD), tokens, requests, widths=(4, 8))
    text = lowered.compile().as_text() or ""
    assert " while(" in text and " conditional(" in text
    assert not large_copies(text)
