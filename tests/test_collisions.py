"""Crafted keys: whatever the hash does, no hit is wrong, hidden or made twice.

A hash proposes, tokens decide. So the hash is replaced here by ones that an attacker
would wish for, and a plain simulation of the buckets says how much of a key can go in.
"""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
import pytest
from harness import Harness, canonical, node_keys, row, same

from uhrc_fn import CacheConfig, Status
from uhrc_fn.config import WAYS
from uhrc_fn.debug import tree_invariants
from uhrc_fn.ops import hashing, path, place

SIZES = {"page_size": 2, "num_pages": 24, "num_nodes": 25, "max_prefix_pages": 6}
PLAIN = CacheConfig(**SIZES)
ROUNDS = 5

real_hashes = hashing.chain_hashes


def one_bucket(tokens, namespace, config):
    """All pages meet in one bucket, with prints of their own."""
    bucket, fingerprint = real_hashes(tokens, namespace, config)
    return jnp.zeros_like(bucket), fingerprint


def two_bits(tokens, namespace, config):
    """Four fingerprints in all, in four buckets."""
    bucket, fingerprint = real_hashes(tokens, namespace, config)
    return bucket & 3, fingerprint & 3


def chainless(tokens, namespace, config):
    """Equal pages collide at all depths, behind all prefixes, in all namespaces."""
    del namespace
    page = (tokens * jnp.int32(31) + jnp.int32(7)).sum(-1, dtype=jnp.int32)
    return page & (config.num_buckets - 1), page


def constant(tokens, namespace, config):
    """Everything is the same to it."""
    del namespace, config
    zero = jnp.zeros(tokens.shape[:-1], jnp.int32)
    return zero, zero


# The seed names the hash, so that compiled operations keep to theirs.
WEAK = {1: one_bucket, 2: two_bits, 3: chainless, 4: constant, ROUNDS: one_bucket}
CONFIGS = {seed: CacheConfig(**SIZES, hash_seed=seed) for seed in WEAK}
IDS = ["one_bucket", "two_bits", "chainless", "constant", "one_bucket_by_rounds"]


def weak_hashes(tokens, namespace, config):
    return WEAK.get(config.hash_seed, real_hashes)(tokens, namespace, config)


@pytest.fixture(autouse=True)
def weak(monkeypatch):
    """Where the core, and the check of the core, take their hash from."""
    monkeypatch.setattr(path, "chain_hashes", weak_hashes)
    monkeypatch.setattr(tree_invariants, "chain_hashes", weak_hashes)


@pytest.fixture(params=WEAK, ids=IDS)
def config(request, monkeypatch):
    if request.param == ROUNDS:
        monkeypatch.setattr(place, "MAX_PAIRED", 0)
    return CONFIGS[request.param]


class Crafted(Harness):
    """A cache under a weak hash, with what each key's insert must come to."""

    def _plainly(self, call, *args):
        # What hashes nothing runs as it was compiled for the plain config.
        weak, self.is_checked = self.config, False
        self.cache = dataclasses.replace(self.cache, config=PLAIN)
        result = call(*args)
        self.cache = dataclasses.replace(self.cache, config=weak)
        self.is_checked = True
        self.check()
        return result

    def alloc(self, num_new, partial=True):
        return self._plainly(super().alloc, num_new, partial)

    def evict(self, num_tokens):
        return self._plainly(super().evict, num_tokens)

    def free_pages(self, ids):
        return self._plainly(super().free_pages, ids)

    def pages(self, tokens, **names) -> list[tuple]:
        """The key of each whole page: namespace, then pages from the root."""
        key = self.key(tokens, **names)
        size = self.config.page_size
        whole = len(tokens) // size
        pages = [tuple(tokens[size * i : size * (i + 1)]) for i in range(whole)]
        space = tuple(key.namespace.tolist())
        return [(space, *pages[: i + 1]) for i in range(whole)]

    def truth(self, tokens, **names) -> list[int]:
        """Nodes of the longest prefix that stands in the arrays, found by walking."""
        nodes = {key: node for node, key in node_keys(self.cache).items()}
        found = [nodes.get(page, -1) for page in self.pages(tokens, **names)]
        return found[: found.index(-1)] if -1 in found else found

    def room(self, tokens, **names) -> int:
        """Pages of a key that can stand: buckets with a way, prints not taken."""
        key = self.key(tokens, **names)
        keys = key.token_ids.reshape(-1, self.config.page_size)
        one = jnp.asarray(keys)[None], jnp.asarray(key.namespace)[None], self.config
        codes = np.stack(weak_hashes(*one), -1)[0]
        entries = np.asarray(self.cache.tree.table).reshape(-1, 2, WAYS)
        buckets = [
            {int(p) for p, i in zip(*bucket, strict=True) if i >= 0}
            for bucket in entries
        ]
        count = len(self.truth(tokens, **names))
        for bucket, fingerprint in codes[count : len(tokens) // 2].tolist():
            taken = buckets[bucket]
            if fingerprint in taken or len(taken) == WAYS:
                break
            taken.add(fingerprint)
            count += 1
        return count

    def match_truly(self, tokens, **names) -> None:
        nodes = self.truth(tokens, **names)
        match = self.match(tokens, **names)
        assert match.path[match.path >= 0].tolist() == nodes
        value = np.asarray(self.cache.tree.value)[0]
        pages = match.device_indices[: len(nodes)].tolist()
        assert pages == value[nodes].tolist()
        assert match.hit_length == len(nodes) * 2

    def insert_truly(self, tokens, ids, **names) -> None:
        old, room = len(self.truth(tokens, **names)), self.room(tokens, **names)
        overflows = int(self.cache.table_overflows)
        result = self.insert(tokens, ids, **names)
        end = int(result.inserted_len) // 2
        assert result.prefix_len == old * 2
        if self.config.hash_seed == ROUNDS:  # may give up a little before that
            assert old <= end <= room
        else:
            assert end == room
        # What stands is found, and nothing stands twice.
        assert self.truth(tokens, **names) == result.path[:end].tolist()
        keys = node_keys(self.cache).values()
        assert len(set(keys)) == len(keys)
        is_cut = end < len(tokens) // 2
        assert self.take_status() == (Status.TABLE_FULL if is_cut else Status.OK)
        assert int(self.cache.table_overflows) == overflows + is_cut


def prompt(rng: random.Random, alphabet: int = 2, shortest: int = 0):
    tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(shortest, 13))]
    return tokens, {"extra_key": rng.choice([None, None, "x"])}


def test_no_hit_is_wrong_hidden_or_made_twice(config):
    rng = random.Random(config.hash_seed)
    cache = Crafted(config)
    for _ in range(50):
        tokens, names = prompt(rng)
        alloc = cache.alloc(len(tokens) // 2)
        if int(alloc.count) == len(tokens) // 2:
            cache.insert_truly(tokens, alloc.ids, **names)
        cache.free_pages(cache.held)
        cache.match_truly(*prompt(rng)[:1], **names)
        if rng.random() < 0.2:
            cache.evict(rng.choice([2, 6, 20]))
    assert int(cache.cache.table_overflows) > 0


@pytest.mark.parametrize("seed", [1, ROUNDS])
def test_a_full_bucket_cuts_the_key_and_says_so(seed, monkeypatch):
    if seed == ROUNDS:
        monkeypatch.setattr(place, "MAX_PAIRED", 0)
    cache = Crafted(CONFIGS[seed])
    for i in range(WAYS - 1):
        cache.insert_truly([9, i], cache.alloc(1).ids)
    ids = cache.alloc(3).ids
    cache.insert_truly([9, 90, 9, 91, 9, 92], ids)
    assert int(cache.cache.table_overflows) == 1
    assert cache.hit([9, 90, 9, 91, 9, 92]) == 2
    assert cache.held == set(ids[1:3].tolist())
    # Room for one makes room for one.
    cache.match([9, 90])
    cache.evict(2)
    cache.insert_truly([9, 90, 9, 91, 9, 92], [0, *ids[1:3]])
    assert cache.hit([9, 90, 9, 91, 9, 92]) == 4
    assert int(cache.cache.table_overflows) == 2


def test_B56_a_key_crafted_to_collide_hits_nothing():
    """Fault: a hash match is believed without a look at the tokens."""
    cache = Crafted(CONFIGS[4])
    ids = cache.alloc(2).ids
    cache.insert_truly([1, 2], ids)
    for tokens, names in (([1, 3], {}), ([3, 2], {}), ([1, 2], {"extra_key": "x"})):
        cache.match_truly(tokens, **names)
        assert cache.hit(tokens, **names) == 0
        cache.insert_truly(tokens, ids[1:], **names)
    assert cache.hit([1, 2]) == 2
    assert int(cache.cache.table_overflows) == 3


def test_equal_pages_behind_other_prefixes_do_not_stand_in_for_each_other():
    # Same bucket, same print, same tokens: only the parent tells them apart.
    cache = Crafted(CONFIGS[3])
    ids = cache.alloc(4).ids
    cache.insert_truly([1, 2, 3, 4], ids)
    assert cache.hit([5, 6, 3, 4]) == 0
    cache.insert_truly([5, 6, 3, 4], ids[2:])
    assert cache.hit([5, 6, 3, 4]) == 2
    assert cache.hit([3, 4]) == 0
    # Nor can a page stand below itself.
    cache.insert_truly([1, 2, 1, 2], ids[3:])
    assert cache.hit([1, 2, 1, 2]) == 2


@pytest.mark.parametrize("seed", [1, 3, ROUNDS])
def test_a_batch_of_crafted_keys_is_one_after_another(seed, monkeypatch):
    if seed == ROUNDS:
        monkeypatch.setattr(place, "MAX_PAIRED", 0)
    rng = random.Random(seed)
    left, right = Crafted(CONFIGS[seed]), Crafted(CONFIGS[seed])
    cuts = 0
    for _ in range(15):
        prompts = [prompt(rng, alphabet=4, shortest=8) for _ in range(3)]
        tables = [left.alloc(6).ids for _ in prompts]
        assert all(np.array_equal(right.alloc(6).ids, table) for table in tables)
        batch = left.insert_batch(prompts, tables)
        for i, (tokens, names) in enumerate(prompts):
            single = right.insert(tokens, tables[i], **names)
            assert same(row(batch, i), single)
        assert canonical(left.cache) == canonical(right.cache)
        status = left.take_status()
        assert status == right.take_status()
        cuts += Status.TABLE_FULL in status
        num_tokens = rng.choice([0, 4, 30])
        for cache in (left, right):
            while cache.held:
                cache.free_pages(sorted(cache.held)[:6])
            cache.evict(num_tokens)
    assert cuts > 0
