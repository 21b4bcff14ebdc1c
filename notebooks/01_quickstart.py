# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart
#
# A prefix cache remembers which pages of the KV pool hold which tokens. A prompt that
# shares its beginning with an earlier one is then computed only from where they part.
# This notebook goes through the operations one by one, draws the tree after each, and
# ends with a jitted step that serves prompts with a toy model.
#
# Tokens are bytes here, so that the drawings can be read.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

import uhrc_fn
from uhrc_fn import jitted  # the operations under jax.jit, the cache donated

PAGE = 4  # tokens a page; real ones are longer


def tokens_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text_of(ids):
    return bytes(ids).decode(errors="replace")


draw = functools.partial(uhrc_fn.draw_tree, max_tokens=24, decode=text_of)

# %% [markdown]
# ## Build
#
# Everything with a shape is in the config. A node of the tree is exactly one page.

# %%
config = uhrc_fn.CacheConfig(page_size=PAGE, num_pages=32, max_prefix_pages=16)
cache = uhrc_fn.init(config)
uhrc_fn.check_invariants(cache)
print(uhrc_fn.tree_string(cache))

# %% [markdown]
# ## Match
#
# `radix_key` makes a key on the host. It pads to a power of two of pages, so that only
# a few programs are compiled. `num_pages` fixes the size: here one program serves all.
#
# The cache is a value. An operation takes one and returns the next; with `jitted` the
# old one is donated, so keep only the new one.


# %%
def key_of(text, **names):
    return uhrc_fn.radix_key(
        tokens_of(text), config, num_pages=config.max_prefix_pages, **names
    )


soup = key_of("You are a cook. How do I make soup?")
cache, match = jitted.match_prefix(cache, uhrc_fn.MatchPrefixParams(key=soup))
assert match.hit_length == 0  # the tree is empty

# %% [markdown]
# ## Insert
#
# The request gets pages, a model would fill them, and `insert` hands them to the tree.
# Only whole pages go in: of 35 tokens the last 3 stay outside, and their page remains
# the request's.


# %%
def insert(cache, key):
    """Match, allocate what is missing, insert, and give back what stayed outside."""
    cache, match = jitted.match_prefix(cache, uhrc_fn.MatchPrefixParams(key=key))
    num_new = -(-int(key.length) // PAGE) - int(match.hit_length) // PAGE
    cache, alloc = jitted.alloc_pages(cache, np.int32(num_new), max_new=16)
    pages = uhrc_fn.page_table(match, alloc)
    params = uhrc_fn.InsertParams(
        key=key, value=pages, prev_prefix_len=match.hit_length
    )
    cache, result = jitted.insert(cache, params)
    is_new = np.arange(pages.size) >= int(match.hit_length) // PAGE
    is_private = is_new & ~np.asarray(result.adopted()[:, 0])
    cache = jitted.free_pages(cache, jnp.where(is_private, pages, 0))
    return cache, result


cache, result = insert(cache, soup)
assert (result.prefix_len, result.inserted_len) == (0, 32)
draw(cache)

# %% [markdown]
# A second prompt with the same beginning shares its pages. Nothing is split: page 7
# simply gets a second child. The drawing merges chains of pages into edges.

# %%
stew = key_of("You are a cook. How do I make a stew?")
cache, result = insert(cache, stew)
assert result.prefix_len == 28  # "You are a cook. How do I mak"
assert result.inserted_len == 36
draw(cache)

# %% [markdown]
# A third one branches off inside the shared run.

# %%
bread = key_of("You are a cook. Why does bread rise?")
cache, result = insert(cache, bread)
assert result.prefix_len == 16
draw(cache)

# %% [markdown]
# Another namespace never shares, be the tokens the same or not: a LoRA, a tenant.

# %%
elsewhere = key_of("You are a cook. Why does bread rise?", extra_key="lora-7")
assert jitted.peek_prefix_len(cache, elsewhere).hit_length == 0
assert jitted.peek_prefix_len(cache, bread).hit_length == 36

# %% [markdown]
# ## Lock
#
# A running request locks what it uses, from the root to the end of its hit, and gets a
# receipt. Locked pages are drawn in orange.

# %%
cache, match = jitted.match_prefix(cache, uhrc_fn.MatchPrefixParams(key=bread))
cache, receipt = jitted.inc_lock_ref(cache, match)
assert cache.protected[0] == 9  # pages
draw(cache)

# %% [markdown]
# ## Evict
#
# The pages used longest ago go first, children before their parents, exactly as many as
# asked. `stew` came after `soup`, so the end of `soup` goes first.

# %%
params = uhrc_fn.EvictParams(num_tokens=np.int32(PAGE))
cache, evicted = jitted.evict(cache, params)
assert evicted.num_tokens_evicted == PAGE
assert jitted.peek_prefix_len(cache, soup).hit_length == 28
assert jitted.peek_prefix_len(cache, stew).hit_length == 36
draw(cache)

# %% [markdown]
# However much is asked, what is locked stays. The shortfall is in the result.

# %%
cache, evicted = jitted.evict(cache, uhrc_fn.EvictParams(num_tokens=np.int32(1000)))
assert evicted.num_tokens_evicted == 5 * PAGE
assert jitted.peek_prefix_len(cache, bread).hit_length == 36
draw(cache)

# %% [markdown]
# The receipt gives the lock back, once. A second time it is refused: a sticky status
# bit says so, and `raise_if_bad` turns it into an exception on the host when you ask.

# %%
cache, released = jitted.dec_lock_ref(cache, receipt)
assert released.is_released
uhrc_fn.raise_if_bad(cache)

cache, released = jitted.dec_lock_ref(cache, receipt)
assert not released.is_released
try:
    uhrc_fn.raise_if_bad(cache)
except RuntimeError as error:
    print(error)
    assert "STALE_RECEIPT" in str(error)

# %% [markdown]
# ## A jitted step
#
# All of it is arrays, so a whole serving step can be one compiled program: match, lock,
# allocate (evicting what is short), run the model, insert, unlock. The toy model keeps
# a vector for each token in a page pool and returns the mean over the prompt. It writes
# the vectors of the tokens that were not hit, and **reads all of them through the page
# table**: a wrong page would give a wrong answer.

# %%
config = uhrc_fn.CacheConfig(page_size=PAGE, num_pages=24, max_prefix_pages=16)
cache = uhrc_fn.init(config)
WIDTH = 8
kv = jnp.full((config.num_pages + 1, PAGE, WIDTH), jnp.nan)  # page 0 is the dummy


def embed(tokens, position):
    """The vector of a token at a position."""
    phase = tokens[:, None] * 0.37 + position[:, None]
    return jnp.sin(phase * (1 + jnp.arange(WIDTH)))


def toy_model(kv, key, pages, num_cached):
    position = jnp.arange(key.token_ids.size)
    page, offset = pages[position // PAGE], position % PAGE
    is_prompt = position < key.length
    is_new = is_prompt & (position >= num_cached)
    place = jnp.where(is_new, page, kv.shape[0])  # past the end: dropped
    vectors = embed(key.token_ids, position)
    kv = kv.at[place, offset].set(vectors, mode="drop")
    context = jnp.where(is_prompt[:, None], kv[page, offset], 0)
    return kv, context.sum(0) / key.length


@functools.partial(jax.jit, donate_argnums=(0, 1))
def serve(cache, kv, key):
    size = cache.config.page_size
    cache, match = uhrc_fn.match_prefix(cache, uhrc_fn.MatchPrefixParams(key=key))
    # Lock before anything allocates, or the request could evict its own prefix.
    cache, receipt = uhrc_fn.inc_lock_ref(cache, match)
    hit_pages = match.hit_length // size
    num_new = (key.length + size - 1) // size - hit_pages
    cache, alloc = uhrc_fn.alloc_pages(cache, num_new, max_new=16)
    pages = uhrc_fn.page_table(match, alloc)

    kv, answer = toy_model(kv, key, pages, match.hit_length)

    params = uhrc_fn.InsertParams(
        key=key, value=pages, prev_prefix_len=match.hit_length
    )
    cache, result = uhrc_fn.insert(cache, params)
    cache, _ = uhrc_fn.dec_lock_ref(cache, receipt)
    # What the tree did not take (here the partial last page) goes back.
    is_private = (jnp.arange(pages.size) >= hit_pages) & ~result.adopted()[:, 0]
    cache = uhrc_fn.free_pages(cache, jnp.where(is_private, pages, 0))
    return cache, kv, (answer, match.hit_length)


# %% [markdown]
# Three conversations grow turn by turn. Their prompts need more pages than the pool of
# 24 has, so the cache evicts on the way.

# %%
system = "You are a cook. "
turns = {
    "soup": ["How do I make soup?", " Boil it.", " And then?"],
    "bread": ["Why does bread rise?", " Yeast.", " Why?"],
    "rice": ["Rice: wash it?", " Yes.", " Twice?"],
}
prompts = []
for turn in range(3):
    for words in turns.values():
        prompts.append(system + "".join(words[: turn + 1]))

figures, hits = [], []
for prompt in prompts:
    key = key_of(prompt)
    cache, kv, (answer, hit) = serve(cache, kv, key)
    tokens = jnp.asarray(tokens_of(prompt))
    wanted = embed(tokens, jnp.arange(tokens.size)).mean(0)
    np.testing.assert_allclose(answer, wanted, atol=1e-5)
    uhrc_fn.check_invariants(cache, {"pages": []})  # requests own nothing between steps
    figures.append(draw(cache))
    hits.append(int(hit))
    print(f"{hit:2d} of {len(prompt)} tokens hit: {prompt!r}")

uhrc_fn.raise_if_bad(cache)
assert hits[0] == 0 and all(hit >= len(system) for hit in hits[1:])
assert serve._cache_size() == 1  # one compiled program served all prompts
# The end of the first conversation had to make room for the last prompt.
assert jitted.peek_prefix_len(cache, key_of(prompts[6])).hit_length < 52

# %% [markdown]
# The tree after the first prompt, after the first round, and at the end:

# %%
figures[0]

# %%
figures[2]

# %%
figures[-1]

# %% [markdown]
# The same, seen as text:

# %%
print(uhrc_fn.tree_string(cache, max_tokens=24, decode=text_of))
