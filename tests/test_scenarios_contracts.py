"""Faults in isolation, capacity and contracts of real prefix caches, replayed.

Each docstring names the one-line fault that would turn its test red.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import request_programs as programs
from harness import ONE_TOKEN, SMALL, Harness, numpy, row, same, stack
from harness_hybrid import FULL, RECURRENT, SWA, HybridHarness
from jax.sharding import AxisType, PartitionSpec
from scenario_caches import FOUR_SLOTS, WINDOWED, a
from toy_engine import ToyEngine

import uhrc_fn as u
from uhrc_fn import CacheConfig, InsertParams, MatchPrefixParams, Status
from uhrc_fn.ops.hashing import chain_hashes
from uhrc_fn.pools.sizing import budget_slots

# Keys, isolation, collisions.


def hash_codes(tokens, config: CacheConfig) -> np.ndarray:
    """Bucket and fingerprint of one-page keys, as one number each."""
    hashes = jax.jit(chain_hashes, static_argnums=2)
    spaces = jnp.zeros((len(tokens), 4), jnp.int32)
    bucket, print_ = hashes(jnp.asarray(tokens)[:, None], spaces, config)
    bucket, print_ = (np.asarray(x, np.int64)[:, 0] for x in (bucket, print_))
    return bucket << 32 | (print_ & 0xFFFFFFFF)


def test_B56_two_prompts_of_one_hash_are_two_prompts():
    """Fault: a node that the hash proposes is believed without a look at its tokens.

    The collision is a real one: with the seed known, a million pages hold a dozen pairs
    that agree in all 35 bits of bucket and fingerprint.
    """
    rng = np.random.default_rng(56)
    prompts = rng.integers(0, 2**31, (1 << 20, 2), dtype=np.int32)
    codes = hash_codes(prompts, SMALL)
    order = np.argsort(codes, kind="stable")
    (twins,) = np.nonzero(np.diff(codes[order]) == 0)
    assert len(twins) > 0
    left, right = (prompts[order[twins[0] + k]].tolist() for k in (0, 1))
    assert left != right
    cache = Harness(SMALL)
    cache.publish(left)
    assert cache.hit(right) == 0 and (cache.match(right).path == -1).all()
    # It cannot be indexed beside the other one: it is cut, and that is counted.
    assert cache.publish(right).inserted_len == 0
    assert cache.take_status() == Status.TABLE_FULL
    assert int(cache.cache.table_overflows) == 1
    assert (cache.hit(left), cache.hit(right)) == (2, 0)
    # Who does not know the seed crafts nothing.
    secret = dataclasses.replace(SMALL, hash_seed=0x1234_5678_9ABC_DEF0)
    both = hash_codes(np.array([left, right], np.int32), secret)
    assert both[0] != both[1]


def test_B58_media_are_told_apart_by_all_bits_of_their_names():
    """Fault: the digest of a namespace has 16 bits.

    Images whose names agree in the first 16 bits, or in any one word of the four.
    """
    images = [("image", i.to_bytes(8, "little")) for i in range(200_000)]
    words = np.stack([u.namespace(extra_key=image) for image in images])
    assert words.nbytes * 8 // len(words) >= 64
    cache = Harness(ONE_TOKEN)
    pairs = 0
    for part in (words[:, 0] & 0xFFFF, *words.T):
        order = np.argsort(part, kind="stable")
        (twins,) = np.nonzero(np.diff(part[order]) == 0)
        if not len(twins):
            continue
        pairs += 1
        left, right = (images[order[twins[0] + k]] for k in (0, 1))
        cache.publish(a(0, 2), extra_key=left)
        assert cache.hit(a(0, 2), extra_key=right) == 0
        cache.publish(a(0, 2), extra_key=right)
        tables = [
            cache.match(a(0, 2), extra_key=x).device_indices[:2] for x in (left, right)
        ]
        assert len({*tables[0].tolist(), *tables[1].tolist()}) == 4
    assert pairs >= 4
    assert cache.size == 4 * pairs


@pytest.mark.skip(reason="no exported hashes: keys do not leave the cache")
def test_B60_exported_hashes_differ_by_namespace():
    """Fault: the namespace is left out of an exported hash."""


# Capacity.


@pytest.mark.skip(reason="no cache events")
def test_B63_a_page_is_reported_removed_with_its_last_copy():
    """Fault: an event at the removal of any copy."""


@pytest.mark.skip(reason="no cache events")
def test_B64_events_name_their_component_and_position():
    """Fault: events of sparse components read like a prefix."""


@pytest.mark.skip(reason="no cache events, and so no parent hashes in them")
def test_B65_an_event_costs_its_new_pages():
    """Fault: the parent's hash is computed from the root on."""


def test_B66_a_shortage_of_swa_is_met_by_asking_for_swa():
    """Fault: the SWA phase of an eviction is asked for FULL's number.

    Internal nodes hold all SWA pages, so the FULL victims bring none.
    """
    cache = HybridHarness(WINDOWED)
    cache.publish(a(0, 16))
    cache.publish(a(0, 24), evicted=24)
    assert len(cache.in_tree(SWA)) == 16
    while cache.num_free(SWA) > 4:
        cache.take(SWA, min(cache.num_free(SWA) - 4, 32))
    assert cache.evict_all_of(full=4) == (4, 0, 0)
    assert cache.num_free(SWA) == 4
    assert cache.evict_all_of(swa=4) == (0, 4, 0)
    assert cache.num_free(SWA) == 8
    # An allocation that is short evicts what is short: 4 pages more, no FULL page.
    nodes = int(cache.cache.num_live_nodes)
    assert len(cache.take(SWA, 12)) == 12
    assert len(cache.in_tree(SWA)) == 16 - 4 - 4
    assert int(cache.cache.num_live_nodes) == nodes == 20
    assert cache.take_status() == Status.OK


def test_B67_a_snapshot_that_finds_no_slot_is_put_off():
    """Fault: a snapshot is offered whether or not there is a slot in exchange.

    Every state is in use or locked when it is due.
    """
    engine = ToyEngine()
    rng = np.random.default_rng(67)
    first, tokens = (rng.integers(0, 64, 20).tolist() for _ in range(2))
    engine.serve(first)
    match = engine.match(first)
    engine.cache, lock = programs.inc_lock_ref(engine.cache, match)
    request = engine.admit(tokens)
    engine.set_aside += engine.slots(8)
    assert (
        int(engine.cache.num_free[RECURRENT] + engine.cache.evictable[RECURRENT]) == 0
    )
    logits = [engine.run(request, 8)]
    before = numpy(engine.pools.tables)
    result = engine.publish(request)
    assert result.inserted_len == 0 and not result.recurrent_committed
    assert same(before, numpy(engine.pools.tables))
    assert engine.take_status() == Status.OK
    logits.append(engine.run(request, 14))
    engine.cache, _ = u.dec_lock_ref(engine.cache, lock)
    result = engine.publish(request)
    assert result.inserted_len == 8 and result.recurrent_committed
    assert engine.match(first).hit_length == 0  # it gave its slot
    logits.append(engine.run(request))
    assert np.array_equal(np.concatenate(logits), ToyEngine().serve(tokens))


def over_ranks(operation, how: str):
    """An operation on a stack of caches, mapped or sharded over two devices."""
    if how == "vmap":
        return jax.jit(jax.vmap(operation))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        jax.vmap(operation), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return jax.jit(mapped)


@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_B68_a_rank_that_is_short_of_swa_is_short_alone(how):
    """Fault: a shortage of one rank is flagged on all, or met by what others hold.

    Rank 0's requests hold every SWA page, rank 1's tree does.
    """
    cache = HybridHarness(WINDOWED)
    mine = [cache.take(SWA, 32) for _ in range(4)]
    short = cache.snapshot()
    cache.free_of(SWA, mine[0])
    cache.publish(a(0, 32))
    ranks = stack([short, cache.snapshot()])
    allocate = over_ranks(functools.partial(u.alloc_swa_pages, max_new=32), how)
    ranks, result = numpy(allocate(ranks, np.array([3, 3], np.int32)))
    assert result.ok.tolist() == [False, True] and result.count.tolist() == [0, 3]
    assert [Status(int(s)) for s in ranks.status] == [Status.SWA_PAGES_EXHAUSTED, 0]
    # Rank 1 evicted its deficit; rank 0 had nothing to evict.
    assert ranks.evictable[:, SWA].tolist() == [0, 29]
    assert ranks.evictable[:, FULL].tolist() == [0, 32]
    # Rank 0 retracts, asks again and gets; no bit of rank 1 moves.
    before = row(ranks, 1)
    free = over_ranks(u.free_swa_pages, how)
    ranks = numpy(free(ranks, np.array([mine[0], [0] * 32], np.int32)))
    ranks, result = numpy(allocate(ranks, np.array([32, 0], np.int32)))
    assert result.ok.tolist() == [True, True] and result.count.tolist() == [32, 0]
    assert same(before, row(ranks, 1))
    for rank in range(2):
        u.check_invariants(row(ranks, rank))


def test_B69_pools_are_split_once_and_each_makes_room_in_itself():
    """Fault: a pool's own shortage takes FULL pages.

    The split is static, and `CacheConfig` says so: demand for slots takes snapshots
    alone, though the tree is full of pages that nobody uses.
    """
    assert "makes room in its own pool" in " ".join((CacheConfig.__doc__ or "").split())
    cache = HybridHarness(FOUR_SLOTS)
    for k in range(4):
        cache.publish([*range(100 * k, 100 * k + 8)])
    assert len(cache.in_tree(FULL)) == 32 and len(cache.in_tree(RECURRENT)) == 4
    for held in range(1, 5):
        cache.take(RECURRENT, 1)
        assert len(cache.in_tree(FULL)) == 32 == cache.num_evictable(FULL)
        assert len(cache.in_tree(RECURRENT)) == 4 - held
    # No slot is left, and no page can become one.
    assert not cache.alloc_of(RECURRENT, 1).ok
    assert cache.take_status() == Status.SLOTS_EXHAUSTED
    assert len(cache.in_tree(FULL)) == 32
    # Sizing divides a budget once, before anything runs.
    split = budget_slots(1 << 20, 1 << 10, ratio=1.0)
    assert (split.slots_per_rank + 1) * 1024 + split.kv_bytes == 1 << 20


# Contracts.

# What each record must have, by name; those in brackets are its methods.
FIELDS = {
    u.MatchResult: "device_indices path hit_length full_kv_hit_length best_match_node "
    "last_device_node last_host_node generation swa_branching_seqlen "
    "recurrent_branching_seqlen cow_src_slot lost_tokens is_full_only "
    "cache_protected_len host_hit_length swa_host_hit_length recurrent_host_hit_length",
    u.InsertResult: "path page_table page_flags prefix_len inserted_len "
    "recurrent_exist recurrent_committed last_device_node",
    u.EvictResult: "num_tokens_evicted swa_num_tokens_evicted recurrent_num_evicted",
    u.IncLockRefResult: "path serial ledger_row anchor held num_pages delta",
    u.DecLockRefResult: "is_released delta",
    u.AllocResult: "ids count ok",
}
# There is no host tier, and nothing that these could count.
NEVER = {"host_hit_length", "swa_host_hit_length", "recurrent_host_hit_length"}
OF_COMPONENT = {
    "swa_branching_seqlen": SWA,
    "swa_num_tokens_evicted": SWA,
    "recurrent_branching_seqlen": RECURRENT,
    "cow_src_slot": RECURRENT,
    "recurrent_exist": RECURRENT,
    "recurrent_committed": RECURRENT,
    "recurrent_num_evicted": RECURRENT,
    "adopted SWA": SWA,
    "duplicate SWA": SWA,
    "adopted RECURRENT": RECURRENT,
    "duplicate RECURRENT": RECURRENT,
    "lost SWA": SWA,
    "lost RECURRENT": RECURRENT,
}
SETS = {"FULL": ONE_TOKEN, "SWA": WINDOWED, "RECURRENT": FOUR_SLOTS}


@pytest.mark.parametrize("record", FIELDS, ids=lambda x: x.__name__)
def test_B70_every_field_has_its_name_and_no_default(record):
    """Fault: a field of a result has a default that an operation may leave."""
    fields = dataclasses.fields(record)
    missing = dataclasses.MISSING
    assert all(f.default is missing and f.default_factory is missing for f in fields)
    names = {f.name for f in fields} - {"scalars"}
    names |= {n for n, _ in inspect.getmembers(record, inspect.isdatadescriptor)}
    names = {n for n in names if not n.startswith("_")} - {"scalars"}
    assert names == set(FIELDS[record].split())


def values(record) -> dict[str, np.ndarray]:
    """Every field of a record, masks and vectors by component."""
    found = {n: np.asarray(getattr(record, n)) for n in FIELDS[type(record)].split()}
    kinds = (FULL, SWA, RECURRENT)
    if isinstance(record, u.InsertResult):
        for kind in kinds:
            found[f"adopted {kind.name}"] = record.adopted()[:, kind]
            found[f"duplicate {kind.name}"] = record.duplicate()[:, kind]
    if isinstance(record, u.MatchResult):
        lost = np.asarray(record.lost_tokens)
        found |= {f"lost {kind.name}": lost[kind] for kind in kinds}
    return found


def records(config: CacheConfig):
    """Results of every operation; somewhere each field has something to say."""
    cache = HybridHarness(config)
    yield cache.publish(a(0, 8))
    yield cache.publish(a(0, 12), evicted=12 if config.has_swa else 0, has_slot=False)
    # The same once more, all of it computed anew.
    pages = cache.take(FULL, 8)
    swa = cache.take(SWA, 8) if config.has_swa else []
    slot = cache.take(RECURRENT, 1)[0] if config.has_recurrent else 0
    yield cache.insert(a(0, 8), pages, swa=swa, slot=slot)
    match = cache.match(a(0, 12))
    yield match
    yield cache.match(a(0, 12), full_only=True)
    receipts = [cache.lock(match) for _ in range(2)]
    yield from receipts
    # The pages move with the last lock.
    yield from [cache.unlock(receipt) for receipt in receipts]
    yield cache.alloc(3)
    params = u.EvictParams(
        num_tokens=np.int32(99), swa_num_tokens=np.int32(99), recurrent_num=np.int32(9)
    )
    _, result = u.jitted.evict(cache.cache, params)
    yield numpy(result)


@pytest.mark.parametrize("name", SETS)
def test_B70_every_component_set_produces_every_field(name):
    """Fault: a result of one component set leaves a field at zero.

    A field that belongs to a component is produced where that component is, and is 0
    everywhere else; all others are produced by each set.
    """
    config, said = SETS[name], {}
    for record in records(config):
        for field, value in values(record).items():
            assert value.dtype in (np.int32, np.bool_)
            is_said = bool(np.any((value != 0) & (value != -1)))
            key = (type(record).__name__, field)
            said[key] = said.get(key, False) or is_said
    wanted = {}
    for record, field in said:
        kind = OF_COMPONENT.get(field)
        can_lose = field != "lost_tokens" or len(config.components) > 1
        is_there = kind is None or kind in config.components
        # The FULL run cannot fall short of itself.
        is_there = is_there and can_lose and field not in NEVER | {"lost FULL"}
        wanted[record, field] = is_there
    assert said == wanted
    assert {record.__name__ for record in FIELDS} == {record for record, _ in said}


def shapes_of(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_B70_both_platforms_give_every_set_the_same_records(platform):
    """Fault: a form for one platform returns fewer fields."""
    found = {}
    for config in SETS.values():
        config = dataclasses.replace(config, max_prefix_pages=16)
        cache = u.init(config)
        key = u.radix_key(a(0, 8), config, num_pages=8)
        match = u.peek_prefix_len(cache, key)
        _, receipt = jax.eval_shape(u.inc_lock_ref, cache, match)
        receipt = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), receipt)
        extra = {}
        if config.has_recurrent:
            extra = {"recurrent_value": np.int32(1), "recurrent_length": np.int32(8)}
        value = np.arange(1, 9, dtype=np.int32)
        insert = InsertParams(key=key, value=value, **extra)
        operations = {
            "match": (u.match_prefix, MatchPrefixParams(key=key)),
            "insert": (u.insert, insert),
            "lock": (u.inc_lock_ref, match),
            "unlock": (u.dec_lock_ref, receipt),
            "evict": (u.evict, u.EvictParams(num_tokens=np.int32(1))),
        }
        for operation, (function, params) in operations.items():
            exported = jax.export.export(jax.jit(function), platforms=[platform])
            exported = exported(cache, params)
            results = exported.out_avals[len(jax.tree.leaves(cache)) :]
            shape = shapes_of(jax.eval_shape(function, cache, params)[1])
            assert [(x.shape, x.dtype) for x in results] == shape
            found.setdefault(operation, set()).add(str(shape))
    assert all(len(kinds) == 1 for kinds in found.values())
