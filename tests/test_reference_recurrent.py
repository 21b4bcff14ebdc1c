"""What sglang-jax's unified tree tests ask of RECURRENT, with their numbers.

There snapshots sit on leaves alone; here on any node, so that some rows answer
otherwise, and the test says how. Tests keep the names of the reference's. Elsewhere:

- `copy_slots_bitwise_clone_all_layers`, `_multi_dp_locality`: `test_pools.py`,
  `test_kernels.py`.
- what a request keeps, offers, secures and frees with the extra buffer (`prepare_…`,
  `finished_…`, `unfinished_…`, `single_slot_…`): `test_tracking.py` and
  `test_pools_requests.py`. Here is what the tree makes of such an offer.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness_hybrid import FULL, RECURRENT, HybridHarness

import uhrc_fn
from uhrc_fn import CacheConfig, Status

ONE_TOKEN = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=1,
    num_pages=64,
    num_recurrent_slots=8,
    max_prefix_pages=16,
)
EXTRA = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=128,
    num_pages=24,
    num_recurrent_slots=12,
    max_prefix_pages=9,
    enable_recurrent_extra_buffer=True,
    recurrent_track_interval=128,
)


def commit(cache: HybridHarness, tokens, *, length: int | None = None, has_slot=True):
    """Finish a request that computed all of it anew: its slot goes to the tree.

    Returns:
      The result and the slot that was offered; pages and slot left over are freed.
    """
    pages = cache.take(FULL, len(tokens) // cache.config.page_size)
    slots = cache.take(RECURRENT, 1) if has_slot else [0]
    result = cache.insert(tokens, pages, slot=slots[0], slot_length=length)
    cache.free_of(FULL, [i for i in pages if i in cache.owned[FULL]])
    cache.free_of(RECURRENT, [i for i in slots if i in cache.owned[RECURRENT]])
    return result, slots[0]


def slots(cache: HybridHarness) -> tuple[int, int, int]:
    """Slots that are free, evictable and locked; `check` has counted them."""
    free = cache.num_free(RECURRENT)
    return free, cache.num_evictable(RECURRENT), cache.num_protected(RECURRENT)


def blocks(*names: int) -> list[int]:
    """A prompt of pages of 128 tokens."""
    return [128 * name + i for name in names for i in range(128)]


def test_supports_recurrent():
    assert ONE_TOKEN.has_recurrent
    assert not CacheConfig(num_pages=8).has_recurrent


def test_commit_match_cow_evict_ledger():
    cache = HybridHarness(ONE_TOKEN)
    result, slot = commit(cache, [1, 2, 3, 4])
    assert result.recurrent_committed and not result.recurrent_exist
    assert result.adopted()[:, RECURRENT].tolist() == [False] * 3 + [True] + 12 * [
        False
    ]
    assert slots(cache) == (7, 1, 0)
    match = cache.match([1, 2, 3, 4])
    assert match.hit_length == 4
    assert match.cow_src_slot == slot
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    assert slots(cache) == (8, 0, 0)


def test_match_reaches_snapshot_past_snapshotless_interior_node():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4], has_slot=False)
    _, slot = commit(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    match = cache.match([1, 2, 3, 4, 5, 6, 7, 8])
    assert match.hit_length == 8
    assert match.cow_src_slot == slot
    assert match.lost_tokens.tolist() == [0, 0, 0]


def test_abort_and_retract_release_recurrent_slots():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4])
    aborted, retracted = cache.take(RECURRENT, 2)
    assert slots(cache) == (5, 1, 0)
    # The duplicate finishes: the tree has a snapshot there, the slot stays its own.
    pages = cache.take(FULL, 4)
    result = cache.insert([1, 2, 3, 4], pages, slot=aborted)
    assert result.recurrent_exist and not result.recurrent_committed
    assert result.duplicate()[:4, RECURRENT].tolist() == [False] * 3 + [True]
    cache.free_of(FULL, pages)
    cache.free_of(RECURRENT, [aborted])
    assert slots(cache) == (6, 1, 0)
    cache.free_of(RECURRENT, [retracted])
    assert slots(cache) == (7, 1, 0)
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    assert slots(cache) == (8, 0, 0)


def test_continuation_match_hits_committed_leaf():
    cache = HybridHarness(ONE_TOKEN)
    _, slot = commit(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    match = cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert match.hit_length == 8
    assert match.cow_src_slot == slot


def test_page1_running_recurrent_chunked_continuation_full_only_preserves_prefix():
    cache = HybridHarness(ONE_TOKEN)
    (running,) = cache.take(RECURRENT, 1)
    first, both = list(range(1, 9)), list(range(1, 13))
    pages = cache.take(FULL, 8)
    cache.insert(first, pages)
    assert slots(cache) == (7, 0, 0)
    match = cache.match(first, full_only=True)
    assert match.hit_length == 8
    assert match.device_indices[:8].tolist() == pages
    assert match.cow_src_slot == 0
    receipt = cache.lock(match)
    fresh = cache.match(first)  # as a new request would ask
    assert (fresh.hit_length, fresh.full_kv_hit_length) == (0, 8)
    assert fresh.cow_src_slot == 0
    more = cache.take(FULL, 4)
    result = cache.insert(both, [*pages, *more], 8)
    assert result.inserted_len == 12
    assert not result.duplicate().any()
    longer = cache.match(both, full_only=True)
    assert longer.hit_length == 12
    renewed = cache.lock(longer)
    cache.unlock(receipt)
    assert cache.num_protected(FULL) == 12
    assert cache.owned[RECURRENT] == {running}
    assert slots(cache) == (7, 0, 0)
    cache.unlock(renewed)


def test_shorter_match_misses_recurrent_leaf():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    match = cache.match([1, 2, 3, 4, 5, 6, 7])
    assert match.hit_length == 0
    assert match.best_match_node == 0
    assert match.cow_src_slot == 0
    # What the reference does not say: how much was there, and where a snapshot helps.
    assert match.full_kv_hit_length == 7
    assert match.recurrent_branching_seqlen == 7
    assert match.lost_tokens.tolist() == [0, 0, 7]


def test_hicache_tombstone_blocks_recurrent_match():
    # There is no host tier; FULL without its snapshot is no hit either.
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4])
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    match = cache.match([1, 2, 3, 4])
    assert (match.hit_length, match.full_kv_hit_length) == (0, 4)
    assert match.host_hit_length == match.recurrent_host_hit_length == 0
    assert match.recurrent_branching_seqlen == 4


def test_shorter_prefix_after_longer_skips_internal():
    # The reference refuses it and the caller frees; here internal nodes hold snapshots.
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4])
    result, slot = commit(cache, [1, 2])
    assert result.recurrent_committed
    assert slots(cache) == (6, 2, 0)
    assert cache.match([1, 2, 90]).cow_src_slot == slot
    assert cache.hit([1, 2, 3, 4]) == 4


def test_lock_protects_recurrent_leaf():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [7, 8, 9, 10])
    receipt = cache.lock(cache.match([7, 8, 9, 10]))
    assert slots(cache) == (7, 0, 1)
    assert cache.evict_all_of(recurrent=1) == (0, 0, 0)
    cache.unlock(receipt)
    assert slots(cache) == (7, 1, 0)
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    assert slots(cache) == (8, 0, 0)


def test_longer_prefix_after_shorter_frees_parent():
    # The reference frees the parent's slot at once; here it stays, and goes first.
    cache = HybridHarness(ONE_TOKEN)
    _, other = commit(cache, [5, 6])
    _, short = commit(cache, [1, 2])
    _, long = commit(cache, [1, 2, 3, 4])
    assert slots(cache) == (5, 3, 0)
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    assert cache.in_tree(RECURRENT) == {other, long}
    assert cache.hit([1, 2]) == 0
    assert cache.hit([1, 2, 3, 4]) == 4
    assert cache.ring(RECURRENT)[-1] == short


def test_internal_transition_while_locked_frees_on_unlock():
    # The reference frees on the last unlock; here it is evictable again.
    cache = HybridHarness(ONE_TOKEN)
    _, short = commit(cache, [1, 2])
    receipt = cache.lock(cache.match([1, 2]))
    assert slots(cache) == (7, 0, 1)
    commit(cache, [1, 2, 3, 4])
    assert slots(cache) == (6, 1, 1)
    assert cache.evict_all_of(recurrent=8) == (0, 0, 1)
    assert cache.in_tree(RECURRENT) == {short}
    cache.unlock(receipt)
    assert slots(cache) == (7, 1, 0)
    assert cache.evict_all_of(recurrent=1) == (0, 0, 1)
    assert slots(cache) == (8, 0, 0)


# Where the reference goes wrong; the numbers are those of its reproductions.


def test_a_snapshot_of_another_length_than_the_key_is_refused():
    cache = HybridHarness(EXTRA)
    pages = cache.take(FULL, 2)
    (slot,) = cache.take(RECURRENT, 1)
    result = cache.insert(blocks(1, 2), pages, slot=slot, slot_length=128)
    assert not result.recurrent_committed and not result.recurrent_exist
    # A tail of 127: the state is 127 tokens ahead of the last whole page.
    result = cache.insert(blocks(1, 2, 3)[:-1], [*pages, 0], 256, slot=slot)
    assert result.inserted_len == 256 and not result.recurrent_committed
    assert cache.owned[RECURRENT] == {slot}
    assert cache.hit(blocks(1, 2)) == 0


def test_siblings_share_a_boundary_snapshot_once_one_of_them_goes_on():
    cache = HybridHarness(ONE_TOKEN)
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    _, slot = commit(cache, prefix)
    commit(cache, [*prefix, 20, 21, 22])
    match = cache.match([*prefix, 30, 31])
    assert match.hit_length == 8
    assert match.cow_src_slot == slot
    result, _ = commit(cache, [*prefix, 30, 31])
    assert result.recurrent_committed
    assert cache.hit([*prefix, 40]) == 8


def test_an_identical_prompt_hits_from_its_second_resend_on():
    # A match asks for all but one token, which is left to compute.
    cache = HybridHarness(ONE_TOKEN)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    commit(cache, prompt)
    match = cache.match(prompt[:-1])
    assert match.hit_length == 0
    assert match.recurrent_branching_seqlen == 7
    # So its prefill is cut there, and publishes that boundary.
    commit(cache, prompt[:7])
    match = cache.match(prompt[:-1])
    assert match.hit_length == 7
    assert match.recurrent_branching_seqlen == 0


def test_what_is_counted_evictable_can_be_evicted_under_a_full_lock():
    cache = HybridHarness(ONE_TOKEN)
    commit(cache, [1, 2, 3, 4], has_slot=False)
    receipt = cache.lock(cache.match([1, 2, 3, 4], full_only=True))
    commit(cache, [1, 2, 3, 4])
    assert slots(cache) == (7, 1, 0)
    assert cache.num_protected(FULL) == 4
    assert cache.evict_all_of(full=4, recurrent=1) == (0, 0, 1)
    assert slots(cache) == (8, 0, 0)
    cache.unlock(receipt)


# With the extra buffer, pages and interval of 128.


def test_finished_commit_leaves_one_slot_to_the_tree():
    cache = HybridHarness(EXTRA)
    running, keep, other = cache.take(RECURRENT, 3)
    pages = cache.take(FULL, 2)
    result = cache.insert(blocks(1, 2), pages, slot=keep)
    assert result.recurrent_committed
    assert cache.in_tree(RECURRENT) == {keep}
    cache.free_of(RECURRENT, [running, other])
    assert slots(cache) == (11, 1, 0)


def test_finished_not_committed_frees_running_and_both_track():
    cache = HybridHarness(EXTRA)
    _, seed = commit(cache, blocks(1, 2))
    three = cache.take(RECURRENT, 3)
    pages = cache.take(FULL, 2)
    result = cache.insert(blocks(1, 2), pages, slot=three[1])
    assert result.recurrent_exist and not result.recurrent_committed
    cache.free_of(RECURRENT, three)
    cache.free_of(FULL, pages)
    assert slots(cache) == (11, 1, 0)
    assert cache.in_tree(RECURRENT) == {seed}


@pytest.mark.parametrize(("seeds", "evicted"), [(4, 1), (1, 0)], ids=["8", "11"])
def test_alloc_req_slots_evicts_exactly_the_shortfall(seeds, evicted):
    # Three requests of three slots each, against 8 and 11 free ones.
    cache = HybridHarness(EXTRA)
    for seed in range(seeds):
        commit(cache, blocks(seed))
    assert slots(cache) == (12 - seeds, seeds, 0)
    result = cache.alloc_request(3, 0, 9)
    assert result.slots.count == 9 and result.pages.count == 3
    assert len(cache.in_tree(RECURRENT)) == seeds - evicted
    assert cache.num_evictable(FULL) == seeds  # no page went along
    # The oldest one went.
    assert [cache.hit(blocks(seed)) > 0 for seed in range(seeds)] == [
        seed >= evicted for seed in range(seeds)
    ]


def test_alloc_req_slots_evicts_on_the_right_rank_only():
    key = uhrc_fn.radix_key(blocks(1), EXTRA, num_pages=1)

    @jax.jit
    def seeded(cache):
        cache, pages = uhrc_fn.alloc_pages(cache, 1)
        cache, slots = uhrc_fn.alloc_slots(cache, 1)
        params = uhrc_fn.InsertParams(
            key=key,
            value=pages.ids,
            recurrent_value=slots.ids[0],
            recurrent_length=np.int32(128),
        )
        return uhrc_fn.insert(cache, params)[0]

    alloc = jax.jit(
        jax.vmap(lambda cache, n: uhrc_fn.alloc_slots(cache, n, max_new=12))
    )
    cache = seeded(uhrc_fn.init(EXTRA))
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    caches, result = alloc(caches, np.array([12, 9], np.int32))
    assert result.count.tolist() == [12, 9]
    assert caches.evictable[:, int(RECURRENT)].tolist() == [0, 1]
    assert caches.num_free[:, int(RECURRENT)].tolist() == [0, 2]
    uhrc_fn.check_invariants(caches)


def test_alloc_req_slots_recurrent_oom_reports_recurrent_pool():
    # The reference raises; here a status bit names the pool, and nothing changes.
    cache = HybridHarness(EXTRA)
    commit(cache, blocks(1))
    receipt = cache.lock(cache.match(blocks(1)))
    cache.take(RECURRENT, 3)
    result = cache.alloc_request(3, 0, 9)
    assert not result.slots.ok and result.pages.count == 0
    assert cache.take_status() == Status.SLOTS_EXHAUSTED
    assert slots(cache) == (8, 0, 1)
    assert cache.num_free(FULL) == 23
    cache.unlock(receipt)
    assert cache.alloc_request(3, 0, 9).slots.ok
