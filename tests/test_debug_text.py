"""`to_pydict` and `tree_string` of small trees, laid out by hand."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from debug_trees import (
    CONFIG,
    LORA,
    edit,
    full_tree,
    insert,
    recurrent_tree,
    swa_tree,
)

import uhrc_fn
from uhrc_fn import to_pydict, tree_string

NAME = f"namespace {LORA[:8]}…"


@functools.cache
def kept(build):
    return build()


def laid_out(text: str) -> str:
    return textwrap.dedent(text).strip().replace("NAMESPACE-OF-LORA..", NAME)


def edge(tokens, pages, lock, stamp, *children):
    return {
        "tokens": tokens,
        "pages": {"FULL": pages},
        "lock_ref": {"FULL": lock},
        "last_access": {"FULL": stamp},
        "children": list(children),
    }


def test_tree_as_a_dict():
    left, right = edge([5, 6], [4], 1, 26), edge([7, 8], [5], 0, 11)
    assert to_pydict(kept(full_tree)) == {
        "page_size": 2,
        "nodes": 6,
        "clock": 30,
        "status": [],
        "pools": {
            "FULL": {
                "capacity": 8,
                "free": 1,
                "evictable": 3,
                "protected": 3,
                "requests": 1,
            }
        },
        "namespaces": [
            {
                "namespace": "",
                "children": [
                    edge([1, 2, 3, 4], [2, 3], 1, 28, left, right),
                    edge([20, 21], [6], 0, 18),
                ],
            },
            {"namespace": LORA, "children": [edge([1, 2], [7], 0, 23)]},
        ],
    }


def test_components_in_a_dict():
    (default, _) = to_pydict(kept(swa_tree))["namespaces"]
    top = default["children"][0]
    assert top["pages"] == {"FULL": [2, 3], "SWA": [None, None]}
    assert top["last_access"] == {"FULL": 28, "SWA": None}
    assert top["lock_ref"] == {"FULL": 1, "SWA": 0}
    assert top["children"][0]["pages"] == {"FULL": [4], "SWA": [1]}
    assert top["children"][0]["lock_ref"] == {"FULL": 1, "SWA": 1}


def test_a_dict_does_not_depend_on_the_order_of_insertion():
    def tree(*prompts):
        cache = uhrc_fn.init(CONFIG)
        for prompt in prompts:
            cache = insert(cache, prompt)
        return to_pydict(cache)["namespaces"][0]["children"]

    def shape(edges):
        return [(e["tokens"], shape(e["children"])) for e in edges]

    one = shape(tree([1, 2, 3, 4], [1, 2, 5, 6], [9, 9]))
    assert one == shape(tree([9, 9], [1, 2, 5, 6], [1, 2, 3, 4]))
    assert one == [([1, 2], [([3, 4], []), ([5, 6], [])]), ([9, 9], [])]


def test_tree_as_text():
    assert tree_string(kept(full_tree)) == laid_out("""
        6 of 8 nodes, 2 tokens a page, clock 30, status OK
        FULL  1 free, 3 evictable, 3 protected, 1 with requests, of 8
                             tokens  pages  locks  holds  age
        default namespace
        ├─ 1 2 3 4                4  2-3        1  FULL     2
        │  ├─ 5 6                 2  4          1  FULL     4
        │  └─ 7 8                 2  5          -  FULL    19
        └─ 20 21                  2  6          -  FULL    12
        NAMESPACE-OF-LORA..
        └─ 1 2                    2  7          -  FULL     7
    """)


def test_sliding_windows_as_text():
    # One of two pages of the upper edge has an SWA page.
    cache = edit(kept(swa_tree), "tree.value", (1, 3), 3)
    assert tree_string(cache) == laid_out("""
        6 of 8 nodes, 2 tokens a page, clock 30, status OK
        FULL  1 free, 3 evictable, 3 protected, 1 with requests, of 8
        SWA   1 free, 1 evictable, 1 protected, 0 with requests, of 3
                             tokens  pages  locks  holds         age
        default namespace
        ├─ 1 2 3 4                4  2-3      1/0  FULL+SWA 1/2    2
        │  ├─ 5 6                 2  4        1/1  FULL+SWA        4
        │  └─ 7 8                 2  5          -  FULL+SWA       19
        └─ 20 21                  2  6          -  FULL           12
        NAMESPACE-OF-LORA..
        └─ 1 2                    2  7          -  FULL            7
    """)


def test_a_snapshot_ends_a_run():
    text = tree_string(kept(recurrent_tree))
    assert (
        text.splitlines()[2:7]
        == laid_out("""
        RECURRENT  1 free, 1 evictable, 0 protected, 0 with requests, of 2
                             tokens  pages  locks  holds           age
        default namespace
        ├─ 1 2                    2  2        1/0  FULL+RECURRENT    2
        │  └─ 3 4                 2  3        1/0  FULL              3
    """).splitlines()
    )


def test_a_lock_ends_a_run():
    cache = insert(uhrc_fn.init(CONFIG), [1, 2, 3, 4, 5, 6])
    assert len(tree_string(cache).splitlines()) == 5
    match = uhrc_fn.peek_prefix_len(
        cache, uhrc_fn.radix_key([1, 2, 3, 4], CONFIG, num_pages=4)
    )
    locked, _ = uhrc_fn.jitted.inc_lock_ref(cache, match)
    rows = tree_string(locked).splitlines()[4:]
    assert [row.split()[:5] for row in rows] == [
        ["└─", "1", "2", "3", "4"],
        ["└─", "5", "6", "2", "3"],
    ]


def test_long_edges_are_cut_and_decoded():
    cache = insert(uhrc_fn.init(CONFIG), [72, 105, 10, 33, 72, 105, 33, 33])
    row = tree_string(cache, max_tokens=3).splitlines()[-1]
    assert row.startswith("└─ 72 105 10 …  ")
    decode = lambda ids: "".join(map(chr, ids))
    row = tree_string(cache, decode=decode, max_tokens=4).splitlines()[-1]
    assert row.startswith(r"└─ 'Hi\n!' …  ")
    row = tree_string(cache, decode=lambda ids: "x" * 50).splitlines()[-1]
    assert row.startswith(f"└─ '{'x' * 40}' …  ")


def test_page_ids_are_drawn_together():
    cache = insert(uhrc_fn.init(CONFIG), [1, 2, 3, 4, 5, 6, 7, 8])
    pages = lambda c: tree_string(c).splitlines()[-1].split()[-4]
    assert pages(cache) == "1-4"
    cache = edit(cache, "tree.value", (0, slice(1, 5)), [7, 8, 2, 5])
    assert pages(cache) == "7-8,2,5"


def test_empty_and_troubled_trees():
    assert tree_string(uhrc_fn.init(CONFIG)) == laid_out("""
        0 of 8 nodes, 2 tokens a page, clock 0, status OK
        FULL  8 free, 0 evictable, 0 protected, 0 with requests, of 8
        the tree is empty
    """)
    bits = uhrc_fn.Status.DOUBLE_FREE | uhrc_fn.Status.BAD_PAGE
    cache = edit(uhrc_fn.init(CONFIG), "counters", uhrc_fn.state.Counter.STATUS, bits)
    assert tree_string(cache).splitlines()[0].endswith("status DOUBLE_FREE, BAD_PAGE")
    assert to_pydict(cache)["status"] == ["DOUBLE_FREE", "BAD_PAGE"]


def test_stacks_are_shown_rank_by_rank():
    empty, cache = uhrc_fn.init(CONFIG), kept(full_tree)
    stack = jax.tree.map(lambda *rows: jnp.stack(rows), empty, cache)
    text = f"rank 0\n{tree_string(empty)}\n\nrank 1\n{tree_string(cache)}"
    assert tree_string(stack) == text
    assert to_pydict(stack) == [to_pydict(empty), to_pydict(cache)]


def test_deep_chains_do_not_recurse():
    config = uhrc_fn.CacheConfig(num_pages=3000, max_prefix_pages=3000)
    cache = uhrc_fn.init(config)
    # A chain of single pages whose locks fall from page to page, so that none merge.
    nodes = np.arange(1, 3001)
    for name, index, value in (
        ("parent", nodes, nodes - 1),
        ("depth", nodes, nodes),
        ("value", (0, nodes), nodes),
        ("lock_ref", (0, nodes), 3001 - nodes),
        ("last_access", (0, nodes), 3001 - nodes),
    ):
        cache = edit(cache, f"tree.{name}", index, value)
    assert len(tree_string(cache).splitlines()) == 3 + 1 + 3000
    level = to_pydict(cache)["namespaces"][0]
    for _ in range(3000):
        (level,) = level["children"]
    assert level["pages"] == {"FULL": [3000]}


def test_only_caches_are_shown():
    with pytest.raises(ValueError, match="got a dict; wanted a CacheState"):
        tree_string({})  # type: ignore[arg-type]
