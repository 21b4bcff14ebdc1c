"""Trees of ranks on a mesh: each does what it would do alone on one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import row, same, stack
from jax.sharding import AxisType
from mesh_driver import Rank, config_of, draw_turns, init_rank, play, turns_of
from op_cases import SETS

import uhrc_fn as u
from uhrc_fn.mesh import init_ranks, make_mesh, per_rank, place

# Small programs, run a few times: compile them fast rather than well.
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
TURNS = 400
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
CASES = [("FULL,RECURRENT", (4, 2))]
CASES += [
    slow(*case)
    for case in itertools.product(SETS, ((2, 4), (4, 2)))
    if case not in CASES
]
COLLECTIVES = r"all-reduce|all-gather|all-to-all|collective|reduce-scatter"


@functools.cache
def played_alone():
    return jax.jit(play, compiler_options=FAST)


@functools.cache
def alone(components: str, seed: int):
    """What a rank of these turns ends with, on one device."""
    config = config_of(components)
    turns = draw_turns(config, seed, TURNS)
    return jax.device_get(played_alone()(init_rank(config), turns))


@functools.cache
def compiled(components: str, shape: tuple[int, int]):
    mesh, config = make_mesh(*shape), config_of(components)
    turns = stack([draw_turns(config, 0, TURNS)] * shape[0])
    jitted = jax.jit(per_rank(play, mesh), donate_argnums=0, compiler_options=FAST)
    return jitted.lower(fresh(components, shape), place(mesh, turns)).compile()


def fresh(components: str, shape: tuple[int, int]):
    """All ranks before their first turn."""
    return init_ranks(make_mesh(*shape), lambda: init_rank(config_of(components)))


def played(components: str, shape: tuple[int, int], turns):
    """``(rank, seen)`` of all ranks on a mesh, each with its own turns."""
    turns = place(make_mesh(*shape), stack(turns))
    return jax.device_get(compiled(components, shape)(fresh(components, shape), turns))


def check(rank: Rank) -> None:
    """Every invariant, and that hands and cache agree on what a hand holds."""
    names = ("pages", "swa_pages", "slots")
    held = {name: list(rank.held[:, c]) for c, name in enumerate(names)}
    u.check_invariants(rank.cache, held)


@pytest.mark.parametrize(("components", "shape"), CASES)
def test_random_operations_give_the_integers_of_one_device(components, shape):
    seeds = range(shape[0])
    turns = [draw_turns(config_of(components), seed, TURNS) for seed in seeds]
    ranks = played(components, shape, turns)
    for seed in seeds:
        assert same(row(ranks, seed), alone(components, seed))
        check(row(ranks, seed)[0])


@pytest.mark.parametrize(
    ("components", "pool"),
    [
        ("FULL", "PAGES_EXHAUSTED"),
        slow("FULL,SWA", "SWA_PAGES_EXHAUSTED"),
        ("FULL,RECURRENT", "SLOTS_EXHAUSTED"),
    ],
)
def test_those_operations_hit_evict_and_run_short(components, pool):
    """What the equal integers above would not show if nothing happened."""
    seen = u.Status(0)
    for seed in range(4):
        _, (hits, status, evictable) = alone(components, seed)
        assert np.count_nonzero(np.diff(hits)) > 50
        assert np.count_nonzero(np.diff(evictable.sum(1)) < 0) > 20
        seen |= u.Status(int(status[-1]))
    wanted = {pool, "STALE_RECEIPT", "STALE_MATCH", "STALE_PREFIX", "NOT_OWNED"}
    assert wanted <= {bit.name for bit in seen}


def test_ranks_do_not_notice_each_other():
    """The turns of rank 0 change; what rank 1 ends with does not."""
    config = config_of("FULL")
    one, two, other = (draw_turns(config, seed, TURNS) for seed in (0, 1, 7))
    before = played("FULL", (2, 4), [one, two])
    after = played("FULL", (2, 4), [other, two])
    assert same(row(after, 1), row(before, 1))
    assert not same(row(after, 0), row(before, 0))


def test_a_rank_evicts_or_runs_short_alone():
    """All pages of rank 0 are held by its requests, those of rank 1 by its tree."""
    config = config_of("FULL")
    prompts = [np.arange(14) + 100 * hand for hand in range(3)]
    short = [("alloc", hand, [], (count, 0, 0)) for hand, count in enumerate((7, 7, 6))]
    full = []
    for hand, prompt in enumerate(prompts):
        count = min(7, 20 - 7 * hand)
        full.append(("match", hand, prompt[: 2 * count], (0, 0, 0)))
        full += [("alloc", hand, [], (count, 0, 0)), ("insert", hand, [], (0, 0, 0))]
    wants = ("alloc", 3, [], (5, 0, 0))
    pause = ("lock", 3, [], (0, 0, 0))
    turns = []
    for first in (short, full):
        named = [*first, wants]
        turns.append(turns_of(config, named + [pause] * (TURNS - len(named))))
    ranks, (_, status, evictable) = played("FULL", (2, 4), turns)
    assert [u.Status(int(s)) for s in status[:, -1]] == [u.Status.PAGES_EXHAUSTED, 0]
    assert evictable[:, -1, 0].tolist() == [0, 15]
    assert np.count_nonzero(ranks.held[:, 3, 0], axis=-1).tolist() == [0, 5]


def collectives(text: str) -> set[str]:
    """Operations of a compiled program that need another device."""
    return set(re.findall(rf" ({COLLECTIVES})[\w-]*\(", text))


@pytest.mark.parametrize(("components", "shape"), CASES)
def test_the_operations_hold_no_collective(components, shape):
    assert not collectives(compiled(components, shape).as_text())


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_collective_would_be_seen(axis):
    mesh = make_mesh(2, 4)
    summed = per_rank(lambda x: jax.lax.psum(x, axis), mesh)
    text = jax.jit(summed).lower(jnp.zeros((2, 8))).compile().as_text()
    assert collectives(text) == {"all-reduce"}


@pytest.mark.parametrize(
    ("data", "tensor", "words"),
    [(4, 4, "data=4 and tensor=4 with 8 devices"), (0, 1, "at least 1 of each")],
)
def test_a_mesh_of_too_few_devices_is_refused(data, tensor, words):
    with pytest.raises(ValueError, match=words):
        make_mesh(data, tensor)


@pytest.mark.parametrize(
    "mesh",
    [
        jax.make_mesh((2,), ("data",), (AxisType.Auto,)),
        jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2),
    ],
    ids=["one axis", "explicit"],
)
def test_another_mesh_is_refused(mesh):
    for act in (
        lambda: per_rank(u.compact_clock, mesh),
        lambda: init_ranks(mesh, lambda: u.init(config_of("FULL"))),
        lambda: place(mesh, np.zeros(2)),
    ):
        with pytest.raises(ValueError, match=r"Build it with uhrc_fn\.mesh\.make_mesh"):
            act()


def test_ranks_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"axis 0 of \[3\] over 2 devices of 'data'"):
        place(make_mesh(2, 2), np.zeros(3))
