"""`draw_tree`: what is in the picture, and that nothing overlaps."""

import functools
import importlib.util
import itertools
import re
import subprocess
import sys
import xml.etree.ElementTree

import debug_trees
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from debug_trees import full_tree, recurrent_tree, swa_tree

import uhrc_fn
from uhrc_fn import draw_tree
from uhrc_fn.debug.edges import Edge, namespaces
from uhrc_fn.debug.host import read
from uhrc_fn.debug.layout import MIN_WIDTH, Box, place

BIG = uhrc_fn.CacheConfig(page_size=2, num_pages=384, max_prefix_pages=8)


@functools.cache
def kept(build):
    return build()


def big_tree():
    """Forty leaves in two namespaces: runs that branch off runs, long and short."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 99999, 16)[: 2 * rng.integers(1, 9)] for _ in range(6)]
    while len(prompts) < 48:
        kept_part = prompts[rng.integers(len(prompts))]
        kept_part = kept_part[: 2 * rng.integers(0, len(kept_part) // 2 + 1)]
        own = rng.integers(0, 99999, 16)[: 2 * rng.integers(1, 9)]
        prompts.append(np.concatenate([kept_part, own])[:16])
    cache = uhrc_fn.init(BIG)
    cache, alloc = uhrc_fn.jitted.alloc_pages(cache, np.int32(384), max_new=384)
    for i, (prompt, pages) in enumerate(
        zip(prompts, alloc.ids.reshape(48, 8), strict=True)
    ):
        extra_key = "b" if i % 7 == 0 else None
        key = uhrc_fn.radix_key(prompt, BIG, num_pages=8, extra_key=extra_key)
        params = uhrc_fn.InsertParams(key=key, value=np.asarray(pages))
        cache, _ = uhrc_fn.jitted.insert(cache, params)
    uhrc_fn.check_invariants(cache)
    uhrc_fn.raise_if_bad(cache)
    return cache


def layout(cache) -> list[Box]:
    return place(namespaces(read(cache)[0]))[0]


def svg_texts(path) -> list[str]:
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]


def test_svg_holds_its_labels_as_text(tmp_path):
    path = tmp_path / "tree.svg"
    draw_tree(kept(full_tree), path)
    texts = svg_texts(path)
    for label in (
        "Prefix tree: 5 edges, 6 pages",
        "6 of 8 nodes, 2 tokens a page, clock 30, status OK",
        "FULL: 1 free, 3 evictable, 3 protected, 1 with requests, of 8",
        "default namespace",
        f"namespace {debug_trees.LORA[:8]}…",
        "1 2 3 4",
        "4 tok · lock 1",
        "5 6",
        "2 tok · lock 1",
        "20 21",
        "free to evict",
        "locked",
    ):
        assert label in texts
    assert "SWA page" not in texts


def test_the_same_tree_gives_the_same_svg(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_tree(kept(full_tree), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_and_notebooks(tmp_path):
    path = tmp_path / "tree.PNG"
    figure = draw_tree(kept(full_tree), str(path))
    signature = b"\x89PNG\r\n\x1a\n"
    assert path.read_bytes().startswith(signature)
    assert figure._repr_png_().startswith(signature)


@pytest.mark.parametrize(
    ("build", "labels"),
    [
        (swa_tree, {"SWA page", "SWA tombstone", "2 tok · lock 1/1"}),
        (recurrent_tree, {"snapshot", "1 2", "3 4", "2 tok · lock 1/0"}),
    ],
)
def test_components_are_shown(tmp_path, build, labels):
    draw_tree(kept(build), tmp_path / "tree.svg")
    assert labels <= set(svg_texts(tmp_path / "tree.svg"))


def test_colour_tells_what_is_locked(tmp_path):
    draw_tree(kept(full_tree), tmp_path / "tree.svg")
    svg = (tmp_path / "tree.svg").read_text()
    count = lambda colour: len(re.findall(rf"fill: {colour}", svg))
    # Two edges are locked and three are not; the legend has one of each.
    assert (count("#ffe3bd"), count("#dcedf8")) == (2 + 1, 3 + 1)


def test_decoded_text_title_and_dollars(tmp_path):
    def decode(ids):
        return "$x^2$ " + "-".join(map(str, ids))

    draw_tree(kept(full_tree), tmp_path / "a.svg", title="$5$", decode=decode)
    texts = svg_texts(tmp_path / "a.svg")
    assert "$5$" in texts
    assert "'$x^2$ 20-21'" in texts


def test_empty_tree(tmp_path):
    draw_tree(uhrc_fn.init(debug_trees.CONFIG), tmp_path / "tree.svg")
    assert "the tree is empty" in svg_texts(tmp_path / "tree.svg")


def test_boxes_of_forty_leaves_do_not_overlap():
    boxes = layout(kept(big_tree))
    assert sum(not box.children for box in boxes) >= 40
    for a, b in itertools.combinations(boxes, 2):
        apart = a.right < b.x or b.right < a.x
        assert apart or abs(a.y - b.y) >= (a.height + b.height) / 2


def test_boxes_are_as_long_as_their_tokens():
    long = {
        len(box.item.tokens): box.width
        for box in layout(kept(big_tree))
        if isinstance(box.item, Edge) and box.width > MIN_WIDTH
    }
    assert len(long) >= 3
    scales = {round(width / tokens, 6) for tokens, width in long.items()}
    assert len(scales) == 1


def test_texts_of_forty_leaves_do_not_overlap():
    figure = draw_tree(kept(big_tree))
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    extents = [t.get_window_extent(renderer) for t in figure.axes[0].texts]
    extents = [e for e in extents if e.width]
    assert len(extents) >= 100
    for a, b in itertools.combinations(extents, 2):
        # Fonts reserve some air above and below their letters.
        over = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert not (a.x0 < b.x1 and b.x0 < a.x1) or over < 0.25 * a.height
    width, height = figure.canvas.get_width_height()
    assert all(0 <= e.x0 and e.x1 <= width for e in extents)
    assert all(0 <= e.y0 and e.y1 <= height for e in extents)


def test_refusals(tmp_path, monkeypatch):
    cache = kept(full_tree)
    with pytest.raises(ValueError, match=r"ends in '\.txt'; wanted one of .*\.png"):
        draw_tree(cache, tmp_path / "tree.txt")
    with pytest.raises(ValueError, match="a stack of 2 caches; wanted one"):
        draw_tree(jax.tree.map(lambda x: jnp.stack([x, x]), cache))
    monkeypatch.setattr("uhrc_fn.debug.figure.MAX_LEAVES", 3)
    with pytest.raises(ValueError, match="4 leaves; wanted at most 3"):
        draw_tree(cache)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'uhrc_fn\[replay\]'"):
        draw_tree(cache)


def test_pyplot_is_left_alone():
    # Importing pyplot would choose a backend for the user's program.
    code = (
        "import sys, uhrc_fn; "
        "uhrc_fn.draw_tree(uhrc_fn.init(uhrc_fn.CacheConfig())); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
