"""Sticky run-time trouble: one bit, one sentence and one remedy each.

Operations OR these bits into ``cache.status`` and change nothing that they cannot
finish. The host decides when to look: `raise_if_bad`.
"""

import enum

import numpy as np


class Status(enum.IntFlag):
    """Bits of ``cache.status``; `OK` is 0."""

    OK = 0
    NODES_EXHAUSTED = 1 << 0
    PAGES_EXHAUSTED = 1 << 1
    SWA_PAGES_EXHAUSTED = 1 << 2
    SLOTS_EXHAUSTED = 1 << 3
    LEDGER_FULL = 1 << 4
    TABLE_FULL = 1 << 5
    STALE_RECEIPT = 1 << 6
    STALE_MATCH = 1 << 7
    STALE_PREFIX = 1 << 8
    DOUBLE_FREE = 1 << 9
    FREED_TREE_PAGE = 1 << 10
    BAD_PAGE = 1 << 11
    NOT_OWNED = 1 << 12
    BAD_LENGTH = 1 << 13
    BAD_TOKEN = 1 << 14
    CLOCK_HIGH = 1 << 15


SENTENCES = {
    Status.NODES_EXHAUSTED: (
        "An insert ran out of tree nodes and kept the longest prefix that fitted.",
        "Raise num_nodes.",
    ),
    Status.PAGES_EXHAUSTED: (
        "An allocation wanted more FULL pages than are free or evictable.",
        "Release locks, admit fewer requests, or raise num_pages.",
    ),
    Status.SWA_PAGES_EXHAUSTED: (
        "An allocation wanted more SWA pages than are free or evictable.",
        "Release windows earlier, or raise num_swa_pages.",
    ),
    Status.SLOTS_EXHAUSTED: (
        "An allocation wanted more recurrent slots than are free or evictable.",
        "Admit fewer requests, or raise num_recurrent_slots.",
    ),
    Status.LEDGER_FULL: (
        "A lock found no free row in the receipt ledger and took nothing.",
        "Release receipts, or raise max_live_receipts.",
    ),
    Status.TABLE_FULL: (
        "An insert was cut because a page could not be indexed in its bucket.",
        "If it happens more than rarely, keys collide on purpose: set a secret "
        "hash_seed.",
    ),
    Status.STALE_RECEIPT: (
        "An unlock named a receipt that is not live and was refused.",
        "Release each receipt once, and keep the newest that release_window gave.",
    ),
    Status.STALE_MATCH: (
        "A lock named a match whose nodes have since been evicted and was refused.",
        "Match and lock in one step, before anything allocates.",
    ),
    Status.STALE_PREFIX: (
        "An insert counted on a prefix that the tree no longer holds; nothing went in.",
        "Hold a lock on the prefix from match to insert.",
    ),
    Status.DOUBLE_FREE: (
        "A page or slot that was already free was freed again and left alone.",
        "Free each page once; pages an insert adopted are the tree's.",
    ),
    Status.FREED_TREE_PAGE: (
        "A page or slot of the tree was freed from outside and left alone.",
        "Free only what the request owns: duplicates and what insert did not adopt.",
    ),
    Status.BAD_PAGE: (
        "A page or slot id outside its pool was freed and left alone.",
        "Ids run from 1 to the pool's capacity; 0 is padding.",
    ),
    Status.NOT_OWNED: (
        "An insert was cut at an entry that no request owns, or that came twice.",
        "Pass page ids from alloc_pages, each once.",
    ),
    Status.BAD_LENGTH: (
        "A length was negative or longer than its array and was clipped.",
        "Build keys with radix_key, and keep counts within their static bounds.",
    ),
    Status.BAD_TOKEN: (
        "A key held a token id outside [0, 2^31) and ended before its page.",
        "Check the tokenizer's output; negative ids are never valid.",
    ),
    Status.CLOCK_HIGH: (
        "The recency clock passed 2^30.",
        "Call compact_clock between steps.",
    ),
}


def describe(status) -> list[str]:
    """List the bits of `status` as ``NAME: what happened. What to do.``"""
    bits = int(np.bitwise_or.reduce(np.ravel(np.asarray(status)), initial=0))
    return [
        f"{bit.name}: {what} {remedy}"
        for bit, (what, remedy) in SENTENCES.items()
        if bits & bit
    ]


def raise_if_bad(cache) -> None:
    """Raise if any sticky status bit of `cache` is set; reads the device once.

    Args:
      cache: a `CacheState`, or a stack of them (a leading rank axis).

    Raises:
      RuntimeError: names each set bit with what happened and its remedy.
    """
    lines = describe(cache.status)
    if lines:
        raise RuntimeError("The cache met trouble.\n  " + "\n  ".join(lines))
