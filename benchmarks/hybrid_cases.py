"""Workloads of `ops.py` for the hybrid sets; no host tree runs them.

Every page of the tree has an SWA page, every key a snapshot at its end.
"""

import functools
from collections.abc import Callable

import numpy as np
from cases import Alloc, Bench, Case, Evict, Lock
from ours import cow_clone, values_wanted

import uhrc_fn

HYBRID = ("FULL,SWA", "FULL,RECURRENT")
# What a running request owns: its state and two track slots.
_SLOTS = 3
# A small state, 130 KiB: what copying a real one costs, `copy_slots.py` measures. Slots
# are given out from 1 on, so the rows of those in use are enough.
_STATES = uhrc_fn.RecurrentConfig(
    num_slots=512,
    layers=(0,),
    num_v_heads=2,
    v_head_dim=128,
    conv_kernel_size=4,
)


class EvictValues(Evict):
    """Free `pages` SWA pages, or as many snapshots, of a tree of 10,000 leaves."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.function = functools.partial(uhrc_fn.evict, max_victims=64)
        wanted = values_wanted(self.config, case.pages)
        self.arguments = [(wanted,)] * len(self.arguments)


class AllocRequest(Alloc):
    """Take `pages` pages, and SWA pages or slots with them, while all are free."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        most = dict(
            max_pages=case.pages,
            max_swa_pages=case.pages if self.config.has_swa else 1,
            max_slots=_SLOTS if self.config.has_recurrent else 1,
        )
        self.function = functools.partial(uhrc_fn.alloc_request, **most)
        swa = case.pages if self.config.has_swa else 0
        slots = _SLOTS if self.config.has_recurrent else 0
        counts = tuple(np.int32(n) for n in (case.pages, swa, slots))
        self.arguments = [counts] * len(self.arguments)


class Clone(Lock):
    """Clone the snapshot that a match hit; slots are free, nothing is evicted."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.function = cow_clone
        if len(self.tokens) + len(self.arguments) > _STATES.num_slots:
            raise ValueError(f"{_STATES.num_slots} states are too few for this case")
        states = uhrc_fn.init_recurrent_state_pool(_STATES)
        self.base = (self.base, states)  # type: ignore[misc]


HYBRID_BENCHES: dict[str, Callable[[Case], Bench]] = {
    "evict_swa": EvictValues,
    "evict_slots": EvictValues,
    "alloc_request": AllocRequest,
    "cow_clone": Clone,
}


def hybrid_cases() -> list[Case]:
    """Rows for each hybrid set, and their counterparts that FULL alone lacks."""
    cases = [Case("alloc_request", 128, 64, hosts=False)]
    for components in HYBRID:
        case = functools.partial(
            Case, page_size=128, hosts=False, components=components
        )
        evict = "evict_swa" if components == "FULL,SWA" else "evict_slots"
        cases += [
            case("match", pages=64),
            case("match", pages=64, batch=64),
            case("insert", pages=64, shared=0, fill=0.25),
            case("lock", pages=64),
            case("unlock", pages=64),
            *(case(evict, pages=pages, thin=True) for pages in (1, 64)),
            case("alloc_request", pages=64),
        ]
    return [*cases, case("cow_clone", pages=64)]
