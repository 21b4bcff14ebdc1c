"""Ways to break the invariants of ownership, locks, counts and recency."""

import dataclasses

from debug_trees import (
    add,
    breaks,
    edit,
    edit_all,
    full_tree,
    recurrent_tree,
    swa_tree,
)

from uhrc_fn.state import ANCHOR, HELD, SERIAL, Counter, Owner, Ring
from uhrc_fn.tree_arrays import NULL


@breaks(full_tree, "FULL value of node 5 has -1, wanted 1 to 8")
def values__tombstone(cache):
    return edit(cache, "tree.value", (0, 5), NULL)


@breaks(full_tree, "SWA value of node 5 has 1, wanted -1")
def values__foreign(cache):
    return edit(cache, "tree.value", (1, 5), 1)


@breaks(swa_tree, "SWA value of node 5 has 4, wanted 1 to 3")
def values__range(cache):
    return edit(cache, "tree.value", (1, 5), 4)


@breaks(full_tree, "FULL page 4 is in the tree 2 times, wanted once")
def tree_entries(cache):
    return edit(cache, "tree.value", (0, 5), 4)


@breaks(swa_tree, "SWA page 1 is in the tree 2 times, wanted once")
def tree_entries__swa(cache):
    return edit(cache, "tree.value", (1, 5), 1)


@breaks(full_tree, "FULL has 1 free + 6 tree + 0 request, wanted 8 in all")
def pool_totals(cache):
    return edit(cache, "owner", 8, Owner.FREE)


@breaks(recurrent_tree, "RECURRENT has 0 free + 1 tree + 0 request, wanted 2 in all")
def pool_totals__leaked_slot(cache):
    return add(cache, Counter.RING_SIZE + Ring.RECURRENT, -1)


@breaks(full_tree, "FULL page 1 has REQUEST, wanted FREE")
def owners(cache):
    return edit_all(cache, ("owner", 1, Owner.REQUEST), ("owner", 8, Owner.FREE))


@breaks(swa_tree, "SWA page 2 has FREE, wanted TREE")
def owners__swa(cache):
    return edit(cache, "owner", 9 + 2, Owner.FREE)


@breaks(full_tree, "FULL lock of node 6 has -1, wanted at least 0")
def lock_signs(cache):
    return edit(cache, "tree.lock_ref", (0, 6), -1)


@breaks(full_tree, "node 4 has 2 locks, its parent 3 1")
def lock_nesting(cache):
    return edit(cache, "tree.lock_ref", (0, 4), 2)


@breaks(swa_tree, "SWA lock of node 5 has 1, wanted at most its FULL lock")
def lock_covers(cache):
    return edit(cache, "tree.lock_ref", (1, 5), 1)


@breaks(recurrent_tree, "RECURRENT lock of node 7 has 1, wanted at most its FULL lock")
def lock_covers__recurrent(cache):
    return edit(cache, "tree.lock_ref", (2, 7), 1)


@breaks(full_tree, "serial of free row 1 has 1, wanted 0")
def ledger__free_row(cache):
    return edit(cache, "ledger", (SERIAL, 1), 1)


@breaks(full_tree, "serial of row 0 has 2, wanted 1 to 1")
def ledger__future(cache):
    return edit(cache, "ledger", (SERIAL, 0), 2)


@breaks(full_tree, "serial 1 is in the ledger 2 times, wanted once")
def ledger__twice(cache):
    ring_end = Counter.RING_HEAD + Ring.LEDGER
    cache = edit(cache, "ledger", (SERIAL, 1), 1)
    cache = add(cache, Counter.RING_SIZE + Ring.LEDGER, -1)
    return add(cache, ring_end, 1)


@breaks(full_tree, "anchor of row 0 has 8, wanted a live node")
def ledger__anchor(cache):
    return edit(cache, "ledger", (ANCHOR, 0), 8)


@breaks(full_tree, "components of row 0 has 3, wanted bits of 1")
def ledger__components(cache):
    return edit(cache, "ledger", (HELD, 0), 3)


@breaks(full_tree, "FULL lock of node 2 has 2, wanted 1")
def receipts__too_many(cache):
    return edit(cache, "tree.lock_ref", (0, 2), 2)


@breaks(full_tree, "FULL lock of node 4 has 0, wanted 1")
def receipts__too_few(cache):
    return edit(cache, "tree.lock_ref", (0, 4), 0)


@breaks(swa_tree, "SWA lock of node 3 has 1, wanted 0")
def receipts__beyond_the_window(cache):
    return edit(cache, "tree.lock_ref", (1, 3), 1)


@breaks(recurrent_tree, "RECURRENT lock of node 4 has 0, wanted 1")
def receipts__anchor(cache):
    return edit(cache, "tree.lock_ref", (2, 4), 0)


@breaks(full_tree, "evictable + protected of FULL has 7, wanted 6")
def tree_sizes(cache):
    return add(cache, Counter.EVICTABLE, 1)


@breaks(full_tree, "evictable of FULL has 4, wanted 3")
def evictable_sizes(cache):
    return add(add(cache, Counter.EVICTABLE, 1), Counter.PROTECTED, -1)


@breaks(swa_tree, "evictable of SWA has 0, wanted 1")
def evictable_sizes__swa(cache):
    return add(add(cache, Counter.EVICTABLE + 1, -1), Counter.PROTECTED + 1, 1)


@breaks(full_tree, "FULL stamp of node 7 has 30, wanted a stamp below the clock 30")
def stamps__future(cache):
    return edit(cache, "tree.last_access", (0, 7), 30)


@breaks(recurrent_tree, "RECURRENT stamp of node 2 has -1, wanted a stamp below")
def stamps__none(cache):
    return edit(cache, "tree.last_access", (2, 2), NULL)


@breaks(full_tree, "FULL stamp 18 is in the tree 2 times, wanted once")
def stamps__tie(cache):
    return edit(cache, "tree.last_access", (0, 7), 18)


@breaks(full_tree, "node 3 has stamp 29, its parent 2 28")
def stamp_order(cache):
    return edit(cache, "tree.last_access", (0, 3), 29)


@breaks(full_tree, "head has 9, wanted 0 to 8")
def victim_plan__head(cache):
    return edit(cache, "counters", Counter.PLAN_HEAD, 9)


@breaks(full_tree, "node 5, stamp 11, is not planned from 2 on")
def victim_plan__skipped(cache):
    return add(cache, Counter.PLAN_HEAD, 1)


@breaks(full_tree, "node 7, stamp 22, is not planned from 1 on")
def victim_plan__stale_stamp(cache):
    return edit(cache, "tree.last_access", (0, 7), 22)


@breaks(full_tree, "the plan has nodes [6, 5, 7], wanted [5, 6, 7]")
def victim_plan__order(cache):
    plan = cache.victim_plan
    swapped = plan.at[:, 1].set(plan[:, 2]).at[:, 2].set(plan[:, 1])
    return dataclasses.replace(cache, victim_plan=swapped)
