"""Time the engine's cache object beside sglang-jax's, call for call.

    python benchmarks/shell.py --peer PATH/TO/sglang-jax/python --json shell.json

Both sides are objects of one process, bound to one core: `UnifiedRadixCache` of ours,
which holds a functional cache and calls jitted programs, and the peer's tree of Python
objects. They take turns, round by round, and the medians of single calls count.

The native form of both is what an engine's scheduler has: a key is a Python list of
ints, wrapped in either side's `RadixKey` inside the clock, and locations are NumPy
int32 arrays, one a token. What is looked up is made of other int objects than what the
tree holds, as a new request's tokens are: CPython compares the same objects faster.
`ours_numpy_us` is ours with NumPy keys, where an engine has them; the peer takes lists.
`ours_known_us` is ours with a key object that was matched before, as every request's
is before it is inserted: it has read its list.

Rows: `match` of a cached key; `insert_again` of a key that the tree holds, with its own
locations; `insert` of a new key, with locations that were allocated before. A new key
of 8K tokens is 64 nodes in ours, and one in the peer's, where later keys split it.

The steps of ours, in microseconds: `convert_us` makes the words of a key from the list,
and checks locations; `call_us` calls the program with them and reads its result;
`floor_us` does that with a program of the same arrays that computes nothing, so that
`device_us` is call - floor; `rest_us`, locations and records, is what is left.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hosts import peer_maker
from timing import core_to_use, enter_one_core, run_child

_KEYS = 8
_WARM = 3
COLUMNS = (
    "op tokens page_size ours_us peer_us ours_numpy_us ours_known_us convert_us "
    "floor_us call_us device_us rest_us"
).split()
# Column: what makes the arguments of a round, and what is timed with each.
Steps = dict[str, tuple[Callable[[], Sequence[tuple]], Callable[..., Any]]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="`python` folder of sglang-jax")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=60, help=f"of {_KEYS} calls")
    parser.add_argument("--core", type=int, help="core to run on; default the first")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class Ours:
    """The engine's cache, and the steps of a call of it."""

    def __init__(self, tokens: int, page_size: int, num_pages: int):
        import uhrc_fn
        from uhrc_fn import engine
        from uhrc_fn.engine import packed

        self.engine, self.packed = engine, packed
        self.config = uhrc_fn.CacheConfig(
            page_size=page_size,
            num_pages=num_pages,
            max_prefix_pages=tokens // page_size,
        )
        table = engine.RequestTable(1, tokens, page_size)
        self.cache = engine.UnifiedRadixCache(table, self.config)

    def alloc(self, tokens: int) -> np.ndarray:
        given = self.cache.alloc(tokens)
        assert given is not None
        return given.full

    def match(self, tokens: Any) -> np.ndarray:
        key = self.engine.RadixKey(tokens)
        params = self.engine.MatchPrefixParams(key)
        return self.cache.match_prefix(params).device_indices

    def insert(self, tokens: Any, value: np.ndarray) -> int:
        return self.insert_key(self.engine.RadixKey(tokens), value)

    def insert_key(self, key: Any, value: np.ndarray) -> int:
        return self.cache.insert(self.engine.InsertParams(key, value)).prefix_len

    def matched(self, tokens: list[int]) -> Any:
        """The key of a request that has been matched."""
        key = self.engine.RadixKey(tokens)
        self.cache.match_prefix(self.engine.MatchPrefixParams(key))
        return key

    def words(self, tokens: Any, value: np.ndarray | None = None) -> np.ndarray:
        """The first step of a call: words for the program."""
        key = self.engine.RadixKey(tokens)
        _, words = self.cache._key(key, rows=0 if value is None else 1)
        assert words is not None
        if value is not None:
            self.cache._write_pages("value", value, words.length, words.row(0))
        return words.words

    def call_match(self, words: np.ndarray) -> np.ndarray:
        """The second: the program, until its result is on the host."""
        states = self.cache.states
        states[0], seen = self.packed.match_prefix(states[0], words, False)
        return np.asarray(seen)

    def call_insert(self, words: np.ndarray) -> np.ndarray:
        states = self.cache.states
        states[0], seen = self.packed.insert(states[0], words)
        return np.asarray(seen)

    def floor(self, words: np.ndarray, is_match: bool) -> Callable[[Any], Any]:
        """A program with the arrays of a call that computes nothing."""
        import jax
        import jax.numpy as jnp

        state = self.cache.states[0]
        tree = state.tree
        # What goes in and comes out again, and what is read only.
        if is_match:
            held, read = [tree.fields, state.counters], (tree.tokens, tree.table)
            program = self.packed._match_program(self.config, False)
            results = program.eval_shape(*held, *read, words)[len(held) :]
        else:
            held = [tree.fields, tree.tokens, tree.table, state.owner, state.counters]
            read = (state.free_ids,)
            program = self.packed._insert_program(self.config)
            results = program.eval_shape(held, *read, words)[1:]
        held, read = ([leaf.copy() for leaf in leaves] for leaves in (held, read))

        def nothing(held: Any, read: Any, words: Any) -> Any:
            zeros = [jnp.zeros(shape.shape, shape.dtype) for shape in results]
            return jax.lax.optimization_barrier(held), zeros

        compiled = jax.jit(nothing, donate_argnums=0, keep_unused=True)

        def run(words: np.ndarray) -> np.ndarray:
            nonlocal held
            held, zeros = compiled(held, read, words)
            return np.asarray(zeros[-1])

        return run


@dataclasses.dataclass
class Clock:
    """Nanoseconds of single calls, by column."""

    taken: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def time(self, column: str, call: Callable[..., Any], arguments: tuple) -> None:
        start = time.perf_counter_ns()
        result = call(*arguments)
        end = time.perf_counter_ns()
        del result
        self.taken.setdefault(column, []).append(end - start)

    def row(self, op: str) -> dict[str, Any]:
        """Medians in microseconds, the first rounds left out."""
        found: dict[str, Any] = dict.fromkeys(COLUMNS) | {"op": op}
        for column, times in self.taken.items():
            found[column] = statistics.median(times[_WARM * _KEYS :]) / 1e3
        found["device_us"] = found["call_us"] - found["floor_us"]
        steps = found["convert_us"] + found["call_us"]
        found["rest_us"] = found["ours_us"] - steps
        return found


class Bench:
    """Both sides, filled alike, and the tokens to ask for."""

    def __init__(self, arguments: argparse.Namespace):
        self.tokens, self.size = arguments.tokens, arguments.page_size
        self.rounds = arguments.rounds
        self.pages = self.tokens // self.size
        capacity = 4 * _KEYS * self.pages
        self.ours = Ours(self.tokens, self.size, capacity)
        make = peer_maker(arguments.peer) if arguments.peer else None
        self.peer = make(self.size, capacity) if make else None
        self.random = np.random.default_rng(7)
        self.keys = self.new_keys()
        for key in self.keys:
            self.ours.insert(key.tolist(), self.ours.alloc(self.tokens))
            if self.peer:
                self.peer_insert(key.tolist(), self.peer.alloc(self.pages))

    def new_keys(self) -> list[np.ndarray]:
        shape = (_KEYS, self.tokens)
        return list(self.random.integers(0, 150_000, shape).astype(np.int32))

    def peer_match(self, tokens: list[int]) -> np.ndarray:
        peer: Any = self.peer
        return peer.match(peer.key(tokens)).device_indices

    def peer_insert(self, tokens: list[int], value: Any) -> int:
        peer: Any = self.peer
        return peer.insert(peer.key(tokens), value)

    def measure(self, op: str, steps: Steps) -> dict[str, Any]:
        clock = Clock()
        for _ in range(self.rounds + _WARM):
            for column, (prepare, call) in steps.items():
                arguments = prepare()
                gc.collect(0)
                gc.disable()
                for each in arguments:
                    clock.time(column, call, each)
                gc.enable()
        return clock.row(op)

    def match(self) -> dict[str, Any]:
        ours = self.ours
        words = [(ours.words(key),) for key in self.keys]
        for key in self.keys:
            assert len(ours.match(key.tolist())) == self.tokens
            assert not self.peer or len(self.peer_match(key.tolist())) == self.tokens
        lists = lambda: lists_of(self.keys)
        steps: Steps = {"ours_us": (lists, ours.match)}
        if self.peer:
            steps["peer_us"] = lists, self.peer_match
        steps |= {
            "ours_numpy_us": (lambda: [(key,) for key in self.keys], ours.match),
            "convert_us": (lists, ours.words),
            "call_us": (lambda: words, ours.call_match),
            "floor_us": (lambda: words, ours.floor(words[0][0], is_match=True)),
        }
        return self.measure("match", steps)

    def known(self, pairs: Sequence[tuple]) -> list[tuple]:
        return [(self.ours.matched(tokens), value) for tokens, value in pairs]

    def insert_again(self) -> dict[str, Any]:
        """Comes after `match`, and before `insert` evicts what was matched."""
        ours = self.ours
        held = [(ours.match(key),) for key in self.keys]
        pairs = joined([(key,) for key in self.keys], held)
        words = [(ours.words(*pair),) for pair in pairs]
        lists = lambda: joined(lists_of(self.keys), held)
        steps: Steps = {"ours_us": (lists, ours.insert)}
        if self.peer:
            theirs = [(self.peer_match(key.tolist()),) for key in self.keys]
            again = lambda: joined(lists_of(self.keys), theirs)
            steps["peer_us"] = again, self.peer_insert
        steps |= {
            "ours_numpy_us": (lambda: pairs, ours.insert),
            "ours_known_us": (lambda: self.known(lists()), ours.insert_key),
            "convert_us": (lists, ours.words),
            "call_us": (lambda: words, ours.call_insert),
            "floor_us": (lambda: words, ours.floor(words[0][0], is_match=False)),
        }
        return self.measure("insert_again", steps)

    def insert(self) -> dict[str, Any]:
        ours = self.ours

        def fresh(as_list: bool = True) -> list[tuple]:
            keys = self.new_keys()
            values = [(ours.alloc(self.tokens),) for _ in keys]
            return joined(lists_of(keys) if as_list else [(k,) for k in keys], values)

        def fresh_words() -> list[tuple]:
            return [(ours.words(*pair),) for pair in fresh()]

        def fresh_theirs() -> list[tuple]:
            peer: Any = self.peer
            peer.evict(_KEYS * self.pages)
            values = [(peer.alloc(self.pages),) for _ in range(_KEYS)]
            return joined(lists_of(self.new_keys()), values)

        # Locations that conversion checks need not be the request's own.
        known = fresh(as_list=False)
        words = [(ours.words(*pair),) for pair in known]
        for each in words:  # what is in the tree can be evicted
            ours.call_insert(*each)
        lists = lambda: [(key.tolist(), value) for key, value in known]
        steps: Steps = {"ours_us": (fresh, ours.insert)}
        if self.peer:
            steps["peer_us"] = fresh_theirs, self.peer_insert
        steps |= {
            "ours_numpy_us": (lambda: fresh(as_list=False), ours.insert),
            "ours_known_us": (lambda: self.known(fresh()), ours.insert_key),
            "convert_us": (lists, ours.words),
            "call_us": (fresh_words, ours.call_insert),
            "floor_us": (lambda: words, ours.floor(words[0][0], is_match=False)),
        }
        return self.measure("insert", steps)


def lists_of(keys: Sequence[np.ndarray]) -> list[tuple]:
    """New int objects each time, as each request brings its own."""
    return [(key.tolist(),) for key in keys]


def joined(*columns: Sequence[tuple]) -> list[tuple]:
    return [sum(parts, ()) for parts in zip(*columns, strict=True)]


def report(rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows, and write them if asked."""
    print(" ".join(f"{column:>13}" for column in COLUMNS))
    for row in rows:
        cells = [row[column] for column in COLUMNS]
        texts = [f"{c:.0f}" if isinstance(c, float) else str(c) for c in cells]
        print(" ".join(f"{text:>13}" for text in texts))
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    arguments = parse_arguments()
    if arguments.tokens % arguments.page_size:
        raise SystemExit(
            f"--tokens {arguments.tokens} is not whole pages of {arguments.page_size}"
        )
    if not arguments.child:
        return run_child([*sys.argv[1:], "--child"], core_to_use(arguments.core))
    enter_one_core(arguments.core)
    bench = Bench(arguments)
    rows = [bench.match(), bench.insert_again(), bench.insert()]
    for row in rows:
        row |= {"tokens": arguments.tokens, "page_size": arguments.page_size}
    report(rows, arguments.json)


if __name__ == "__main__":
    main()
