"""The functional cache against the legacy ones, on the same random requests."""

import functools

import numpy as np
import pytest
from engine_workload import Workload, run

from uhrc_fn import CacheConfig
from uhrc_fn.debug import check_invariants
from uhrc_fn.engine.allocator import PageAllocator, SWAPageAllocator
from uhrc_fn.engine.radix_cache import RadixCache
from uhrc_fn.engine.request import RequestTable
from uhrc_fn.engine.swa_radix_cache import SWARadixCache
from uhrc_fn.engine.unified import UnifiedRadixCache

NUM_PAGES, MAX_PAGES = 96, 16
# ``(SWA pages, pages of a window)``: room for all, what a model would have, and so few
# windows that a prompt takes much of the pool.
ROOMY, TIGHT, FEW = (80, 3), (24, 1), (32, 3)


def table(page_size: int, has_swa: bool) -> RequestTable:
    return RequestTable(4, (MAX_PAGES + 1) * page_size, page_size, has_swa)


def window(page_size: int, pages: int) -> int:
    """Not a whole number of pages, where a page has more than a token."""
    return pages * page_size - page_size // 2


def legacy(page_size: int, dp_size: int, has_swa: bool, swa=ROOMY):
    if not has_swa:
        pool = PageAllocator(NUM_PAGES, page_size, dp_size)
        return RadixCache(table(page_size, False), pool)
    pool = SWAPageAllocator(NUM_PAGES, swa[0], page_size, dp_size)
    requests = table(page_size, True)
    size = window(page_size, swa[1])
    return SWARadixCache(requests, pool, sliding_window_size=size)


def unified(
    page_size: int, dp_size: int, has_swa: bool, swa=ROOMY, recent=False
) -> UnifiedRadixCache:
    size = window(page_size, swa[1])
    windows = {"num_swa_pages": swa[0], "sliding_window_size": size}
    windows["swa_inserts_are_recent"] = recent
    config = CacheConfig(
        components=("FULL", "SWA") if has_swa else ("FULL",),
        page_size=page_size,
        num_pages=NUM_PAGES,
        max_prefix_pages=MAX_PAGES,
        **(windows if has_swa else {}),
    )
    requests = table(page_size, has_swa)
    return UnifiedRadixCache(requests, config, dp_size=dp_size, min_bucket=MAX_PAGES)


def check(cache: UnifiedRadixCache, running) -> None:
    """Account for every page of every rank; then every invariant."""
    size, requests = cache.page_size, cache.requests
    cache.raise_if_bad()
    for rank, state in enumerate(cache.states):
        mine = [r for r in running if r.rank == rank]
        own = {"pages": [], "swa_pages": [], "slots": []}
        for request in mine:
            part = slice(request.cache_protected_len, request.kv_allocated_len, size)
            row = request.req_pool_idx
            own["pages"].append(requests.full[row, part] // size)
            if requests.swa is not None:
                own["swa_pages"].append(requests.swa[row, part] // size)
        check_invariants(state, own)


def without_eviction(cache):
    """Let a cache fail where it evicts anything."""

    def write_back(params):
        raise AssertionError(f"evicts {params}")

    cache.hicache_write_back = write_back
    return cache


CASES = [(1, 4, False), (128, 2, False), (1, 2, True), (128, 4, True)]
IDS = [f"page{p}-ranks{d}-{'full-swa' if s else 'full'}" for p, d, s in CASES]


@pytest.mark.parametrize(
    "page_size, dp_size, has_swa",
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] == 4)) for case in CASES],
    ids=IDS,
)
def test_equal_while_nothing_is_evicted(page_size, dp_size, has_swa):
    load = Workload(3, 6 * dp_size, page_size, MAX_PAGES, dp_size)
    old = run(without_eviction(legacy(page_size, dp_size, has_swa)), load)
    cache = without_eviction(unified(page_size, dp_size, has_swa))
    new = run(cache, load, check=check)
    assert old.short == new.short == 0
    assert old.hits == new.hits
    assert old.accounts == new.accounts
    assert 0.1 < new.hit_ratio < 0.9


@pytest.mark.parametrize(
    "page_size, dp_size, has_swa",
    [pytest.param(*case, marks=[pytest.mark.slow] * case[2]) for case in CASES],
    ids=IDS,
)
def test_hits_no_less_under_eviction(page_size, dp_size, has_swa):
    compare(unified, (page_size, dp_size, has_swa, TIGHT), num_seeds=3)


@pytest.mark.slow
@pytest.mark.parametrize("swa", [FEW, (32, 2), TIGHT])
@pytest.mark.parametrize("page_size", [1, 128])
def test_inserts_that_are_recent_hit_no_less_with_few_windows(page_size, swa):
    make = functools.partial(unified, recent=True)
    # Single seeds differ by a hundredth either way.
    compare(make, (page_size, 2, True, swa), num_seeds=12)


def compare(make, setting, num_seeds: int) -> None:
    """Hit ratios of a cache and of the legacy one, the mean of some seeds."""
    page_size, dp_size, *_ = setting
    ratios = []
    for seed in range(num_seeds):
        load = Workload(seed, 40 * dp_size, page_size, MAX_PAGES, dp_size)
        seen = [run(each(*setting), load) for each in (legacy, make)]
        assert all(s.evictions > 0 and s.short == 0 for s in seen)
        ratios.append([s.hit_ratio for s in seen])
    before, after = np.mean(ratios, axis=0)
    print(f"hit ratio: legacy {before:.4f}, unified {after:.4f}")
    assert after >= before
