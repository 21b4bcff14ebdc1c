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
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # pyright: ignore[reportPrivateImportUsage]
from op_cases import (
    LOOKS_AND_LOCKS,
    SETS,
    SETS_AND_OPS,
    config_of,
    op_cases,
    shapes,
)

import uhrc_fn
from uhrc_fn import CacheConfig, EvictParams, InsertParams, MatchPrefixParams
from uhrc_fn.replay import engine

LOOPS = {"while", "scan"}
SELECTIONS = {"sort", "top_k", "approx_top_k"}
# One selection, in its form for each platform.
FORMS = {"approx_top_k": 1, "top_k": 1}
# What leaves the program; callbacks go by several names.
CALLS_OUT = {"ffi_call", "pallas_call", "custom_partitioning", "debug_print"}


def equations(jaxpr: Jaxpr):
    """Every equation, of nested programs too; what is inside a kernel is its own."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
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
    """Count what needs a reason: loops, branches, selections, calls to elsewhere.

    A `while` that asks yes or no counts as `once`.
    """
    named = LOOPS | SELECTIONS | CALLS_OUT | {"cond", "once"}
    names = [
        "once" if asks_once(equation) else equation.primitive.name
        for equation in equations(jaxpr)
    ]
    return dict(collections.Counter(n for n in names if n in named or "callback" in n))


def asks_once(equation) -> bool:
    """Whether this is a `while` that a first turn always ends: do it, or do not."""
    if equation.primitive.name != "while":
        return False
    body = equation.params["body_jaxpr"]
    after = constants(body, [None] * len(body.jaxpr.invars))
    condition = equation.params["cond_jaxpr"]
    outside = [None] * equation.params["cond_nconsts"]
    (goes_on,) = constants(condition, [*outside, *after])
    return goes_on is not None and not goes_on


def constants(program: ClosedJaxpr, inputs: list) -> list:
    """Results that follow from the inputs that are known; `None` for all others."""
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(program.jaxpr.invars, inputs, strict=True))
    value = lambda atom: atom.val if isinstance(atom, Literal) else known.get(atom)
    for equation in program.jaxpr.eqns:
        read = [value(atom) for atom in equation.invars]
        if all(x is not None for x in read) and not equation.effects:
            result = equation.primitive.bind(*read, **equation.params)
            several = equation.primitive.multiple_results
            written = result if several else [result]
            known |= dict(zip(equation.outvars, written, strict=True))
    return [value(atom) for atom in program.jaxpr.outvars]


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


@pytest.mark.parametrize(
    ("goes_on", "turn", "is_once"),
    [
        (lambda c: c[0], lambda c: (jnp.zeros((), bool), c[1] + 1), True),
        (lambda c: c[1] > 0, lambda c: (c[0], jnp.int32(0)), True),
        (lambda c: c[1] > 0, lambda c: (c[0], c[1] - 1), False),
        (lambda c: c[0], lambda c: (c[1] > 9, c[1] + 1), False),
        (lambda c: c[0], lambda c: (jnp.ones((), bool), c[1] + 1), False),
    ],
)
def test_a_loop_is_told_from_a_question(goes_on, turn, is_once):
    loop = lambda flag, count: jax.lax.while_loop(goes_on, turn, (flag, count))
    jaxpr = jax.make_jaxpr(loop)(True, jnp.int32(3)).jaxpr
    assert special(jaxpr) == {"once" if is_once else "while": 1}


# What is traced.

PLAN, BATCH = 512, 65


@functools.cache
def traced(components: str, name: str, pages: int, nodes: int, batch: int = BATCH):
    config = traced_config(components, nodes)
    return op_cases(config, pages, batch)[name].jaxpr(config)


def traced_config(components: str, nodes: int, plan: int = PLAN) -> CacheConfig:
    return config_of(
        components, 16, nodes, max_prefix_pages=1024, victim_plan_size=plan
    )


def may_hold(components: str, name: str) -> dict[str, int]:
    """What an operation may hold, loops that ask yes or no left out."""
    # A selection comes in a form for each platform; a threshold's for CPU loops over
    # the digits of a stamp. The plan of FULL victims is made anew where it runs out; of
    # the others nothing is selected if nobody is needed.
    digits = {"scan": 1}
    plans, selects = FORMS, FORMS | {"cond": 1}
    others = len(components.split(",")) - 1
    allowed = {
        "evict": [plans] + [selects] * others,
        # The pages go by a threshold; the others are few enough to select.
        "evict_any_number": [digits] + [selects] * others,
        "alloc": [plans],
        "alloc_swa": [selects],
        "alloc_slots": [selects],
        "alloc_request": [plans] + [selects] * others,
        # Loops over requests, see below.
        "insert_batch": [{"while": 1}],
        "alloc_batch": [plans, {"scan": 1}],
        # On a CPU piece by piece of a state, one loop a buffer. On a TPU by a kernel,
        # and without a loop where a row is narrow: it is one.
        "cow_clone": [selects, {"scan": 2, "pallas_call": 1}],
        # Sorts by design; it runs between steps, once in 2^30 ticks.
        "compact_clock": [{"sort": 1}] * (others + 1),
    }
    return dict(
        sum(map(collections.Counter, allowed.get(name, [])), collections.Counter())
    )


@pytest.mark.parametrize(("components", "name"), SETS_AND_OPS)
@pytest.mark.parametrize("pages", [4, 64])
def test_what_an_operation_holds(components, name, pages):
    # Batches whose victims could be more than the plan holds need no plan.
    batch = 7 if pages * BATCH > PLAN and name == "alloc_batch" else BATCH
    holds = special(traced(components, name, pages, 2**10, batch))
    if name.startswith(("insert", "evict", "alloc", "cow")):
        holds.pop("once", None)
    assert holds == may_hold(components, name)


@pytest.mark.parametrize("components", SETS)
@pytest.mark.parametrize("name", LOOKS_AND_LOCKS)
def test_looks_and_locks_lower_to_no_loop_branch_or_custom_call(components, name):
    config = traced_config(components, 2**10)
    text = op_cases(config, 64, 3)[name].lower(config).as_text()
    assert "stablehlo.gather" in text
    assert not re.findall(r"custom_call|stablehlo\.(?:while|case|if|sort)\b|chlo", text)


def every(jaxpr: Jaxpr, primitive: str) -> list[Any]:
    return [e for e in equations(jaxpr) if e.primitive.name == primitive]


@pytest.mark.parametrize("components", SETS)
def test_insert_batch_loops_over_requests_only(components):
    """FULL alone: from the first that did not go in whole; else over the batch."""
    loops = every(traced(components, "insert_batch", 64, 2**10), "while")
    (loop,) = (loop for loop in loops if not asks_once(loop))
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
    assert isinstance(first, Literal) == (components != "FULL")
    # One request inside needs no loop in turn, nor does a batch of one.
    assert not special(body)
    assert not special(traced(components, "insert_batch", 64, 2**10, batch=1))


@pytest.mark.parametrize("components", SETS)
def test_alloc_batch_loops_over_counts_of_requests_only(components):
    """Who gets all that it asks for depends on what those before it got."""
    (loop,) = every(traced(components, "alloc_batch", 4, 2**10), "scan")
    assert loop.params["length"] == BATCH
    assert [v.aval.shape for v in loop.invars] == [(), (BATCH,)]


SELECTING = [
    (components, name)
    for components, name in SETS_AND_OPS
    if "top_k" in may_hold(components, name) and name != "evict_any_number"
]


@pytest.mark.parametrize(("components", "name"), SELECTING)
def test_a_selection_takes_no_more_than_the_plan_holds(components, name):
    for nodes in (2**10, 2**14):
        jaxpr = traced(components, name, 4, nodes)
        for choice in every(jaxpr, "cond"):
            *others, last = (special(b.jaxpr) for b in choice.params["branches"])
            # Nobody is needed; the plan has them; they are selected.
            assert last == FORMS and not any(others)
        taken = {e.params["k"] for form in FORMS for e in every(jaxpr, form)}
        # Pages from the plan, others no more than the call has lanes.
        assert taken <= {PLAN, 4, 1}
        assert not every(jaxpr, "sort")


@pytest.mark.parametrize(("components", "name"), SETS_AND_OPS)
def test_neither_equations_nor_turns_know_a_length_or_a_capacity(components, name):
    """Small batches have forms of their own, so all batches here are large ones."""

    def count(pages, nodes):
        # Whether a plan is used depends on shapes too: the same way for all four.
        config = traced_config(components, nodes, 8 if name in UNBOUNDED else 2**13)
        jaxpr = op_cases(config, pages, BATCH)[name].jaxpr(config)
        turns = [loop.params["length"] for loop in every(jaxpr, "scan")]
        return sum(1 for _ in equations(jaxpr)), *turns

    few = count(4, 2**10)
    assert few[0] > 10
    assert {count(64, 2**10), count(4, 2**14), count(64, 2**14)} == {few}


UNBOUNDED = ("evict_any_number",)


@pytest.mark.parametrize("components", SETS)
@pytest.mark.parametrize("name", ["match", "peek", "lock", "unlock", "insert"])
def test_long_keys_add_no_equations_either(components, name):
    jaxprs = [traced(components, name, pages, 2**10, 1) for pages in (512, 1024)]
    short, long = (sum(1 for _ in equations(jaxpr)) for jaxpr in jaxprs)
    assert short == long


@pytest.mark.parametrize("components", SETS)
def test_a_state_fits_every_operation_whichever_returned_it(components):
    """So each is traced once; nothing is compiled here."""
    config = config_of(components, 2, 64)
    traces, jitted = collections.Counter(), {}

    def counted(name, case):
        @functools.wraps(case.function)
        def wrapped(*args):
            traces[name] += 1
            return case.function(*args)

        return case._replace(function=wrapped)

    cases = op_cases(config, 4, 3)
    jitted = {name: counted(name, case).jit() for name, case in cases.items()}
    cache = shapes(config)
    for _ in range(2):
        for name, case in cases.items():
            out = jitted[name].eval_shape(cache, *case.args)
            if case.donated:
                cache = out if isinstance(out, uhrc_fn.CacheState) else out[0]
    assert set(traces) == set(cases) and set(traces.values()) == {1}


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

COPY = re.compile(r" = \w+\[([\d,]*)\]\S* copy\(")


def odd(components: str) -> CacheConfig:
    return config_of(components, 4, 16_411, max_prefix_pages=8)


ODD = odd("FULL")


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


def compiled_cases():
    """All but a reset, which writes everything; of hybrid batches in the long run."""
    for components, name in SETS_AND_OPS:
        is_long = name.endswith("_batch") or name in (
            "evict_any_number",
            "compact_clock",
        )
        marks = [pytest.mark.slow] if is_long and components != "FULL" else []
        if name != "reset":
            yield pytest.param(components, name, marks=marks)


@pytest.mark.parametrize(("components", "name"), [*compiled_cases()])
def test_nothing_copies_an_array_of_nodes(components, name):
    config = odd(components)
    text = op_cases(config, 8, 3)[name].lower(config).compile().as_text()
    found = large_copies(text)
    if name in ("evict_any_number", "compact_clock"):
        # Their lanes are all the nodes, so lists of places are as long; no state is.
        sizes = {leaf.size for leaf in jax.tree.leaves(shapes(config))}
        found = {line: words for line, words in found.items() if words in sizes}
    assert not found


def test_a_scanned_step_copies_no_array_of_nodes():
    """Match, lock, allocate, insert, unlock and free, with a switch between lengths."""
    requests = engine.Requests(
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
