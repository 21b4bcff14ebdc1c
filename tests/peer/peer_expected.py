"""The peer's tests that our classes do not pass, and why ours is right.

Each is run, and must fail: one that passes is a line to be taken out.
"""

_LEAF_ONLY = (
    "pins the rule that only leaves hold a snapshot. Ours may sit on any node: else a "
    "prefix that others extend could never be resumed from"
)
_LEAF_SETS = (
    "reaches into the peer's class, `_evict_device_leaf` and its set of leaves. Ours "
    "has no such set: victims are chosen on the device"
)
_HOST_TIER = "sets up a host tier by hand; ours has none, its places are named hooks"
_SPLIT_STAMP = (
    "expects the shared part to be the oldest: the peer's split stamps the half that "
    "nobody asked for as the newest. In ours that half keeps its age and goes first"
)

LEAF_ONLY = {
    "TestUnifiedRadixCacheRecurrent."
    "test_match_reaches_snapshot_past_snapshotless_interior_node": _LEAF_ONLY,
    "TestUnifiedRadixCacheRecurrent."
    "test_shorter_prefix_after_longer_skips_internal": _LEAF_ONLY,
    "TestUnifiedRadixCacheRecurrent."
    "test_longer_prefix_after_shorter_frees_parent": _LEAF_ONLY,
    "TestUnifiedRadixCacheRecurrent."
    "test_internal_transition_while_locked_frees_on_unlock": _LEAF_ONLY,
}

EXPECTED_FAILURES: dict[str, dict[str, str]] = {
    "test_unified_radix_cache": {
        **LEAF_ONLY,
        "TestUnifiedRadixCache."
        "test_evict_device_leaf_tombstones_and_unlinks": _LEAF_SETS,
        "TestUnifiedRadixCacheRecurrent."
        "test_hicache_tombstone_blocks_recurrent_match": _HOST_TIER,
    },
    "test_unified_radix_tree_flag": {},
    "test_radix_cache": {
        "TestRadixCache.test_tree_node_basic": (
            "asks a bare node for a host value and a time. Ours has no host tier, and "
            "a stamp only once it is used"
        ),
    },
    "test_swa_radix_cache": {
        "TestSWARadixCache.test_tombstone_creation": _SPLIT_STAMP,
        "TestSWARadixCache.test_tombstone_prefix_match": _SPLIT_STAMP,
        "TestSWARadixCache.test_tombstone_reset_unconditional": _SPLIT_STAMP,
        "TestSWARadixCache.test_evict_both_pools": _SPLIT_STAMP,
        "TestSWARadixCache.test_swa_evicted_seqlen_page_alignment_assertion": (
            "wants an assertion where a window's edge is inside a page. Ours takes it: "
            "a page that the edge cuts counts as let go"
        ),
    },
}
