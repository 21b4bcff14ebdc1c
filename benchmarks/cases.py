"""The workloads of `ops.py`: what each row runs, on every side.

Both sides of a case get the same tokens. Ours are NumPy arrays or records of them,
a host tree's are Python lists; all are built before the clock starts. A host tree's
query is made of new int objects, as a new request's tokens would be: equal to those
in the tree, but not the same objects.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hosts import HostTree, MakeTree
from ours import (
    Runner,
    config_for,
    copy,
    entries_for,
    filled,
    insert_params,
    key_of,
    on_device,
    stack,
)
from timing import Loop, Step

import uhrc_fn
from uhrc_fn import free_lists
from uhrc_fn.state import Owner, Ring, bump

VOCABULARY = 150_000
# Different keys, or batches of them, that a match goes round.
_ROTATION = 8
_LEAF_PARENTS = 100
_LEAVES = 10_000
# Most single steps of one round of an operation that uses its arguments up.
_MAX_STEPS = 128


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: an operation on keys of `pages` pages, in a tree of `nodes`."""

    op: str
    page_size: int
    pages: int
    batch: int = 1
    shared: float | None = None
    nodes: int = 1 << 14
    fill: float = 0.75
    """Part of the nodes that the tree holds before the clock starts."""
    key_pages: int | None = None
    """Pages of the keys in the tree, where not those of the case."""
    thin: bool = False
    """Whether the tree is made of many leaves of one page."""
    hosts: bool = True
    """Whether host trees run it too."""
    components: str = "FULL"

    @property
    def identity(self) -> dict:
        """The columns that name the row."""
        names = "op components page_size pages batch shared nodes".split()
        return {name: getattr(self, name) for name in names}


class Bench:
    """The sides of one case; subclasses say what a step is.

    A subclass sets `function` (the operation of ours) and `arguments` (one tuple a
    step), and says what the host trees do.
    """

    function: Callable
    arguments: Sequence[tuple]
    consumes = False

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = config_for(case.page_size, case.nodes, case.components)
        self.rng = np.random.default_rng(20_000 + case.nodes + case.pages)
        pages = case.key_pages or case.pages
        self.tokens = self.draw(int(case.nodes * case.fill) // pages, pages)

    def draw(self, keys: int, pages: int) -> np.ndarray:
        """Random token ids [keys, tokens]."""
        shape = (keys, pages * self.case.page_size)
        return self.rng.integers(0, VOCABULARY, shape, dtype=np.int32)

    @functools.cached_property
    def base(self) -> Any:
        """Our cache before the clock starts; copied where a round changes it."""
        return filled(self.config, self.tokens)

    def ours(self, runner: Runner) -> Loop:
        """Loop of ours: one call a step."""

        def make() -> list[Step]:
            if self.consumes or runner.cache is None:
                runner.cache = copy(self.base)
            return [functools.partial(runner, *args) for args in self.arguments]

        return Loop(make, self.case.batch, self.consumes)

    def looped(self, runner: Runner) -> Loop:
        """Loop of ours: all steps inside one call of a jitted loop."""
        stacked = stack(self.arguments)

        def make() -> list[Step]:
            if self.consumes or runner.cache is None:
                runner.cache = copy(self.base)
            return [functools.partial(runner, stacked)]

        return Loop(make, self.case.batch * len(self.arguments), self.consumes)

    def floor(self, runner: Runner) -> Loop:
        """Loop of ours with a function that computes nothing."""
        runner.cache = copy(self.base)
        steps = [functools.partial(runner, *args) for args in self.arguments]
        return Loop(lambda: steps, self.case.batch)

    def convert(self) -> Loop | None:
        """Loop that builds our key from a Python list."""
        return None

    def host(self, make_tree: MakeTree) -> Loop | None:
        """Loop of a host tree, or None where it has nothing to compare."""
        return None

    def host_tree(self, make_tree: MakeTree) -> HostTree:
        """Build a host tree that holds the same keys."""
        tree = make_tree(self.case.page_size, self.case.nodes)
        pages = self.case.key_pages or self.case.pages
        for tokens in self.tokens:
            tree.insert(tree.key(tokens.tolist()), tree.alloc(pages))
        return tree

    def host_keys(self, tree: HostTree, tokens: np.ndarray) -> list[Any]:
        """Keys of a host tree, as new lists of new ints."""
        return [tree.key(row.tolist()) for row in tokens]


def convert_lists(tokens: np.ndarray, config: Any) -> Loop:
    """Loop that builds our keys from Python lists on the device, one key a step."""
    lists = [row.tolist() for row in tokens[:_ROTATION]]
    steps = [
        functools.partial(lambda row: on_device(uhrc_fn.radix_key(row, config)), row)
        for row in lists
    ]
    return Loop(lambda: steps)


def in_turn(steps: Sequence[Step]) -> Step:
    """One step that does several, as a host serves a batch."""

    def run() -> None:
        for step in steps:
            step()

    return run


class Match(Bench):
    """Whole hits, on keys drawn from those that the tree holds."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.function = (
            uhrc_fn.match_prefix if case.batch == 1 else uhrc_fn.match_prefix_batch
        )
        picks = [
            self.rng.choice(len(self.tokens), case.batch, replace=False)
            for _ in range(_ROTATION)
        ]
        length = case.pages * case.page_size
        self.queries = [self.tokens[pick][:, :length] for pick in picks]
        rows = self.queries if case.batch > 1 else [query[0] for query in self.queries]
        self.arguments = [
            (on_device(uhrc_fn.MatchPrefixParams(key=key_of(row, self.config))),)
            for row in rows
        ]

    def convert(self) -> Loop:
        return convert_lists(np.concatenate(self.queries), self.config)

    def host(self, make_tree: MakeTree) -> Loop:
        tree = self.host_tree(make_tree)
        steps = [
            in_turn(
                [functools.partial(tree.match, key) for key in self.host_keys(tree, q)]
            )
            for q in self.queries
        ]
        return Loop(lambda: steps, self.case.batch)


class Insert(Bench):
    """Keys of which the tree holds nothing; `shared` says what a batch has in common.

    0: nothing. 0.5: the first half of the pages is the same in the whole batch, the
    rest differs. 1: all keys of the batch are equal. Batches share nothing.
    """

    consumes = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.function = uhrc_fn.insert if case.batch == 1 else uhrc_fn.insert_batch
        free = case.nodes - self.tokens.size // case.page_size
        steps = min(free // (case.batch * case.pages), _MAX_STEPS)
        self.new = self.draw(steps * case.batch, case.pages)
        self.new = self.new.reshape(steps, case.batch, -1)
        common = int(case.pages * (case.shared or 0)) * case.page_size
        self.new[:, :, :common] = self.new[:, :1, :common]
        self._after_fill, brought = entries_for(
            filled(self.config, self.tokens), (steps, case.batch, case.pages)
        )
        self.arguments = []
        for step in range(steps):
            at = (step, 0) if case.batch == 1 else step
            key = key_of(self.new[at], self.config)
            mine = {name: entries[at] for name, entries in brought.items()}
            self.arguments.append((on_device(insert_params(key, **mine)),))

    @property
    def base(self) -> Any:
        return self._after_fill

    def convert(self) -> Loop:
        return convert_lists(self.new.reshape(-1, self.new.shape[-1]), self.config)

    def host(self, make_tree: MakeTree) -> Loop:
        flat = self.new.reshape(-1, self.new.shape[-1])
        batch = self.case.batch

        def make() -> list[Step]:
            tree = self.host_tree(make_tree)
            values = [tree.alloc(self.case.pages) for _ in flat]
            keys = self.host_keys(tree, flat)
            steps = [
                functools.partial(tree.insert, key, value)
                for key, value in zip(keys, values, strict=True)
            ]
            return [in_turn(steps[i : i + batch]) for i in range(0, len(steps), batch)]

        return Loop(make, batch, consumes=True)


class Lock(Match):
    """Lock the whole path of a match; every step locks another key."""

    consumes = True

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        keys = self.tokens[:_MAX_STEPS, : case.pages * case.page_size]
        self.queries = [key[None] for key in keys]
        self.function = uhrc_fn.inc_lock_ref
        self.arguments = [(match,) for match in self.matches()]

    def matches(self) -> list[Any]:
        """Our match of each key."""
        cache, found = copy(self.base), []
        for query in self.queries:
            params = uhrc_fn.MatchPrefixParams(key=key_of(query[0], self.config))
            cache, match = uhrc_fn.jitted.match_prefix(cache, params)
            found.append(match)
        return found

    def convert(self) -> None:  # type: ignore[override]
        return None

    def host(self, make_tree: MakeTree) -> Loop:
        tree, live = self.host_tree(make_tree), []
        matches = self.host_matches(tree)

        def make() -> list[Step]:
            while live:
                tree.unlock(*live.pop())
            return [lambda m=m: live.append((m, tree.lock(m))) for m in matches]

        return Loop(make, consumes=True)

    def host_matches(self, tree: HostTree) -> list[Any]:
        """A host tree's match of each key."""
        keys = self.host_keys(tree, np.concatenate(self.queries))
        return [tree.match(key) for key in keys]


class Unlock(Lock):
    """Give the locks of `Lock` back."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        cache, receipts = copy(self.base), []
        for (match,) in self.arguments:
            cache, receipt = uhrc_fn.jitted.inc_lock_ref(cache, match)
            receipts.append(receipt.to_dec_params())
        self.base = cache  # type: ignore[misc]
        self.function = uhrc_fn.dec_lock_ref
        self.arguments = [(receipt,) for receipt in receipts]

    def host(self, make_tree: MakeTree) -> Loop:
        tree = self.host_tree(make_tree)
        matches = self.host_matches(tree)

        def make() -> list[Step]:
            live = [(m, tree.lock(m)) for m in matches]
            return [functools.partial(tree.unlock, *pair) for pair in live]

        return Loop(make, consumes=True)


class Evict(Bench):
    """Free `pages` pages a call, of a tree with 10,000 leaves of one page each.

    100 first pages with 100 children each. Where `thin` is off (ours alone), keys with
    nothing in common instead. `evict` has a static bound of 64 victims a
    call, `evict_any` none.
    """

    consumes = True

    def __init__(self, case: Case) -> None:
        super().__init__(dataclasses.replace(case, fill=0))
        self.case = case
        self.tokens = self.leaves() if case.thin else self.tokens_of(case)
        bound = 64 if case.op == "evict" else None
        self.function = functools.partial(uhrc_fn.evict, max_victims=bound)
        steps = min(_MAX_STEPS, self.tokens.size // case.page_size // 4 // case.pages)
        num_tokens = np.int32(case.pages * case.page_size)
        self.arguments = [(uhrc_fn.EvictParams(num_tokens=num_tokens),)] * steps

    def tokens_of(self, case: Case) -> np.ndarray:
        """Keys with nothing in common, for the growth with the number of nodes."""
        pages = case.key_pages or case.pages
        return self.draw(int(case.nodes * case.fill) // pages, pages)

    def leaves(self) -> np.ndarray:
        """Keys of two pages that make 10,000 leaves under 100 parents."""
        parents = np.repeat(self.draw(_LEAF_PARENTS, 1), _LEAVES // _LEAF_PARENTS, 0)
        return np.concatenate([parents, self.draw(_LEAVES, 1)], axis=1)

    @functools.cached_property
    def base(self) -> Any:
        return filled(self.config, self.tokens)

    def host_tree(self, make_tree: MakeTree) -> HostTree:
        tree = make_tree(self.case.page_size, self.case.nodes)
        keys = self.host_keys(tree, self.tokens)
        parents = [tree.alloc(1) for _ in range(_LEAF_PARENTS)]
        for i, key in enumerate(keys):
            parent = parents[i * _LEAF_PARENTS // _LEAVES]
            tree.insert(key, np.concatenate([parent, tree.alloc(1)]))
        tree.hold_frees()
        return tree

    def host(self, make_tree: MakeTree) -> Loop:
        def make() -> list[Step]:
            tree = self.host_tree(make_tree)
            step = functools.partial(tree.evict, self.case.pages)
            return [step] * len(self.arguments)

        return Loop(make, consumes=True)


class Alloc(Bench):
    """Take `pages` pages while more than that are free: nothing is evicted."""

    consumes = True

    def __init__(self, case: Case) -> None:
        super().__init__(dataclasses.replace(case, fill=0.25))
        self.function = functools.partial(uhrc_fn.alloc_pages, max_new=case.pages)
        self.arguments = [(np.int32(case.pages),)] * _MAX_STEPS

    def host(self, make_tree: MakeTree) -> Loop:
        def make() -> list[Step]:
            tree = self.host_tree(make_tree)
            return [functools.partial(tree.alloc, self.case.pages)] * _MAX_STEPS

        return Loop(make, consumes=True)


def pop_pages(cache: Any, count: Any, *, max_new: int) -> tuple[Any, Any]:
    """Take free pages with no check at all: the least that `alloc_pages` has to do."""
    rank = jnp.arange(max_new, dtype=jnp.int32)
    ring = (cache.config, Ring.FULL)
    ids = free_lists.front(cache.free_ids, cache.counters, *ring, rank)
    place = jnp.where(rank < count, ids, cache.owner.shape[0])
    owner = cache.owner.at[place].set(int(Owner.REQUEST), mode="drop")
    counters = bump(cache.counters, **free_lists.taken(cache.counters, *ring, count))
    cache = dataclasses.replace(cache, owner=owner, counters=counters)
    result = uhrc_fn.AllocResult(
        ids=jnp.where(rank < count, ids, 0),
        scalars=jnp.stack([count, jnp.ones_like(count)]),
    )
    return cache, result


class Pop(Alloc):
    """What `Alloc` is measured against: the same pages, popped and marked, no more."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.function = functools.partial(pop_pages, max_new=case.pages)


BENCHES: dict[str, Callable[[Case], Bench]] = {
    "match": Match,
    "insert": Insert,
    "lock": Lock,
    "unlock": Unlock,
    "evict": Evict,
    "evict_any": Evict,
    "alloc": Alloc,
    "pop": Pop,
}


def all_cases() -> list[Case]:
    """Every row of `ops.py`, in the order of its table."""
    thin = dict(page_size=128, thin=True)
    return [
        Case("match", 128, 64),
        Case("match", 128, 64, batch=64),
        Case("match", 128, 1024),
        Case("match", 16, 512),
        Case("match", 1, 8192, nodes=1 << 17),
        Case("insert", 128, 64, shared=0, fill=0.25),
        Case("insert", 128, 64, batch=64, shared=0, fill=0.25),
        Case("insert", 128, 64, batch=64, shared=0.5, fill=0.25),
        Case("insert", 128, 64, batch=64, shared=1, fill=0.25),
        Case("lock", 128, 64),
        Case("unlock", 128, 64),
        Case("evict", pages=1, **thin),
        Case("evict", pages=64, **thin),
        Case("evict_any", pages=1, **thin),
        Case("evict_any", pages=64, **thin),
        Case("alloc", 128, 64),
        Case("pop", 128, 64, hosts=False),
        *scaling_cases(),
    ]


def scaling_cases() -> list[Case]:
    """Ours alone, at page 16: does the cost grow with the tree?"""
    plain = dict(page_size=16, hosts=False)
    reads = [
        Case(op, pages=pages, nodes=nodes, key_pages=512, **plain)
        for op in ("match", "lock")
        for pages in (64, 512)
        for nodes in (1 << 14, 1 << 20)
        if (op, pages, nodes) != ("match", 512, 1 << 14)  # compared with hosts above
    ]
    inserts = [
        Case("insert", shared=0, pages=pages, nodes=nodes, key_pages=512, **plain)
        for pages in (64, 512)
        for nodes in (1 << 14, 1 << 20)
    ]
    evictions = [
        Case("evict", pages=64, nodes=nodes, key_pages=512, **plain)
        for nodes in (1 << 14, 1 << 16, 1 << 18)
    ]
    return reads + inserts + evictions
