"""`check_invariants`: what must hold of every cache between operations.

An invariant is a function whose name is its name and whose docstring is its sentence;
it yields what it finds wrong. They run in order, and each relies on those before it.
"""

from ..state import CacheState
from . import accounting_invariants, tree_invariants
from .host import HostCache, read

INVARIANTS = (*tree_invariants.INVARIANTS, *accounting_invariants.INVARIANTS)


class InvariantError(AssertionError):
    """A cache is broken: a bug in an operation, or arrays edited by hand."""

    def __init__(self, invariant: str, sentence: str, found: str, rank: int | None):
        where = "" if rank is None else f"rank {rank}: "
        super().__init__(f"{where}{invariant}: {sentence} But {found}.")
        self.invariant = invariant
        self.rank = rank


def check_invariants(cache: CacheState, requests=None) -> None:
    """Raise if anything that must hold of a cache does not; reads the device once.

    For tests and debugging: it looks at every node, page and receipt on the host.

    Args:
      cache: a `CacheState`, or a stack of them (a leading rank axis).
      requests: what requests own, where known: a dict or NamedTuple with `pages`,
        `swa_pages` and `slots`, each an iterable of arrays of ids (0 is padding). For
        a stack, a list of those, one a rank. Without it the owner table is believed.

    Raises:
      InvariantError: the first invariant that does not hold, with the node, page or
        counter, what was found and what was wanted.
      ValueError: an argument is not of its kind.
    """
    hosts = read(cache, requests)
    is_stack = cache.counters.ndim > 1
    for rank, host in enumerate(hosts):
        _check(host, rank if is_stack else None)


def _check(host: HostCache, rank: int | None) -> None:
    for invariant in INVARIANTS:
        for found in invariant(host):
            sentence = (invariant.__doc__ or "").strip()
            raise InvariantError(invariant.__name__, sentence, found, rank)
