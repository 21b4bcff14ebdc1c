"""Saving: what comes back is what was saved, or a clear refusal and nothing."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import resumed_replay
from harness import SMALL, Harness, canonical, numpy, same, with_counter
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from request_harness import FULL, RECURRENT, SWA, RequestHarness
from request_machine import config_of
from test_engine_unified import build

import uhrc_fn as u
from uhrc_fn import CacheConfig, SavedStateError, Status, jitted, saving
from uhrc_fn.engine.params import MatchPrefixParams, RadixKey
from uhrc_fn.engine.request import Request
from uhrc_fn.pools.layout import shardings
from uhrc_fn.replay.cli import BAD_INPUT
from uhrc_fn.replay.cli import main as replay_main
from uhrc_fn.state import Counter

TOKENS = np.arange(1, 25, dtype=np.int32)
OTHERS = np.r_[TOKENS[:8], 100:116].astype(np.int32)
NOBODY = {"pages": (), "swa_pages": (), "slots": ()}


def shapes(config: CacheConfig):
    return jax.eval_shape(lambda: u.init(config))


def identical(left, right) -> bool:
    """Equal structure, types and bits."""
    if jax.tree.structure(left) != jax.tree.structure(right):
        return False
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


def warm(tmp_path: pathlib.Path, name: str = "warm.uhrc"):
    """``(path, cache)``: a tree of two prompts with a lock, and pages of a request."""
    harness = Harness(SMALL, is_checked=False)
    harness.publish([0, 1, 2, 3, 4, 5, 6, 7])
    harness.publish([0, 1, 9, 9])
    harness.lock(harness.match([0, 1, 9, 9]))
    harness.alloc(3)
    u.save(tmp_path / name, harness.cache)
    return tmp_path / name, harness.cache


# What comes back.


@pytest.mark.parametrize("component", [FULL, SWA, RECURRENT])
def test_running_requests_go_on_or_are_dropped(component, tmp_path):
    """Saved with its tables, a running request ends as ever; alone, it is given back.

    Fault: `drop_requests` that leaves a lock, or a ring without what it frees.
    """
    h = RequestHarness(config_of(component, 4))
    h.finish(h.start(TOKENS, written=16))
    running = h.start(OTHERS, written=12)
    h.publish(running)
    assert h.extend(running, 4)
    assert np.asarray(h.cache.protected).any()
    state = numpy((h.cache, h.tables, h.states))
    u.save(tmp_path / "all", state)
    like = RequestHarness(h.config)
    loaded = u.load(tmp_path / "all", (like.cache, like.tables, like.states))
    assert identical(loaded, state) and int(like.cache.num_live_nodes) == 0

    h.cache, h.tables, h.states = loaded
    h.check()
    found = h.hit(TOKENS[:16])
    h.finish(running)
    assert not h.live and not np.asarray(h.cache.protected).any()

    cache, _, like.states = u.load(tmp_path / "all", jax.eval_shape(lambda: state))
    like.cache = jitted.drop_requests(cache)
    like.check()
    u.check_invariants(like.cache, NOBODY)
    total = np.asarray(like.cache.num_free + like.cache.evictable)
    assert total.tolist() == list(h.config.capacities)
    assert like.hit(TOKENS[:16]) == found >= 8
    like.cache, _ = jitted.dec_lock_ref(like.cache, running.receipt)
    like.check(Status.STALE_RECEIPT)
    like.evict(pages=14)  # all is evictable, in an order of its own
    assert like.free(FULL) == 14


def test_dropping_in_place_gives_what_it_gives_undonated(tmp_path):
    path, cache = warm(tmp_path)
    plain = numpy(jax.jit(u.drop_requests)(cache))
    loaded = u.load(path, shapes(SMALL))
    dropped = jitted.drop_requests(loaded)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loaded))
    assert identical(plain, numpy(dropped))
    assert canonical(plain)["PROTECTED"] == 0 != canonical(numpy(cache))["PROTECTED"]


def test_what_was_locked_is_evicted_in_its_turn():
    """Fault: a plan of victims that was made without what is unlocked now."""
    harness = Harness(SMALL, is_checked=False)
    harness.publish([0, 1, 2, 3])
    harness.lock(harness.match([0, 1, 2, 3]))
    harness.publish([9, 9, 8, 8, 7, 7])
    harness.evict(2)
    assert int(harness.cache.counters[Counter.PLAN_LIMIT]) >= 0
    harness.cache = jitted.drop_requests(harness.cache)
    u.check_invariants(harness.cache, NOBODY)
    harness.evict(2)  # the page at the end of the older prompt
    assert harness.hit([0, 1, 2, 3]) == 2
    assert harness.hit([9, 9, 8, 8, 7, 7]) == 4


def test_ranks_drop_their_requests_each(tmp_path):
    path, cache = warm(tmp_path)
    ranks = jax.tree.map(lambda x, y: jnp.stack([x, y]), cache, u.init(SMALL))
    u.save(path, ranks)
    loaded = u.load(path, ranks, check=True)
    assert identical(loaded, ranks)
    dropped = jax.jit(jax.vmap(u.drop_requests))(loaded)
    u.check_invariants(dropped, [NOBODY, NOBODY])
    first = jax.tree.map(lambda x: x[0], dropped)
    assert same(first, jax.jit(u.drop_requests)(cache))


def pools():
    """One of each, with values of every kind of bits in them."""
    layers = dict(num_pages=3, page_size=4, layers=(0, 2))
    made = [
        u.init_kv_pool(u.KVConfig(**layers, num_kv_heads=2, head_dim=16)),
        u.init_kv_pool(
            u.KVConfig(**layers, num_kv_heads=1, head_dim=8, dtype="float8_e4m3fn")
        ),
        u.init_mla_pool(u.MLAConfig(**layers, kv_lora_rank=24, rope_head_dim=8)),
        u.init_recurrent_state_pool(
            u.RecurrentConfig(
                num_slots=3,
                layers=(1,),
                num_v_heads=2,
                v_head_dim=128,
                conv_kernel_size=4,
            )
        ),
    ]
    random = np.random.default_rng(5)

    def fill(leaf):
        data = random.bytes(leaf.size * leaf.dtype.itemsize)  # NaNs of all sorts too
        return jnp.asarray(np.frombuffer(data, leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(fill, made)


def test_pools_come_back_bit_for_bit(tmp_path):
    filled = pools()
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(filled)}
    assert dtypes >= {"bfloat16", "float8_e4m3fn", "float32"}
    u.save(tmp_path / "pools", {"pools": filled, "none": None, "empty": jnp.zeros(0)})
    like = {"pools": pools(), "none": None, "empty": jnp.zeros(0)}
    assert identical(u.load(tmp_path / "pools", like)["pools"], filled)


def test_numpy_arrays_stay_numpy_arrays(tmp_path):
    state = {"float64": np.arange(3.0), "scalar": np.int64(7), "jax": jnp.arange(3)}
    u.save(tmp_path / "x", state)
    loaded = u.load(tmp_path / "x", state)
    assert identical(loaded, state)
    assert isinstance(loaded["float64"], np.ndarray)
    assert isinstance(loaded["jax"], jax.Array) and not loaded["jax"].committed


def test_sharded_arrays_come_back_where_they_lay(tmp_path):
    config = u.KVConfig(
        num_pages=3, page_size=4, layers=(0,), num_kv_heads=4, head_dim=16, num_ranks=2
    )
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    pool = u.init_kv_pool(config)
    values = np.random.default_rng(0).standard_normal(pool.buffers[0].shape)
    pool = u.KVPool((jnp.asarray(values, "bfloat16"),), config)
    places = shardings(mesh, pool.partition_specs(), pool)
    sharded = jax.device_put(pool, places)
    u.save(tmp_path / "sharded", sharded)
    loaded = u.load(tmp_path / "sharded", sharded)
    assert identical(loaded, pool)
    assert loaded.buffers[0].sharding == sharded.buffers[0].sharding
    # Where it lies is no setting: it loads onto one device, and onto others.
    assert identical(u.load(tmp_path / "sharded", pool), pool)
    elsewhere = NamedSharding(mesh, P("data"))
    like = jax.eval_shape(functools.partial(u.init_kv_pool, config))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=elsewhere), like
    )
    assert u.load(tmp_path / "sharded", like).buffers[0].sharding == elsewhere


def test_a_warm_tree_hits_in_the_shell(tmp_path):
    kv = jnp.arange(33)
    cache, key = build(dp_size=2), RadixKey(TOKENS, dp_rank=1)
    req = Request(TOKENS, dp_rank=1)
    assert cache.requests.alloc(req)
    given = cache.alloc(24, 1)
    assert given is not None
    cache.requests.write(req.req_pool_idx, 0, given.full)
    req.kv_committed_len = req.kv_allocated_len = 24
    cache.cache_unfinished_req(req)  # it runs on, and holds a lock
    assert cache.full_protected_size(1) == 24
    cache.save(tmp_path / "shell", kv)

    other = build(dp_size=2)
    assert identical(other.load(tmp_path / "shell", jnp.zeros_like(kv)), kv)
    assert other.full_protected_size(1) == 0
    assert other.full_evictable_size(1) == 24
    found = other.match_prefix(MatchPrefixParams(key=key))
    assert found.device_indices.tolist() == given.full[:24].tolist()
    elsewhere = dataclasses.replace(key, dp_rank=0)
    assert not other.match_prefix(MatchPrefixParams(key=elsewhere)).device_indices.size
    with pytest.raises(
        SavedStateError, match=r"\[0\]\[1\] is 'CacheState' in the file"
    ):
        build().load(tmp_path / "shell", kv)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kda-mla", "swa-gqa"])
def test_an_engine_starts_warm(family, tmp_path):
    """The outputs of a fresh engine, with the hits of the one that was saved."""
    from serving_harness import check_idle, make_engine, outputs, prompts_around

    prompts = prompts_around([64, 80])
    engine = make_engine(family)
    outputs(engine, prompts, 4)
    running = engine.submit(prompts[0], 20)  # it will be gone
    while not running.output:
        engine.step()
    u.save(tmp_path / "engine", (engine.state.cache, engine.state.pools))

    other = make_engine(family)
    like = (other.state.cache, other.state.pools)
    cache, kept = u.load(tmp_path / "engine", like, check=True)
    cache = jitted.drop_requests(cache)
    other.state = dataclasses.replace(other.state, cache=cache, pools=kept)
    check_idle(other)
    fresh = make_engine(family)
    assert outputs(other, prompts, 4) == outputs(fresh, prompts, 4)
    assert other.stats.hit_tokens > fresh.stats.hit_tokens > 0
    check_idle(other)


# What is refused.


class WithFunction(eqx.Module):
    array: jax.Array
    function: Callable = eqx.field(static=True)


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        ({"page_size": 4}, ["config.page_size is 2 in the file, wanted 4"]),
        ({"num_pages": 12}, ["config.num_pages is 16 in the file, wanted 12"]),
        ({"max_live_receipts": 5}, ["config.max_live_receipts is 4", "int32[3, 5]"]),
        (
            {"components": ("FULL", "RECURRENT"), "num_recurrent_slots": 4}
            | {"enable_recurrent_extra_buffer": True},
            ["config.components is '1 entries'", "wanted 'RECURRENT'"],
        ),
    ],
)
def test_other_settings_are_named(change, sentences, tmp_path):
    path, _ = warm(tmp_path)
    with pytest.raises(SavedStateError) as caught:
        u.load(path, shapes(dataclasses.replace(SMALL, **change)))
    for sentence in [*sentences, str(path), "Load it with those"]:
        assert sentence in str(caught.value)


def test_a_secret_seed_is_compared_and_kept_secret(tmp_path):
    secret, other = 0x1234567890ABCDEF, 7
    config = CacheConfig(num_pages=4, hash_seed=secret)
    u.save(tmp_path / "x", u.init(config))
    with pytest.raises(SavedStateError, match="hash_seed is 'BLAKE2b") as caught:
        u.load(tmp_path / "x", shapes(dataclasses.replace(config, hash_seed=other)))
    assert str(secret) not in str(caught.value)
    assert str(secret).encode() not in (tmp_path / "x").read_bytes()
    u.load(tmp_path / "x", shapes(config))


def test_other_classes_are_named(tmp_path):
    path, cache = warm(tmp_path)
    with pytest.raises(SavedStateError, match=r"'CacheState' in .* wanted 'tuple'"):
        u.load(path, (cache, jnp.zeros(3)))
    u.save(path, {"kv": jnp.zeros(3)})
    kinds = {"kv": jnp.zeros(4)}, {"kv": jnp.zeros(3, "int32")}, {"v": jnp.zeros(3)}
    for like, kind in zip(kinds, ("float32[4]", "int32[3]", "float32[3]"), strict=True):
        with pytest.raises(SavedStateError, match=re.escape(f"wanted '{kind}'")):
            u.load(path, like)


def with_version(data: bytes, version: int) -> bytes:
    return data[:8] + version.to_bytes(4, "little") + data[12:]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda d: b"", "no saved state"),
        (lambda d: b"PK\3\4" + d[4:], "no saved state"),
        (lambda d: with_version(d, 2), "format version 2; wanted 1"),
        (lambda d: d[:12] + b"\xff\xff\xff\xff" + d[16:], "a header of 4294967295"),
        (lambda d: d[:12] + b"\0\0\0\0" + d[16:], "behind the header"),
        (lambda d: d[:-1], "bytes where"),
        (lambda d: d + b"\0", "bytes where"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "wrong checksum behind counters"),
    ],
)
def test_damage_is_named(damage, sentence, tmp_path):
    path, _ = warm(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SavedStateError, match=sentence) as caught:
        u.load(path, shapes(SMALL))
    assert str(path) in str(caught.value) and "empty cache" in str(caught.value)


def test_a_thousand_damaged_files_are_refused(tmp_path):
    """Cut anywhere, or with one to eight bits flipped anywhere.

    Fault: a byte that no digest covers.
    """
    path, cache = warm(tmp_path)
    data, like = path.read_bytes(), numpy(cache)
    header = data.index(b"}}") + 2
    assert identical(u.load(path, like), like)
    random = np.random.default_rng(0)
    for number in range(1000):
        damaged = bytearray(data)
        # The header is a small part of a file: every other file is damaged there.
        end = (header, len(data))[number % 2]
        if number % 4 < 2:
            damaged = damaged[: random.integers(0, end)]
        else:
            for place in random.integers(0, 8 * end, random.integers(1, 9)):
                damaged[place // 8] ^= 1 << (place % 8)
            if damaged == data:
                continue  # a bit was flipped twice
        path.write_bytes(damaged)
        with pytest.raises(SavedStateError):
            u.load(path, like)


def test_a_header_of_another_writer_is_refused(tmp_path):
    """Its checksum is right, its contents are not.

    Fault: what a file says is built, or an error of JSON gets out.
    """
    path, like = tmp_path / "x", u.init(SMALL)
    deep = b"[" * 100_000 + b"]" * 100_000
    for header in (b"", b"{", b"[]", b"{}", b'{"settings": 3, "arrays": 4}', deep):
        with open(path, "wb") as file:
            saving.file.Writer(file, header)
        with pytest.raises(SavedStateError, match="other settings"):
            u.load(path, like)


def test_a_broken_cache_is_found_on_demand(tmp_path):
    _, cache = warm(tmp_path)
    u.save(tmp_path / "x", (with_counter(cache, Counter.EVICTABLE, 1), jnp.zeros(2)))
    like = (shapes(SMALL), jnp.zeros(2))
    u.load(tmp_path / "x", like)
    with pytest.raises(SavedStateError, match=r"broken when it was saved.*evictable"):
        u.load(tmp_path / "x", like, check=True)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"a": 3}, r"\['a'\] is a int of dtype None; wanted an array"),
        ({"a": jax.random.key(0)}, "dtype key"),
        ({"a": np.array([None])}, "dtype object"),
        (WithFunction(jnp.zeros(1), print), "function is a builtin_function"),
    ],
)
def test_what_is_no_array_is_not_saved(state, sentence, tmp_path):
    for call in (u.save, u.load):
        with pytest.raises(ValueError, match=sentence):
            call(tmp_path / "x", state)
    assert not list(tmp_path.iterdir())


# The file.


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path, cache = warm(tmp_path)
    before = path.read_bytes()

    def full_disk(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        u.save(path, u.init(SMALL))
    monkeypatch.undo()
    jitted.reset(cache)  # its buffers are given away
    with pytest.raises(RuntimeError, match="deleted"):
        u.save(path, cache)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        u.save(tmp_path / "none" / "x", u.init(SMALL))
    with pytest.raises(FileNotFoundError):
        u.load(tmp_path / "none", u.init(SMALL))


def test_only_the_owner_may_read_a_file(tmp_path):
    path, _ = warm(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_states_make_equal_files(tmp_path):
    first, _ = warm(tmp_path, "a")
    second, _ = warm(tmp_path, "b")
    assert first.read_bytes() == second.read_bytes()


def test_the_format_is_that_of_its_version(tmp_path):
    """If this fails, old files no longer mean what they say: raise `FORMAT_VERSION`.

    The empty cache shows where counters, rings and owners lie.
    """
    settings = dict(page_size=2, num_pages=6, num_recurrent_slots=3)
    settings |= dict(components=("FULL", "RECURRENT"), max_prefix_pages=4)
    config = CacheConfig(**settings, enable_recurrent_extra_buffer=True)
    u.save(tmp_path / "x", u.init(config))
    digest = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert (saving.FORMAT_VERSION, digest[:16]) == (1, "3bd9e0ca5c3f7b73")


# Save, kill, load, go on.


def in_a_process(components: str, kill_at: int, path) -> subprocess.CompletedProcess:
    script = pathlib.Path(resumed_replay.__file__)
    paths = [str(script.parent.parent), os.environ.get("PYTHONPATH", "")]
    cache = str(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    command = [sys.executable, str(script), components, str(kill_at), str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "components",
    [
        "FULL",
        pytest.param("FULL,SWA", marks=pytest.mark.slow),
        pytest.param("FULL,RECURRENT", marks=pytest.mark.slow),
    ],
)
def test_a_killed_replay_goes_on_to_the_same_figures(components, tmp_path):
    """Fault: a resumed replay that counts, or replays, a request twice."""
    path = tmp_path / "progress"
    killed = in_a_process(components, 250, path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not killed.stdout
    resumed = in_a_process(components, 0, path)
    assert resumed.returncode == 0, resumed.stderr
    uncut = resumed_replay.figures(components, None)
    assert json.loads(resumed.stdout) == uncut
    assert sum(uncut["hit_pages"]) > 200 and uncut["evicted_pages"] > 200


def test_the_replay_command_resumes(tmp_path, capsys):
    """A finished replay tells its figures again, at once."""
    path, trace = tmp_path / "progress", tmp_path / "trace.jsonl"
    blocks = [[n % 5, *range(10 * (n % 7), 10 * (n % 7) + n % 6)] for n in range(60)]
    line = {"timestamp": 0, "output_length": 1}
    lines = [line | {"input_length": 512 * len(b), "hash_ids": b} for b in blocks]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--trace", str(trace), "--capacity-pages", "20", "--batch", "16"]
    command += ["--json", "-"]
    keep = ["--progress-file", str(path)]
    figures = []
    for options in ([], keep, keep):
        assert replay_main([*command, *options]) == 0
        figures.append(json.loads(capsys.readouterr().out))
        for name in ("wall_s", "compile_s", "requests_per_s"):
            figures[-1].pop(name)
    assert figures[0] == figures[1] == figures[2] and figures[0]["hit_ratio"] > 0
    assert replay_main([*command, *keep, "--capacity-pages", "19"]) == BAD_INPUT
    assert "cache.config.num_pages is 20 in the file" in capsys.readouterr().err
    assert replay_main([*command, *keep, "--limit", "50"]) == BAD_INPUT
    assert "workload is '" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-3])
    assert replay_main([*command, *keep]) == BAD_INPUT
    assert "is damaged" in capsys.readouterr().err
    assert replay_main([*command[:2], "--sweep", "0.5,1", *keep]) == BAD_INPUT
    assert "--progress-file with 2 replays; wanted one" in capsys.readouterr().err
