"""Bytes, budgets and limits: what a pool costs and how many requests it carries."""

import itertools
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uhrc_fn import CacheConfig
from uhrc_fn.pools import entry_bytes, limits, sizing
from uhrc_fn.pools.boundaries import resolve_track_interval

MIB = 1 << 20


# Bytes of a slot.


@pytest.mark.parametrize(("tensor_size", "wanted"), [(1, 43_417_600), (4, 10_854_400)])
def test_a_kda_slot_has_equal_widths_and_splits_over_devices(tensor_size, wanted):
    got = entry_bytes.kda_slot_bytes(
        num_layers=20,
        num_heads=32,
        head_dim=128,
        conv_kernel_size=4,
        tensor_size=tensor_size,
    )
    assert got == wanted


def test_a_gdn_slot_has_fewer_key_heads():
    shape = dict(num_v_heads=32, v_head_dim=128, num_k_heads=16, k_head_dim=128)
    got = entry_bytes.gdn_slot_bytes(num_layers=30, conv_kernel_size=4, **shape)
    assert got == 64_389_120


def test_a_gdn_slot_may_differ_in_key_width_too():
    """The peer's temporal buffer is square whatever the key width is."""
    shape = dict(num_v_heads=8, v_head_dim=128, num_k_heads=4, k_head_dim=64)
    got = entry_bytes.gdn_slot_bytes(num_layers=1, conv_kernel_size=4, **shape)
    assert got == 8 * 64 * 128 * 4 + 3 * (8 * 128 + 2 * 4 * 64) * 2


def test_a_gla_slot_has_no_conv_state():
    got = entry_bytes.gla_slot_bytes(num_layers=5, num_heads=32, head_dim=128)
    assert got == 5 * 2 * MIB


def test_a_slot_follows_its_dtypes():
    shape = dict(num_layers=1, num_heads=2, head_dim=16, conv_kernel_size=3)
    got = entry_bytes.kda_slot_bytes(
        **shape, state_dtype="bfloat16", conv_dtype="float32"
    )
    assert got == 2 * 16 * 16 * 2 + 2 * (3 * 2 * 16) * 4


def test_recurrent_heads_must_divide_among_devices():
    shape = dict(num_layers=1, num_v_heads=32, v_head_dim=128, num_k_heads=6)
    with pytest.raises(ValueError, match=r"num_k_heads=6 with tensor_size=4.*multiple"):
        entry_bytes.recurrent_slot_bytes(**shape, tensor_size=4)


# Bytes of a page.


def test_a_page_of_fused_kv_counts_every_layer_and_pads_heads_to_lanes():
    shape = dict(page_size=128, num_layers=3, num_kv_heads=8)
    assert entry_bytes.kv_page_bytes(**shape, head_dim=128) == 128 * 3 * 16 * 128 * 2
    narrow = entry_bytes.kv_page_bytes(**shape, head_dim=80)
    assert narrow == entry_bytes.kv_page_bytes(**shape, head_dim=128)


def test_kv_heads_split_over_devices_until_each_has_one():
    shape = dict(page_size=1, num_layers=1, num_kv_heads=8, head_dim=128)
    got = [
        entry_bytes.kv_page_bytes(**shape, tensor_size=t) // (2 * 128 * 2)
        for t in (1, 2, 8, 16)
    ]
    assert got == [8, 4, 1, 1]
    with pytest.raises(ValueError, match="num_kv_heads=8 with tensor_size=3"):
        entry_bytes.kv_page_bytes(**shape, tensor_size=3)


def test_packed_words_are_filled_up():
    """One KV head of 8 bits is two rows, where a word holds four."""
    shape = dict(page_size=1, num_layers=1, num_kv_heads=1, head_dim=128)
    assert entry_bytes.kv_page_bytes(**shape, dtype="int8") == 4 * 128
    assert entry_bytes.kv_page_bytes(**shape, dtype="float32") == 2 * 128 * 4


def test_a_page_of_latents_pads_its_segments_apart():
    shape = dict(num_layers=2, kv_lora_rank=512, rope_head_dim=64)
    assert entry_bytes.mla_page_bytes(page_size=128, **shape) == 128 * 2 * 640 * 2
    narrow = entry_bytes.mla_page_bytes(
        page_size=2, num_layers=1, kv_lora_rank=192, rope_head_dim=64
    )
    assert narrow == 2 * (256 + 128) * 2
    one = entry_bytes.mla_page_bytes(page_size=1, **shape)
    assert one == 2 * 2 * 640 * 2  # two tokens fill a word


@pytest.mark.parametrize("layers", [0, -1, 1.0, True])
def test_a_size_that_is_no_count_is_refused(layers):
    with pytest.raises(ValueError, match=rf"num_layers={layers!r}; wanted a positive"):
        entry_bytes.gla_slot_bytes(num_layers=layers, num_heads=1, head_dim=1)


# Slots owned by a request, and slots reserved for one.


@pytest.mark.parametrize("extra", [False, True])
def test_without_a_tree_a_request_owns_and_reserves_one_slot(extra):
    mode = dict(extra_buffer=extra, has_prefix_cache=False)
    assert sizing.request_owned_slots(**mode) == 1
    assert sizing.reserved_slots_per_request(**mode) == 1


def test_on_the_base_path_a_request_owns_one_slot_and_reserves_two():
    assert sizing.request_owned_slots(extra_buffer=False) == 1
    assert sizing.reserved_slots_per_request(extra_buffer=False) == 2


@pytest.mark.parametrize(("tracks", "owned"), [(2, 3), (1, 2)])
def test_with_the_extra_buffer_track_slots_are_owned_and_three_reserved(tracks, owned):
    got = sizing.request_owned_slots(extra_buffer=True, num_track_slots=tracks)
    assert got == owned
    assert sizing.reserved_slots_per_request(extra_buffer=True) == 3


def test_other_numbers_of_track_slots_are_refused():
    with pytest.raises(ValueError, match="num_track_slots=3; wanted 1 or 2"):
        sizing.request_owned_slots(extra_buffer=True, num_track_slots=3)


# Track interval.


def test_the_interval_defaults_to_the_chunk():
    got = resolve_track_interval(None, page_size=128, chunked_prefill_size=512)
    assert got == 512


@pytest.mark.parametrize("chunk", [None, -1, 0])
def test_without_chunks_the_interval_defaults_to_the_page(chunk):
    got = resolve_track_interval(None, page_size=128, chunked_prefill_size=chunk)
    assert got == 128


def test_an_interval_above_the_chunk_is_allowed_with_a_warning():
    with pytest.warns(UserWarning, match="shorter than 1024 tokens is not cached"):
        got = resolve_track_interval(1024, page_size=128, chunked_prefill_size=512)
    assert got == 1024


def test_an_interval_below_the_chunk_is_allowed_with_a_warning():
    with pytest.warns(UserWarning, match="prefill runs in chunks of 128"):
        got = resolve_track_interval(128, page_size=128, chunked_prefill_size=512)
    assert got == 128


@pytest.mark.parametrize("interval", [0, -128, 192])
def test_an_interval_that_is_no_multiple_of_the_page_is_refused(interval):
    with pytest.raises(ValueError, match=f"recurrent_track_interval={interval} "):
        resolve_track_interval(interval, page_size=128, chunked_prefill_size=512)
    with pytest.raises(ValueError, match=f"recurrent_track_interval={interval} "):
        _recurrent(page_size=128, recurrent_track_interval=interval)


def test_a_chunk_that_is_no_default_interval_is_named():
    with pytest.raises(ValueError, match="chunked_prefill_size=500 as the track"):
        resolve_track_interval(None, page_size=128, chunked_prefill_size=500)


def _recurrent(**settings):
    defaults = dict(
        components=("FULL", "RECURRENT"),
        num_recurrent_slots=8,
        num_pages=64,
        enable_recurrent_extra_buffer=settings.get("page_size", 1) > 1,
    )
    return CacheConfig(**(defaults | settings))


def test_the_extra_buffer_needs_pages_and_the_base_path_single_tokens():
    assert _recurrent(page_size=1).recurrent_grid == 1
    assert _recurrent(page_size=128).recurrent_grid == 128
    with pytest.raises(ValueError, match="enable_recurrent_extra_buffer=True with pa"):
        _recurrent(page_size=1, enable_recurrent_extra_buffer=True)
    with pytest.raises(ValueError, match="enable_recurrent_extra_buffer=False with p"):
        _recurrent(page_size=128, enable_recurrent_extra_buffer=False)


# Budgets.


def test_memory_left_to_pools_is_what_is_free_less_the_share_to_leave_alone():
    assert sizing.available_bytes(600, 1000, 0.9) == 500
    with pytest.raises(ValueError, match="memory_fraction=90"):
        sizing.available_bytes(600, 1000, 90)


def test_the_ratio_divides_memory_and_the_dummy_row_is_paid_for():
    """The peer's budget leaves out the dummy row, so it can overrun its memory."""
    slots, kv = sizing.budget_slots(1900, 100, ratio=0.9)
    assert slots == 8  # 900 bytes are 9 rows, one of them the dummy
    assert kv == 1000
    assert sizing.budget_slots(1900, 100, ratio=0.9, dp_size=4).slots_per_rank == 8


def test_an_explicit_number_of_slots_divides_among_ranks():
    assert sizing.budget_slots(2000, 100, num_slots=32, dp_size=4) == (8, 1100)
    with pytest.raises(ValueError, match="num_slots=30 for dp_size=4; wanted a posi"):
        sizing.budget_slots(2000, 100, num_slots=30, dp_size=4)


def test_without_a_tree_each_running_request_has_its_slot():
    mode = dict(max_running=8, dp_size=2)
    assert sizing.budget_slots(2000, 100, has_prefix_cache=False, **mode) == (4, 1500)
    assert sizing.budget_slots(2000, 100, **mode).slots_per_rank == 8


@pytest.mark.parametrize("more", [{"num_slots": 19}, {"num_slots": 20}, {}])
def test_slots_that_memory_cannot_hold_are_refused(more):
    available = {19: 2000, 20: 2000}.get(more.get("num_slots"), 199)
    if more.get("num_slots") == 19:
        assert sizing.budget_slots(available, 100, **more) == (19, 0)
        return
    with pytest.raises(ValueError, match=rf"available={available} bytes.*Raise"):
        sizing.budget_slots(available, 100, **more)


def test_a_ratio_must_be_positive():
    with pytest.raises(ValueError, match="ratio=0; wanted a positive ratio of rec"):
        sizing.budget_slots(2000, 100, ratio=0)
    with pytest.raises(ValueError, match="ratio=0; wanted a positive ratio of SWA"):
        sizing.budget_swa_pages(2000, 100, 100, ratio=0)


def test_pages_fill_the_budget_beside_their_dummy():
    assert sizing.budget_pages(1099, 100) == 9
    assert sizing.budget_pages(200, 100) == 1
    with pytest.raises(ValueError, match="available=199 bytes for pages of 100"):
        sizing.budget_pages(199, 100)


@given(
    st.integers(0, 10**9),
    st.integers(1, 10**4),
    st.integers(1, 10**4),
    st.floats(0.1, 2),
)
def test_full_and_sliding_pages_share_the_budget(available, full, swa, ratio):
    try:
        pages, swa_pages = sizing.budget_swa_pages(available, full, swa, ratio=ratio)
    except ValueError:
        pages = next(n for n in itertools.count(1) if int(n * ratio) >= 1)
        assert (pages + 1) * full + (pages * ratio + 1) * swa > available * (1 - 1e-12)
        return
    assert swa_pages == int(pages * ratio)
    assert (pages + 1) * full + (swa_pages + 1) * swa <= available
    more = pages + 1
    assert (more + 1) * full + (more * ratio + 1) * swa > available * (1 - 1e-12)


# Running requests.


def _limit(num_slots, *, owned, is_user_sized, reserved=3, wanted=4096, dp_size=4):
    return limits.limit_running(
        wanted,
        num_slots=num_slots,
        owned=owned,
        reserved=reserved,
        is_user_sized=is_user_sized,
        dp_size=dp_size,
    )


def test_an_auto_sized_pool_keeps_a_quarter_for_snapshots():
    assert sizing.snapshot_headroom(48) == 12
    assert [sizing.snapshot_headroom(n) for n in (1, 4, 5)] == [1, 1, 2]
    assert _limit(192, owned=2, is_user_sized=False) == 72


def test_an_auto_sized_pool_runs_one_request_a_rank_at_least():
    assert _limit(8, owned=2, is_user_sized=False) >= 4


def test_a_pool_sized_by_the_user_keeps_the_reservation_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _limit(192, owned=2, is_user_sized=True) == 64


def test_no_room_for_snapshots_warns_and_reduces_nothing():
    with pytest.warns(UserWarning, match="64 running requests .* prefixes will hardly"):
        assert _limit(192, owned=3, is_user_sized=True) == 64


@pytest.mark.parametrize("is_user_sized", [False, True])
def test_a_pool_below_one_request_fails_fast(is_user_sized):
    with pytest.raises(ValueError, match="2 recurrent slots a rank; wanted at least 3"):
        _limit(8, owned=3, is_user_sized=is_user_sized)


def test_a_reservation_that_leaves_a_rank_without_a_request_fails_fast():
    with pytest.raises(ValueError, match="wanted at least 12 slots"):
        _limit(8, owned=2, is_user_sized=True)


@pytest.mark.parametrize("is_user_sized", [False, True])
@pytest.mark.filterwarnings("ignore:.*without room for snapshots")
def test_a_pool_of_exactly_one_request_a_rank_runs_it(is_user_sized):
    assert _limit(12, owned=3, is_user_sized=is_user_sized) == 4


@pytest.mark.parametrize(("num_slots", "wanted"), [(12, 4), (16, 8)])
def test_the_cap_is_a_multiple_of_the_ranks(num_slots, wanted):
    got = _limit(num_slots, owned=1, reserved=2, is_user_sized=True)
    assert got == wanted


def test_fewer_requests_than_ranks_are_refused():
    assert _limit(192, owned=2, wanted=5, is_user_sized=False) == 5
    with pytest.raises(ValueError, match="wanted=3 running requests for dp_size=4"):
        _limit(192, owned=2, wanted=3, is_user_sized=False)


@pytest.mark.parametrize(
    ("tokens", "context", "wanted"),
    [(1000, 4096, 2048), (24_000, 4096, 3000), (10**6, 4096, 4096)],
)
def test_running_requests_have_a_default(tokens, context, wanted):
    assert limits.default_max_running(tokens, context) == wanted


def test_pools_that_cannot_run_one_request_are_refused():
    two_slots = _recurrent(page_size=4, num_recurrent_slots=2)
    with pytest.raises(ValueError, match="2 recurrent slots a rank; wanted at least 3"):
        limits.check_pools(two_slots)
    limits.check_pools(two_slots, num_track_slots=1)
    limits.check_pools(_recurrent(num_recurrent_slots=1))
    limits.check_pools(CacheConfig(page_size=4, num_pages=8), request_tokens=32)
    with pytest.raises(ValueError, match="num_pages=8; wanted at least 9"):
        limits.check_pools(CacheConfig(page_size=4, num_pages=8), request_tokens=33)
    sliding = CacheConfig(
        components=("FULL", "SWA"),
        page_size=4,
        num_pages=8,
        num_swa_pages=4,
        sliding_window_size=6,
    )
    limits.check_pools(sliding, chunk_tokens=4)
    with pytest.raises(ValueError, match="num_swa_pages=4; wanted at least 5"):
        limits.check_pools(sliding, chunk_tokens=5)
