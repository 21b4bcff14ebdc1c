"""Where each box of a drawn tree goes; plain geometry in inches, y downwards.

Every leaf has a row of its own and a parent sits midway between its first and last
child, left of them: so no two boxes can overlap.
"""

import dataclasses

from .edges import Edge, Namespace

ROOT_WIDTH = 1.5
MIN_WIDTH, MAX_WIDTH = 1.05, 2.8
GAP = 0.42
MAX_PATH_WIDTH = 11.0
_ROOMY, _TIGHT = (0.54, 0.4), (0.44, 0.36)  # row and box height
_MANY_LEAVES = 16
_SPACE_BETWEEN_NAMESPACES = 0.18


@dataclasses.dataclass
class Box:
    """A placed edge, or the root of a namespace."""

    item: Edge | Namespace
    x: float
    width: float
    height: float
    y: float = 0.0
    """The middle."""
    parent: "Box | None" = None
    children: list["Box"] = dataclasses.field(default_factory=list)

    @property
    def right(self) -> float:
        """Right edge."""
        return self.x + self.width

    @property
    def top(self) -> float:
        """Upper edge."""
        return self.y - self.height / 2


def place(spaces: list[Namespace]) -> tuple[list[Box], float]:
    """Place all boxes, parents before their children.

    Returns:
      ``(boxes, height)``.
    """
    edges = [e for n in spaces for top in n.children for e in top.walk()]
    num_leaves = sum(not e.children for e in edges)
    row, height = _TIGHT if num_leaves > _MANY_LEAVES else _ROOMY
    scale = _scale(spaces, edges)
    boxes: list[Box] = []
    y = 0.0
    for space in spaces:
        root = Box(space, 0.0, ROOT_WIDTH, height)
        below = _grow(root, scale)
        for box in below:
            if not box.children:
                box.y = y + row / 2
                y += row
        for box in reversed([root, *below]):
            if box.children:
                box.y = (box.children[0].y + box.children[-1].y) / 2
        boxes += [root, *below]
        y += _SPACE_BETWEEN_NAMESPACES
    return boxes, max(y - _SPACE_BETWEEN_NAMESPACES, 0.0)


def _grow(root: Box, scale: float) -> list[Box]:
    """Make the boxes below `root`, depth first from top to bottom."""
    below: list[Box] = []
    stack = [(edge, root) for edge in reversed(root.item.children)]
    while stack:
        edge, parent = stack.pop()
        width = _width(edge, scale)
        box = Box(edge, parent.right + GAP, width, root.height, parent=parent)
        parent.children.append(box)
        below.append(box)
        stack += [(child, box) for child in reversed(edge.children)]
    return below


def _width(edge: Edge, scale: float) -> float:
    return max(MIN_WIDTH, scale * len(edge.tokens))


def _scale(spaces: list[Namespace], edges: list[Edge]) -> float:
    """Inches a token: the largest at which the longest path still fits.

    The longest edge is at most `MAX_WIDTH` wide and the shortest `MIN_WIDTH`, so that
    tiny trees stay small.
    """
    lengths = [len(e.tokens) for e in edges] or [1]
    high = min(MAX_WIDTH / max(lengths), MIN_WIDTH / min(lengths))
    low = 0.0
    if _longest(spaces, high) <= MAX_PATH_WIDTH:
        return high
    for _ in range(30):
        middle = (low + high) / 2
        if _longest(spaces, middle) <= MAX_PATH_WIDTH:
            low = middle
        else:
            high = middle
    return low


def _longest(spaces: list[Namespace], scale: float) -> float:
    longest = 0.0
    stack = [(e, 0.0) for n in spaces for e in n.children]
    while stack:
        edge, before = stack.pop()
        end = before + GAP + _width(edge, scale)
        longest = max(longest, end)
        stack += [(child, end) for child in edge.children]
    return longest
