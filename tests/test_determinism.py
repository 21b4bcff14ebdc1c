"""A hit, a miss, a flushed cache and none at all give the same tokens, by family.

And where a clone or a page table is wrong they do not: the same requests then give
other tokens, so that the equality is one that can fail.
"""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_harness import (
    FAMILIES,
    FAST,
    MAX_LENGTH,
    check_idle,
    make_engine,
    outputs,
    prompts_around,
)

import uhrc_fn as u
from uhrc_fn.serving import admission
from uhrc_fn.serving.step import serve_steps

TOKENS = 8

# At, before and after a page boundary and a track boundary, by page size.
POINTS = {1: (31, 32, 33, 7), 16: (47, 48, 49, 63, 64, 65, 5)}
# Each case compiles three programs; a few stand for all where time is short.
QUICK = {("kda-mla", 16), ("swa-gqa", 16)}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(FAMILIES, (16, 1))
]

# Faults, planted where a request is admitted. `is_on` is traced: one program has all.


def shifted(is_on, table):
    """A page table whose entries of tokens 16 to 31 name the pages beside theirs."""

    def page_table(match, alloc):
        pages = table(match, alloc)
        size = MAX_LENGTH // pages.shape[0]
        wrong = slice(16 // size, 32 // size)
        return jnp.where(is_on, pages.at[wrong].set(beside(pages[wrong])), pages)

    return page_table


def shifted_window(is_on, table):
    """A window of the tree's whose SWA pages are the ones beside them."""

    def window(cache, match):
        pages = table(cache, match)
        return jnp.where(is_on & (pages > 0), beside(pages), pages)

    return window


def beside(page):
    return jnp.where(page > 1, page - 1, page + 1)


def stale(is_on, clone):
    """A clone that leaves in its slot whatever the last owner left."""

    def cow_clone(cache, states, match):
        cache, copied, result = clone(cache, states, match)
        keep = lambda old, new: jnp.where(is_on, old, new)
        return cache, jax.tree.map(keep, states, copied), result

    return cow_clone


def temporal_only(is_on, clone):
    """A clone that forgets the short convolution's inputs."""

    def cow_clone(cache, states, match):
        cache, copied, result = clone(cache, states, match)
        keep = lambda old, new: jnp.where(is_on, old, new)
        conv = jax.tree.map(keep, states.conv, copied.conv)
        return cache, dataclasses.replace(copied, conv=conv), result

    return cow_clone


FAULTS = {
    "a page shifted by one": ("page_table", shifted),
    "a window's pages shifted": ("_window", shifted_window),
    "a stale slot": ("cow_clone", stale),
    "a temporal-only clone": ("cow_clone", temporal_only),
}


def faults_of(family: str) -> list[str]:
    """Those that a family's parts allow; GLA has no convolution."""
    rules = {
        "a page shifted by one": True,
        "a window's pages shifted": "swa" in family,
        "a stale slot": family.startswith(("kda", "gdn", "gla")),
        "a temporal-only clone": family.startswith(("kda", "gdn")),
    }
    return [fault for fault, is_there in rules.items() if is_there]


@functools.partial(jax.jit, static_argnums=2, donate_argnums=1, compiler_options=FAST)
def faulty_steps(model, state, num_steps, number):
    with contextlib.ExitStack() as stack:
        for i, (name, plant) in enumerate(FAULTS.values()):
            fault = plant(number == i, getattr(admission, name))
            stack.enter_context(mock.patch.object(admission, name, fault))
        return serve_steps(model, state, num_steps)


def plant(engine, fault: str) -> None:
    """Give an engine the step with a fault in it."""
    number = np.int32(list(FAULTS).index(fault))
    steps = lambda *arguments: faulty_steps(*arguments, number)
    engine._programs = engine._programs._replace(steps=steps)


@functools.cache
def served(family: str, page_size: int):
    """Prompts, and what they give without a cache."""
    prompts = prompts_around(POINTS[page_size])
    engine = make_engine(family, page_size, use_cache=False)
    control = outputs(engine, prompts, TOKENS)
    # Second turns, which resume from what the first ones left at their ends.
    turns = [np.r_[p, out, 5, 6] for p, out in zip(prompts, control, strict=True)]
    return prompts + turns, control + outputs(engine, turns, TOKENS)


@pytest.mark.parametrize(("family", "page_size"), CASES)
def test_hit_miss_flush_and_no_cache_give_equal_tokens(family, page_size):
    prompts, control = served(family, page_size)
    engine = make_engine(family, page_size)
    missed = outputs(engine, prompts, TOKENS)
    assert engine.stats.hit_tokens > 0
    before = engine.stats.hit_tokens
    hit = outputs(engine, prompts, TOKENS)
    assert engine.stats.hit_tokens > before
    check_idle(engine)
    cache = u.jitted.reset(engine.state.cache)
    engine.state = dataclasses.replace(engine.state, cache=cache)
    flushed = outputs(engine, prompts[::-1], TOKENS)[::-1]
    assert missed == control
    assert hit == control
    assert flushed == control
    for fault in faults_of(family):
        faulty = make_engine(family, page_size)
        plant(faulty, fault)
        assert outputs(faulty, prompts, TOKENS) != control, fault
