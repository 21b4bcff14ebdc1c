"""Conservation: whatever requests do, no page, slot, lock or receipt is lost.

After each step of a random machine every pool is counted from the request tables, the
tree and the free lists, every invariant is asked, and every snapshot is compared with
the tokens it stands for. `request_machine.py` says how to run it long.
"""

import pytest
from request_machine import CASES, FULL, RECURRENT, SWA, run

# All component sets, both ways of keeping snapshots, and all page sizes.
_QUICK = [(FULL, 128), (SWA, 4), (RECURRENT, 1), (RECURRENT, 4)]


def _cases():
    for component, size in CASES:
        marks = [] if (component, size) in _QUICK else [pytest.mark.slow]
        name = f"{component.name}-{size}"
        yield pytest.param(component, size, marks=marks, id=name)


@pytest.mark.parametrize(("component", "page_size"), list(_cases()))
def test_nothing_is_lost_whatever_requests_do(component, page_size):
    done = run(component, page_size, steps=600, seed=1)
    # It was no idle run: everything that the machine mixes happened.
    wanted = ["admit hit", "admit missed", "twin hit", "twin missed", "readmit hit"]
    wanted += ["work chunk", "work decode", "work finish", "publish", "finish"]
    wanted += ["abort", "retract", "evict FULL"]
    if component == SWA:
        wanted += ["evict SWA", "slide", "release window", "work starved"]
    if component == RECURRENT:
        wanted += ["evict RECURRENT"]
        wanted += {1: [], 4: ["publish skipped"], 128: ["admit refused"]}[page_size]
    assert not [name for name in wanted if not done[name]], done
