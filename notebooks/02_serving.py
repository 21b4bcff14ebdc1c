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
# # Serving a hybrid model
#
# A hybrid model has two kinds of memory: attention layers keep the KV of each token, in
# pages, and recurrent layers keep one state for all tokens so far, in a slot. A prompt
# that shares its beginning with an earlier one can reuse the KV up to where they part,
# but a state only where a **snapshot** of it was kept. This notebook serves a small
# KDA and MLA model step by step, and draws the tree, its snapshots and the slots.
#
# Tokens are bytes here, and the weights are random: the answers mean nothing, but they
# depend on every token before them.

# %%
import dataclasses
import functools

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import uhrc_fn
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.engine import Engine
from uhrc_fn.serving.models.config import small_config
from uhrc_fn.serving.models.model import init_model, init_pools
from uhrc_fn.state import Owner

PAGE = 8  # tokens a page
INTERVAL = 16  # tokens between snapshots


def tokens_of(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def text_of(ids):
    return "".join(chr(i) if 32 <= i < 127 else "·" for i in ids)


draw = functools.partial(uhrc_fn.draw_tree, max_tokens=24, decode=text_of)

# %% [markdown]
# ## Build
#
# The model's config names the components that the cache needs. Pages and slots are two
# pools with a capacity each. A prefill is cut at each multiple of the track interval,
# so that the state there can be kept.

# %%
model_config = dataclasses.replace(
    small_config("kda-mla", vocab_size=256), layers=("kda", "mla")
)
cache_config = uhrc_fn.CacheConfig(
    components=model_config.components,
    page_size=PAGE,
    num_pages=40,
    max_prefix_pages=16,
    num_recurrent_slots=14,
    enable_recurrent_extra_buffer=True,
    recurrent_track_interval=INTERVAL,
    max_live_receipts=8,
)
config = ServeConfig(
    cache=cache_config,
    max_length=16 * PAGE,
    num_requests=2,
    decode_lanes=2,
    chunk_tokens=INTERVAL,
)
model = init_model(jax.random.key(0), model_config)
pages, swa_pages, slots = config.pool_pages
pools = init_pools(
    model_config,
    num_pages=pages,
    page_size=PAGE,
    num_swa_pages=swa_pages,
    num_slots=slots,
)
engine = Engine(model, config, pools)
print(model_config.components, model_config.layers)

# %% [markdown]
# Every slot is free, or the tree's (a snapshot), or a running request's. A request has
# one slot that every forward updates, and two **track slots** that take snapshots in
# turns: one is kept for the tree while the other waits for the next boundary.

# %%
ROLES = ("free", "snapshot in the tree", "running", "track, next", "track, kept")
COLOURS = ("#eeeeee", "#009e73", "#d55e00", "#9fd3f2", "#0072b2")
history = []


def roles_of_slots(engine):
    """The role of each slot, as an index into `ROLES`."""
    state = jax.device_get(engine.state)
    is_tree = np.asarray(state.cache.slot_owner) == Owner.TREE
    roles = np.where(is_tree, 1, 0)
    for row in range(1, config.num_requests + 1):
        roles[state.tables.running_slot[row]] = 2
        for track, slot in enumerate(state.tables.track_slots[row]):
            roles[slot] = 3 if track == state.tables.next_track[row] else 4
    return roles[1:]  # slot 0 is the dummy


def step():
    """Run a step, and remember what the slots were for after it."""
    engine.step()
    history.append(roles_of_slots(engine))


# %% [markdown]
# ## A first prompt
#
# 46 tokens: chunks of 16, 16 and 14. Each chunk that is computed is published at once:
# the tree grows by two pages a step, and each boundary leaves a snapshot, drawn as a
# green diamond. What the request holds is locked, drawn in orange.

# %%
SYSTEM = "You are a cook. Be brief, be kind. "
soup = tokens_of(SYSTEM + "How: soup?\n")
request = engine.submit(soup, max_tokens=12)
for number in (1, 2, 3):
    step()
    display(draw(engine.state.cache, title=f"after step {number}"))

# %% [markdown]
# The third step ended the prompt and gave the first token; now it decodes. At the end
# nothing is locked any more. The tree has the tokens up to the last snapshot, 48 of 58:
# KV past it could serve nobody.

# %%
while not request.is_finished:
    step()
assert len(request.output) == 12
assert request.hit_length == 0  # the tree was empty
draw(engine.state.cache)

# %% [markdown]
# ## The next turn
#
# It begins with all that was said so far, and hits the 48 tokens. Their snapshot is
# copied to the request's running slot, which every forward writes: the tree's own must
# stay as it is.

# %%
turn = np.concatenate([soup, request.output, tokens_of("\nAnd then?\n")])
second = engine.submit(turn, max_tokens=12)
while not second.is_finished:
    step()
print(f"{second.hit_length} of {turn.size} tokens were not computed")
assert second.hit_length == 48
draw(engine.state.cache)

# %% [markdown]
# ## Two at once
#
# Other prompts with the same beginning. They part from the first one at token 35; the
# last snapshot before that is at 32.

# %%
bread = engine.submit(tokens_of(SYSTEM + "Why does bread rise?\n"), max_tokens=12)
rice = engine.submit(tokens_of(SYSTEM + "Rice: wash it?\n"), max_tokens=12)
for _ in range(2):
    step()
display(draw(engine.state.cache, title="both are running"))
while not engine.is_idle:
    step()
assert bread.hit_length == rice.hit_length == 32
draw(engine.state.cache)

# %% [markdown]
# ## What the slots were for
#
# A column a step, a row a slot. Where a track slot turns green it became a snapshot of
# the tree, and a free slot took its place.

# %%
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
colours = ListedColormap(COLOURS)
grid = np.array(history).T
axes.pcolormesh(grid, cmap=colours, vmin=0, vmax=len(ROLES) - 1, edgecolors="white")
axes.invert_yaxis()
axes.set(xlabel="step", ylabel="slot")
handles = [Patch(color=c, label=r) for c, r in zip(COLOURS, ROLES, strict=True)]
figure.legend(handles=handles, loc="outside upper center", ncols=len(ROLES))
assert set(np.unique(grid)) == set(range(len(ROLES)))
plt.show()

# %% [markdown]
# ## Hit or miss, the same tokens
#
# A prompt in another namespace hits nothing and is computed from its first token. The
# answers are the same.

# %%
for served in (second, bread, rice):
    name = f"nobody has been here: {served.id}"
    again = engine.submit(served.prompt, max_tokens=12, extra_key=name)
    engine.run()
    assert again.hit_length == 0
    assert again.output == served.output

# %% [markdown]
# ## Nothing is lost
#
# With nobody running, each page and each slot is free or the tree's.

# %%
engine.check()
cache = engine.state.cache
uhrc_fn.check_invariants(cache, engine.state.tables.owned())
in_tree = cache.evictable + cache.protected
assert (cache.num_free + in_tree == np.array(cache_config.capacities)).all()
print(f"hit ratio {engine.stats.hit_ratio:.2f}, {engine.stats.steps} steps")
print(uhrc_fn.tree_string(cache, max_tokens=24, decode=text_of))
