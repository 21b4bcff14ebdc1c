"""Faults in who owns what: locks, slots freed twice or lost, keys that meet."""

from faults import Fault

_PAGES = "test_scenarios.py"
_LOCKS = "test_scenarios_locks.py"
_OWNERSHIP = "test_scenarios_ownership.py"

FAULTS: list[Fault] = [
    # Locks and reference counts.
    Fault(
        "B02 a page that is locked already is not counted again",
        "ops/lock.py",
        "& has[:, None] & (path != NULL)",
        "& has[:, None] & (path != NULL) & ((before == 0) | (step < 0))",
        f"{_LOCKS}::test_B02_branches_inside_a_locked_window_leave_no_count",
    ),
    Fault(
        "B03 a lock skips tombstones",
        "ops/lock.py",
        "& has[:, None] & (path != NULL)",
        "& has[:, None] & (path != NULL) & (value != NULL)",
        f"{_LOCKS}::test_B03_a_window_recovered_under_a_lock_belongs_to_both_holders",
    ),
    Fault(
        "B04 a lock begins at the parent of its node",
        "components/full.py",
        "return page < num_pages",
        "return page < num_pages - 1",
        f"{_PAGES}::test_B04_a_lock_holds_the_node_it_was_taken_on",
    ),
    Fault(
        "B05 what hangs below a locked page is pinned with it",
        "ops/victims.py",
        "candidate = (lock == 0) &",
        "candidate = (lock + lock[jnp.maximum(row_of(fields, PARENT), 0)] == 0) &",
        f"{_PAGES}::test_B05_a_lock_pins_what_matched_and_no_more",
    ),
    Fault(
        "B06 an unlock does not ask the ledger",
        "ops/lock.py",
        "live = asked & (record[SERIAL] == receipt.serial)",
        "live = asked",
        f"{_PAGES}::test_B06_evictable_and_protected_survive_an_extra_unlock",
    ),
    Fault(
        "B07 an early release keeps the lock of RECURRENT",
        "ops/lock.py",
        "keep = 1 << ComponentType.FULL",
        "keep = ~(1 << ComponentType.SWA)",
        f"{_LOCKS}::test_B07_eviction_takes_what_an_early_release_gave_and_no_more",
    ),
    Fault(
        "B07 an early release gives the lock of FULL back too",
        "ops/lock.py",
        "keep = 1 << ComponentType.FULL",
        "keep = 0",
        f"{_LOCKS}::test_B07_eviction_takes_what_an_early_release_gave_and_no_more",
    ),
    Fault(
        "B08 an abort forgets the slots of a request",
        "ops/request.py",
        "cache = free_slots(cache, jnp.where(row > 0, slots, 0))",
        "cache = free_slots(cache, jnp.where(row > 0, 0, slots))",
        f"{_LOCKS}::test_B08_the_slot_of_a_clone_comes_back_when_admission_fails",
    ),
    Fault(
        "B09 a lock goes by node without asking for the generation",
        "ops/lock.py",
        "fresh = is_alive & (reads.anchor[GENERATION] == generation) & asked",
        "fresh = is_alive & asked",
        f"{_PAGES}::test_B09_a_receipt_does_not_outlive_its_node",
    ),
    Fault(
        "B10 a lock holds the younger pages of a run only",
        "components/full.py",
        "return page < num_pages",
        "return (page < num_pages) & (page >= num_pages - 5)",
        f"{_PAGES}::test_B10_a_branch_inside_a_copy_source_keeps_both_halves",
    ),
    # Slots freed twice or lost.
    Fault(
        "B11 an evicted value stays on its node",
        "ops/remove.py",
        "for name in (rules.value_field, rules.stamp_field):",
        "for name in (rules.stamp_field,):",
        f"{_OWNERSHIP}::test_B11_a_recovered_tombstone_takes_the_new_page_and_frees_none",
    ),
    Fault(
        "B13 the id that stands for none is freed like any other",
        "ops/remove.py",
        "value, value != NULL",
        "jnp.maximum(value, 0), value >= NULL",
        f"{_OWNERSHIP}::test_B13_eviction_frees_only_what_nodes_hold",
    ),
    Fault(
        "B15 a key counts by the pages that come with it",
        "ops/insert.py",
        "jnp.minimum(pages.num_pages[:, None], reads.tree[:, 1:])",
        "jnp.minimum(jnp.sum(value > 0), reads.tree[:, 1:])",
        f"{_PAGES}::test_B15_draft_pages_past_the_committed_length_come_back",
    ),
    Fault(
        "B15 a request publishes by the tokens that are known",
        "ops/request.py",
        "jnp.minimum(requests.length[row], jnp.asarray(key.length, jnp.int32))",
        "jnp.asarray(key.length, jnp.int32)",
        f"{_OWNERSHIP}::test_B15_pages_reserved_past_the_written_length_are_neither_"
        "published_nor_lost",
    ),
    Fault(
        "B16 an insert forgets up to where pages were let go",
        "components/swa.py",
        "& (offered != 0) & whole",
        "& (offered != 0)",
        f"{_OWNERSHIP}::test_B16_pages_before_the_window_are_not_taken_as_live",
    ),
    Fault(
        "B17 SWA keeps out a page that it has no page for",
        "ops/insert.py",
        "fails = is_new & ~(has_way & theirs & has_node)",
        "fails = is_new & ~(has_way & theirs & has_node & (page * config.page_size"
        " >= params.swa_evicted_seqlen[:, None]))",
        f"{_OWNERSHIP}::test_B17_pages_wholly_out_of_the_window_go_in_without_swa",
    ),
    Fault(
        "B18 an SWA page that was offered is the tree's, taken or not",
        "ops/adopt.py",
        "entry=jnp.where(taken,",
        "entry=jnp.where(offered > 0,",
        f"{_OWNERSHIP}::test_B18_what_a_request_let_go_of_stays_out_and_the_rest_stays_"
        "its_own",
    ),
    Fault(
        "B18 the frontier keeps no window before the published length",
        "pools/sliding.py",
        "jnp.maximum(pages - kept, 0)",
        "jnp.maximum(pages - extra_pages, 0)",
        f"{_OWNERSHIP}::test_B18_pages_may_go_by_the_length_that_is_published",
    ),
    Fault(
        "B18 a key is not cut to its snapshot",
        "ops/request.py",
        "return donation, donation.length",
        "return donation, written",
        f"{_OWNERSHIP}::test_B18_a_publication_cut_to_its_snapshot_is_served_to_its_end",
    ),
    Fault(
        "B20 the table keeps the caller's duplicates",
        "ops/insert.py",
        "page_table=jnp.where(in_tree, ours, value)",
        "page_table=value",
        f"{_PAGES}::test_B20_duplicates_are_replaced_before_they_are_freed",
    ),
    Fault(
        "B21 the tree's part of a table is all that is written",
        "ops/request.py",
        "jnp.maximum(requests.protected_length[row], result.inserted_len)",
        "-(-requests.length[row] // config.page_size) * config.page_size",
        f"{_OWNERSHIP}::test_B21_the_tail_of_unaligned_chunks_is_freed_once",
    ),
    Fault(
        "B22 what is written falls back to what is published",
        "ops/request.py",
        "requests.set_lengths(rows, requests.length[row], protected)",
        "requests.set_lengths(rows, result.inserted_len, protected)",
        f"{_OWNERSHIP}::test_B22_a_request_that_is_not_to_be_cached_still_goes_on",
    ),
    Fault(
        "B24 a key shorter than what is shared is a lost prefix",
        "ops/insert.py",
        "is_stale = old < jnp.minimum(prev_pages, num_pages)",
        "is_stale = old < prev_pages",
        f"{_OWNERSHIP}::test_B24_publishing_twice_changes_nothing_and_moves_the_lock_"
        "once",
    ),
    Fault(
        "B24 a lock moves and the old one stays",
        "ops/request.py",
        "evicts here.\n    cache, _ = dec_lock_ref(cache, receipt)",
        "evicts here.",
        f"{_OWNERSHIP}::test_B24_publishing_twice_changes_nothing_and_moves_the_lock_"
        "once",
    ),
    Fault(
        "B25 the sweep at the end frees all of a row",
        "ops/request.py",
        "own = jnp.where(row > 0, owned.swa_pages[row], 0)",
        "own = jnp.where(row > 0, requests.swa_pages[row], 0)",
        f"{_OWNERSHIP}::test_B25_a_prefill_longer_than_the_pool_slides_and_is_swept_"
        "once",
    ),
    Fault(
        "B25 a prefill never slides",
        "pools/sliding.py",
        "return room < ",
        "return room < 0 * ",
        f"{_OWNERSHIP}::test_B25_a_prefill_longer_than_the_pool_slides_and_is_swept_"
        "once",
    ),
    Fault(
        "B26 a key below a page is padded to one",
        "ops/path.py",
        "num_pages = jnp.clip(length, 0, most) // size",
        "num_pages = -(-jnp.clip(length, 0, most) // size)",
        f"{_PAGES}::test_B26_a_key_below_a_page_leaves_no_trace",
    ),
    Fault(
        "B27 an insert makes a node at least",
        "ops/insert.py",
        "old = jnp.minimum(reads.tree[:, :1], num_pages)",
        "num_pages = jnp.maximum(num_pages, 1); old = reads.tree[:, :1]",
        f"{_PAGES}::test_B27_a_query_one_token_short_of_the_page_makes_no_node",
    ),
    Fault(
        "B28 a page is told by all but its last token",
        "ops/path.py",
        "tokens = tokens.reshape(tokens.shape[0], -1, size)",
        "tokens = tokens.reshape(tokens.shape[0], -1, size).at[..., -1].set(0)",
        f"{_PAGES}::test_B28_keys_that_part_inside_a_page_are_sibling_pages",
    ),
    # What does not end with an ownership: probes, order, namespaces, residue.
    Fault(
        "B33 a probe leaves the last token out",
        "ops/match.py",
        "return _find(cache, key, False)[0]",
        "key = dataclasses.replace(key, length=key.length - 1)\n"
        "    return _find(cache, key, False)[0]",
        f"{_PAGES}::test_B33_a_probe_changes_no_bit",
    ),
    Fault(
        "B45 recency follows the ids of pages",
        "ops/insert.py",
        "(full.stamp_field, page < cut, full.stamps(clock, length))",
        "(full.stamp_field, page < cut, full.stamps(clock, length) - value)",
        f"{_PAGES}::test_B45_victims_do_not_depend_on_when_pages_are_freed",
    ),
    Fault(
        "B59 parts of a namespace are joined without their lengths",
        "keys.py",
        "return kind + struct",
        "return body or kind + struct",
        f"{_PAGES}::test_B59_namespaces_never_meet",
    ),
    Fault(
        "B61 a victim's entry in the children table stays",
        "ops/remove.py",
        "table = free_entries(tree.table, held[TABLE_SLOT_ROW])",
        "table = tree.table",
        f"{_PAGES}::test_B61_B62_unique_suffixes_leave_no_residue",
    ),
]
