"""Look at a cache from the host: invariants, dumps, text and drawings.

Everything here reads the device once and works on NumPy arrays; nothing here belongs
in a jitted step.
"""

from .drawing import draw_tree as draw_tree
from .edges import to_pydict as to_pydict
from .invariants import InvariantError as InvariantError
from .invariants import check_invariants as check_invariants
from .text import tree_string as tree_string
