"""How an invariant says what it found."""

import numpy as np


def differences(what: str, ids, found, wanted):
    """Yield one sentence on the first of `ids` whose `found` is not `wanted`."""
    ids, found = np.asarray(ids), np.asarray(found)
    wanted = np.broadcast_to(np.asarray(wanted), found.shape)
    bad = np.flatnonzero(found != wanted)
    if bad.size:
        i = bad[0]
        more = f" (and {bad.size - 1} more)" if bad.size > 1 else ""
        yield f"{what} {ids[i]} has {found[i]}, wanted {wanted[i]}{more}"


def offenders(what: str, ids, is_bad, found, wanted: str):
    """Yield one sentence on the first of `ids` that `is_bad`."""
    bad = np.flatnonzero(is_bad)
    if bad.size:
        i = bad[0]
        more = f" (and {bad.size - 1} more)" if bad.size > 1 else ""
        yield f"{what} {np.asarray(ids)[i]} has {np.asarray(found)[i]}, {wanted}{more}"


def repeated(what: str, ids, places: str):
    """Yield one sentence on the first id that occurs twice."""
    values, counts = np.unique(ids, return_counts=True)
    for value, count in zip(values[counts > 1], counts[counts > 1], strict=True):
        yield f"{what} {value} is {places} {count} times, wanted once"
