"""`draw_tree`: the path-compressed tree as a picture; needs matplotlib."""

import importlib.util
import pathlib
from collections.abc import Callable

from ..state import CacheState
from .host import read_one


def draw_tree(
    cache: CacheState,
    path: str | pathlib.Path | None = None,
    *,
    title: str | None = None,
    max_tokens: int = 8,
    decode: Callable | None = None,
):
    """Draw the path-compressed tree, root at the left, one box an edge.

    A box is as long as its run of tokens (short ones are drawn at a least length) and
    coloured by whether it can be evicted; live SWA pages and tombstones are a strip
    along its foot, a snapshot is a diamond at its end.

    Args:
      cache: a `CacheState`; of a stack, take one rank.
      path: where to save, as SVG, PNG or what else matplotlib writes, by its suffix.
      title: the first line; None says how full the tree is.
      max_tokens: tokens of each edge that a label shows at most.
      decode: turns a list of token ids into text; None shows the ids.

    Returns:
      A matplotlib `Figure`, which notebooks display.

    Raises:
      ImportError: matplotlib is missing.
      ValueError: `cache` is no single cache, or matplotlib cannot write that suffix.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "draw_tree needs matplotlib, which is not installed; install it with "
            "pip install 'uhrc_fn[replay]'. tree_string needs nothing."
        )
    from . import figure

    host = read_one(cache, "draw_tree")
    if path is not None:
        figure.check_suffix(pathlib.Path(path))
    drawn = figure.draw(host, title, max_tokens, decode)
    if path is not None:
        figure.save(drawn, pathlib.Path(path))
    return drawn
