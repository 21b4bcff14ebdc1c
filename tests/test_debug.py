"""`check_invariants`: every invariant is broken by hand, and is the one reported."""

import functools
from typing import NamedTuple

import broken_accounts  # noqa: F401
import broken_trees  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from debug_trees import (
    BREAKS,
    edit,
    edit_all,
    full_tree,
    recurrent_tree,
    swa_tree,
)

import uhrc_fn
from uhrc_fn.debug.invariants import INVARIANTS, InvariantError, check_invariants
from uhrc_fn.state import Counter, Owner, Ring


@functools.cache
def kept(build):
    """A tree, built once: edits leave it alone."""
    return build()


def all_breaks():
    return [
        pytest.param(name, build, function, found, id=function.__name__)
        for name, cases in BREAKS.items()
        for build, function, found in cases
    ]


@pytest.mark.parametrize("build", [full_tree, swa_tree, recurrent_tree])
def test_the_trees_themselves_hold(build):
    check_invariants(kept(build))
    check_invariants(kept(build), {"pages": [np.array([0, 8])]})


@pytest.mark.parametrize(("name", "build", "function", "found"), all_breaks())
def test_broken_invariant_is_named(name, build, function, found):
    with pytest.raises(InvariantError) as error:
        check_invariants(function(kept(build)))
    assert error.value.invariant == name
    assert str(error.value).startswith(f"{name}: ")
    assert found in str(error.value)


def test_every_invariant_has_a_case_and_a_sentence():
    names = [invariant.__name__ for invariant in INVARIANTS]
    assert set(BREAKS) | {"request_entries"} == set(names)
    assert len(set(names)) == len(names)
    assert all((i.__doc__ or "").endswith(".") for i in INVARIANTS)


class Requests(NamedTuple):
    pages: list
    swa_pages: tuple = ()
    slots: tuple = ()


@pytest.mark.parametrize(
    ("requests", "name", "found"),
    [
        (Requests([]), "pool_totals", "1 free + 6 tree + 0 request, wanted 8"),
        ({"pages": [[8], [8]]}, "pool_totals", "1 free + 6 tree + 2 request"),
        ({"pages": [[4]]}, "request_entries", "has owner TREE, wanted REQUEST"),
        ({"pages": [[9]]}, "request_entries", "at place 0 has 9, wanted 1 to 8"),
        ({"pages": [[8]], "slots": [3]}, "pool_totals", "RECURRENT has 0 free"),
    ],
)
def test_what_requests_own_is_accounted(requests, name, found):
    with pytest.raises(InvariantError) as error:
        check_invariants(kept(full_tree), requests)
    assert error.value.invariant == name
    assert found in str(error.value)


def test_a_request_holding_a_page_twice_is_found():
    cache = edit_all(
        kept(full_tree),
        ("owner", 1, Owner.REQUEST),
        ("counters", Counter.RING_SIZE + Ring.FULL, 0),
    )
    check_invariants(cache, {"pages": [[8, 1]]})
    with pytest.raises(InvariantError, match="page 8 is with requests 2 times"):
        check_invariants(cache, {"pages": [[8], [8]]})


def test_a_stack_is_checked_row_by_row():
    cache = kept(full_tree)
    broken = edit(cache, "tree.depth", 4, 2)
    stack = lambda *caches: jax.tree.map(lambda *rows: jnp.stack(rows), *caches)
    check_invariants(stack(cache, cache), [{"pages": [[8]]}, None])
    with pytest.raises(InvariantError, match=r"^rank 1: depths: ") as error:
        check_invariants(stack(cache, broken))
    assert error.value.rank == 1
    with pytest.raises(ValueError, match="a list with one record a rank"):
        check_invariants(stack(cache, cache), {"pages": [[8]]})
    with pytest.raises(ValueError, match="2 leading axes"):
        check_invariants(stack(stack(cache, cache)))


def test_arguments_of_the_wrong_kind_are_refused():
    with pytest.raises(ValueError, match="got a tuple; wanted a CacheState"):
        check_invariants((kept(full_tree), None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wanted a dict or NamedTuple"):
        check_invariants(kept(full_tree), {"page": [[8]]})


def test_generations_are_free():
    # A node may have been reused any number of times.
    check_invariants(edit(kept(full_tree), "tree.generation", 4, 9))


def test_many_pages_are_hashed_in_parts(monkeypatch):
    monkeypatch.setattr("uhrc_fn.debug.tree_invariants._HASH_TOKENS", 8)
    check_invariants(kept(full_tree))
    with pytest.raises(InvariantError, match="table_hashes"):
        check_invariants(edit(kept(full_tree), "tree.tokens", (7, 0), 22))


def test_public_names():
    assert uhrc_fn.check_invariants is check_invariants
    assert issubclass(uhrc_fn.InvariantError, AssertionError)
