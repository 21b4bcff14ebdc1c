"""Linear-recurrent layers: a boundary needs a snapshot of the state at its end."""

from ..config import ComponentType
from ..tree_arrays import NULL
from .base import Component


class RecurrentComponent(Component):
    """RECURRENT: one slot of the state pool at some nodes, leaves or internal ones."""

    type = ComponentType.RECURRENT
    eviction_priority = 0
    removes_node = False
    has_tombstones = True
    entry_is_page = False

    def accepts(self, value):
        """That node holds a snapshot."""
        return value != NULL

    def refreshes(self, page, hit_pages, value):
        """The hit node alone."""
        return (page == hit_pages - 1) & (value != NULL)

    def locks(self, page, num_pages):
        """The anchor, even if it holds no snapshot yet."""
        return page == num_pages - 1

    def grid(self) -> int:
        """Tokens between snapshots."""
        return self.config.recurrent_grid

    def adopts(self, page, value, offered, is_new, evicted_seqlen):
        """Any node, new or old, that holds no snapshot."""
        del page, is_new, evicted_seqlen
        return (value == NULL) & (offered != 0)

    def stamps_insert(self, page, cut, taken, value, stamp):
        """The committed snapshot, or the one that stood there."""
        del cut, value
        return taken, stamp
