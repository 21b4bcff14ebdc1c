"""The picture of a tree; the one debugging module that imports matplotlib."""

import io
import itertools
import pathlib
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path

from .edges import Edge, namespaces, pool_sizes
from .host import HostCache
from .layout import Box, place
from .text import lock_label, namespace_label, pool_line, preview, summary

# Okabe and Ito's colours, and tints of them: distinct to colour-blind readers. Locked
# boxes also have a thicker edge, so that the picture survives grey printing.
FREE_FACE, FREE_EDGE = "#dcedf8", "#0072b2"
LOCKED_FACE, LOCKED_EDGE = "#ffe3bd", "#d55e00"
ROOT_FACE, ROOT_EDGE, LINK = "#eeeeee", "#777777", "#9a9a9a"
SWA, SNAPSHOT, INK = "#cc79a7", "#009e73", "#222222"

DPI = 150
MARGIN = 0.3
MIN_FIGURE = 5.4
MAX_LEAVES = 1000
_FOOT = 0.5  # legend
_LINE = 0.19  # height of a line of the header
_PAD = 0.09  # beside a label in its box
_STRIP = 0.075  # SWA strip at the foot of a box
_LEADING = 0.125  # between the two lines in a box
_DIAMOND = 0.07  # half of a snapshot's mark
_SMALL: dict[str, Any] = {"size": 7.5, "color": INK}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "uhrc_fn",
    "hatch.linewidth": 0.5,
}


class TreeFigure(Figure):
    """A figure that notebooks show, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        save(self, buffer, "png")
        return buffer.getvalue()


def check_suffix(path: pathlib.Path) -> None:
    """Refuse what matplotlib cannot write.

    Raises:
      ValueError: names what it can.
    """
    kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(
            f"path {str(path)!r} ends in {path.suffix!r}; wanted one of "
            f".{', .'.join(kinds)}."
        )


def save(figure: Figure, target, kind: str | None = None) -> None:
    """Write a figure; the same tree gives the same SVG, and its text stays text."""
    kind = kind or target.suffix.removeprefix(".").lower()
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context(_STYLE):
        figure.savefig(target, format=kind, dpi=DPI, metadata=metadata)


def draw(c: HostCache, title: str | None, max_tokens: int, decode) -> TreeFigure:
    """Draw one cache.

    Raises:
      ValueError: there are more leaves than a picture can show.
    """
    boxes, height = place(namespaces(c))
    num_leaves = sum(not box.children for box in boxes)
    if num_leaves > MAX_LEAVES:
        raise ValueError(
            f"the tree has {num_leaves} leaves; wanted at most {MAX_LEAVES} for a "
            "picture. Use tree_string or to_pydict."
        )
    if title is None:
        num_edges = sum(box.parent is not None for box in boxes)
        title = f"Prefix tree: {num_edges} edges, {c.live_nodes.size} pages"
    pools = (f"{k}: {pool_line(v)}" for k, v in pool_sizes(c).items())
    small = [summary(c), *pools]
    figure = TreeFigure(dpi=DPI)
    FigureCanvasAgg(figure)
    ruler = _Ruler(figure)
    labels = [
        label for box in boxes for label in _labels(box, max_tokens, decode, ruler)
    ]
    ends = [*(x + ruler(text) for text, x, _ in labels), *(b.right for b in boxes)]
    width = max([*ends, *map(ruler, small), MIN_FIGURE])
    head = (2.5 + len(small)) * _LINE
    height = max(height, 2 * _LINE)  # room to say that a tree is empty
    axes = _axes(figure, width, -head, height + _FOOT)
    with matplotlib.rc_context(_STYLE):
        _header(axes, title, small, -head)
        for box in boxes:
            _link(axes, box)
            _box(axes, box)
        for text, x, y in labels:
            _text(axes, x, y, text, va="center_baseline", **_SMALL)
        if not boxes:
            _text(axes, 0, _LINE, "the tree is empty", style="italic", **_SMALL)
        _legend(axes, c, height + _FOOT - _LINE / 2)
    return figure


def _axes(figure: Figure, width: float, top: float, bottom: float):
    """Axes over the whole figure whose unit is the inch, y downwards."""
    figure.set_size_inches(width + 2 * MARGIN, bottom - top + 2 * MARGIN)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-MARGIN, width + MARGIN), ylim=(bottom + MARGIN, top - MARGIN))
    axes.set_axis_off()
    return axes


class _Ruler:
    """Measures small text, in inches."""

    def __init__(self, figure: Figure):
        self.renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        self.font = FontProperties(size=_SMALL["size"])

    def __call__(self, text: str) -> float:
        width = self.renderer.get_text_width_height_descent(text, self.font, False)[0]
        return 1.02 * width / DPI  # formats differ a little in their widths


def _labels(box: Box, max_tokens: int, decode, ruler: _Ruler):
    """The texts of a box as ``(text, x, y)``.

    Length and locks stand inside. The tokens stand above them, as many as fit; a leaf
    has the rest of its row to itself, so its tokens stand beside it.
    """
    edge = box.item
    if not isinstance(edge, Edge):
        return [(namespace_label(edge), box.x + _PAD, box.y)]
    tail = _DIAMOND if edge.has_snapshot else 0.0
    room = box.width - 2 * _PAD - tail
    y = box.y - (_STRIP / 2 if "SWA" in edge.pages else 0)
    count = f"{len(edge.tokens)} tok"
    lock = f" · lock {lock_label(edge)}" if edge.is_locked else ""
    fits = ruler(count + lock) <= room
    inside, beside = (count + lock, "") if fits else (count, lock)
    names = (preview(edge.tokens, n, decode) for n in range(max_tokens, 0, -1))
    if not box.children:
        beside = next(names, "") + beside
        return [(inside, box.x + _PAD, y), (beside, box.right + _PAD + tail, y)]
    name = next((name for name in names if ruler(name) <= room), "")
    half = _LEADING / 2 if name else 0.0
    return [(name, box.x + _PAD, y - half), (inside, box.x + _PAD, y + half)]


def _text(axes, x, y, text, **kwargs):
    # Dollar signs in decoded text are no formulas.
    axes.text(x, y, text, parse_math=False, **kwargs)


def _header(axes, title: str, small: list[str], top: float) -> None:
    y = top + 0.5 * _LINE
    _text(axes, 0, y, title, size=12, weight="bold", color=INK, va="center")
    for i, line in enumerate(small):
        y = top + (1.9 + i) * _LINE
        _text(axes, 0, y, line, va="center", **_SMALL)


def _link(axes, box: Box) -> None:
    """A curve from the parent's right edge to the box's left edge."""
    if box.parent is None:
        return
    x0, y0, x1, y1 = box.parent.right, box.parent.y, box.x, box.y
    middle = (x0 + x1) / 2
    points = [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]
    codes = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    is_locked = isinstance(box.item, Edge) and box.item.is_locked
    colour, width = (LOCKED_EDGE, 1.6) if is_locked else (LINK, 1.0)
    curve = Path(points, codes)
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=colour, linewidth=width))


def _box(axes, box: Box) -> None:
    corner = min(0.08, box.width / 4)
    style = f"round,pad=0,rounding_size={corner}"
    face, edge_colour, width = ROOT_FACE, ROOT_EDGE, 1.0
    edge = box.item
    if isinstance(edge, Edge):
        face, edge_colour, width = FREE_FACE, FREE_EDGE, 1.0
        if edge.is_locked:
            face, edge_colour, width = LOCKED_FACE, LOCKED_EDGE, 1.8
    where = (box.x, box.top), box.width, box.height
    fill = FancyBboxPatch(*where, boxstyle=style, facecolor=face, linewidth=0, zorder=2)
    axes.add_patch(fill)
    if isinstance(edge, Edge) and "SWA" in edge.pages:
        _swa_strip(axes, box, edge.pages["SWA"], fill)
    outline = {"edgecolor": edge_colour, "linewidth": width, "zorder": 4}
    axes.add_patch(FancyBboxPatch(*where, boxstyle=style, fill=False, **outline))
    if isinstance(edge, Edge) and edge.has_snapshot:
        axes.add_line(_diamond([box.right], [box.y]))


def _diamond(x, y, **kwargs) -> Line2D:
    look: dict[str, Any] = {
        "marker": "D",
        "markersize": 6.5,
        "markeredgecolor": "white",
        "zorder": 5,
    }
    return Line2D(x, y, linestyle="none", color=SNAPSHOT, **look, **kwargs)


def _swa_strip(axes, box: Box, pages, clip) -> None:
    """Live SWA pages and tombstones, in proportion, along the foot of a box."""
    each = box.width / len(pages)
    bottom = box.top + box.height - _STRIP
    x = box.x
    for is_live, run in itertools.groupby(pages, lambda page: page is not None):
        width = each * len(list(run))
        strip = Rectangle((x, bottom), width, _STRIP, zorder=3, **_strip_look(is_live))
        axes.add_patch(strip)
        strip.set_clip_path(clip)
        x += width


def _strip_look(is_live: bool) -> dict[str, Any]:
    if is_live:
        return {"facecolor": SWA, "edgecolor": SWA, "linewidth": 0}
    look = {"facecolor": "white", "edgecolor": "#888888", "hatch": "//////"}
    return {**look, "linewidth": 0}


def _legend(axes, c: HostCache, y: float) -> None:
    names = {k.name for k in c.config.components}
    free: dict[str, Any] = {"facecolor": FREE_FACE, "edgecolor": FREE_EDGE}
    locked: dict[str, Any] = {
        "facecolor": LOCKED_FACE,
        "edgecolor": LOCKED_EDGE,
        "linewidth": 1.8,
    }
    handles: list = [
        Patch(**free, label="free to evict"),
        Patch(**locked, label="locked"),
    ]
    if "SWA" in names:
        handles.append(Patch(**_strip_look(True), label="SWA page"))
        handles.append(Patch(**_strip_look(False), label="SWA tombstone"))
    if "RECURRENT" in names:
        handles.append(_diamond([], [], label="snapshot"))
    axes.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0, y),
        bbox_transform=axes.transData,
        ncols=len(handles),
        frameon=False,
        fontsize=_SMALL["size"] + 0.5,
        borderpad=0,
        borderaxespad=0,
        handletextpad=0.6,
        columnspacing=1.8,
    )
