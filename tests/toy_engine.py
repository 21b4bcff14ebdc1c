"""A toy hybrid model served through the real cache, pools, tables and kernels.

Two layers of full attention over paged KV and two of a linear recurrence with a short
convolution, in turns. A forward takes the tokens of a chunk one after another, so that
a prompt gives the same bits however it is cut, and whether its start was computed or
found: what differs is a wrong page or a wrong state.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import request_checks as checks
import request_programs as programs
from harness import numpy, pad, with_counter

import uhrc_fn as u
from uhrc_fn import CacheConfig, Status
from uhrc_fn.pools.tracking import TrackMetadata, advance_tracks
from uhrc_fn.state import Counter

PAGE, INTERVAL, CHUNK = 4, 8, 8
CONFIG = CacheConfig(
    components=("FULL", "RECURRENT"),
    page_size=PAGE,
    num_pages=48,
    num_recurrent_slots=12,
    max_prefix_pages=32,
    enable_recurrent_extra_buffer=True,
    recurrent_track_interval=INTERVAL,
    max_live_receipts=8,
)
TABLES = u.RequestConfig(
    num_requests=3, max_pages=32, page_size=PAGE, num_track_slots=2
)
ATTENTION, RECURRENCE = (0, 2), (1, 3)
STATES = u.RecurrentConfig(
    num_slots=12,
    layers=RECURRENCE,
    num_v_heads=1,
    v_head_dim=2,
    k_head_dim=1,
    conv_kernel_size=2,
)
KV = u.KVConfig(
    num_pages=48,
    page_size=PAGE,
    layers=ATTENTION,
    num_kv_heads=1,
    head_dim=2,
    dtype="float32",
)
VOCAB, WIDTH = 64, 4


class Pools(NamedTuple):
    """All that a step updates beside the cache."""

    kv: u.KVPool
    states: u.RecurrentStatePool
    tables: u.HybridReqToTokenPool


def init_params(seed: int = 0):
    """Weights of the toy model: an embedding and one matrix a layer."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)
    layers = [draw(WIDTH, 6 if x in ATTENTION else 4) for x in range(4)]
    return {
        "embed": draw(VOCAB, WIDTH),
        "layers": layers,
        "out": [draw(2, WIDTH) for _ in range(4)],
        "taps": draw(2, 4),
    }


def attend(pool, layer, pages, location, position, qkv):
    """Write K and V of a token, then attend to all written up to it."""
    q, k, v = qkv[:2], qkv[2:4], qkv[4:]
    one = lambda x: x[None, None]
    pool = pool.set_kv_buffer(layer, location[None], one(k), one(v))
    keys, values = (x.reshape(-1, 2) for x in pool.read_pages(layer, pages))
    place = jnp.arange(keys.shape[0], dtype=jnp.int32)
    score = jnp.sum(keys * q[None], -1)
    score = jnp.where(place <= position, score, -jnp.inf)
    weight = jnp.exp(score - jnp.max(score))
    mixed = jnp.where((place <= position)[:, None], weight[:, None] * values, 0.0)
    return pool, jnp.sum(mixed, 0) / jnp.sum(weight)


def recur(state, channels, taps):
    """One step of a gated linear recurrence behind a convolution of two taps."""
    temporal, conv = state
    channels = channels.astype(conv.dtype)
    x = (
        conv[:, 0].astype(jnp.float32) * taps[0]
        + channels.astype(jnp.float32) * taps[1]
    )
    q, k, v = x[:1], x[1:2], x[2:]
    temporal = temporal * jnp.float32(0.9) + (k[:, None] * v[None])[None]
    return (temporal, channels[:, None]), jnp.sum(temporal[0] * q[:, None], 0)


def run_layers(params, kv, states, pages, location, position, token):
    """One token through all layers: ``(kv, states, logits)``."""
    x = params["embed"][token]
    for layer in range(4):
        y = jnp.sum(params["layers"][layer] * x[:, None], 0)
        if layer in ATTENTION:
            kv, y = attend(kv, layer, pages, location, position, y)
        else:
            at = RECURRENCE.index(layer)
            state, y = recur(states[at], y, params["taps"])
            states = (*states[:at], state, *states[at + 1 :])
        x = x + jnp.sum(params["out"][layer] * jnp.tanh(y)[:, None], 0)
    return kv, states, jnp.sum(params["embed"] * x[None], -1)


def forward(params, pools: Pools, row, tokens, num_new, branching):
    """Run `num_new` of the `CHUNK` tokens behind what a request has written.

    Returns:
      ``(pools, logits)``, [CHUNK, vocabulary]; pages for the tokens are in the table.
    """
    kv, states, tables = pools
    rows = row[None]
    start = tables.length[row]
    running = tables.running_slots(rows)
    fresh = (start == 0)[None]
    held = [states.gather_state(x, running, fresh) for x in RECURRENCE]
    held = jax.tree.map(lambda x: x[0], tuple(held))

    def step(carry, token_and_turn):
        kv, held = carry
        token, turn = token_and_turn
        position, is_real = start + turn, turn < num_new
        location = tables.locations(rows, position[None])[0]
        location = jnp.where(is_real, location, 0)
        kv, new, logits = run_layers(
            params, kv, held, tables.pages[row], location, position, token
        )
        held = jax.tree.map(lambda x, y: jnp.where(is_real, x, y), new, held)
        return (kv, held), logits

    turns = jnp.arange(CHUNK, dtype=jnp.int32)
    (kv, held), logits = jax.lax.scan(step, (kv, held), (tokens, turns))
    length = (start + num_new)[None]
    tables = tables.set_lengths(rows, length, tables.protected_length[rows])
    tracks, meta = advance_tracks(
        tables.tracks(rows),
        length,
        num_new[None],
        interval=INTERVAL,
        branching_length=branching[None],
    )
    tables = tables.put_tracks(rows, tracks)
    for layer, (temporal, conv) in zip(RECURRENCE, held, strict=True):
        meta = TrackMetadata(*meta)
        states = states.put_state(layer, running, temporal[None], conv[None], meta)
    return Pools(kv, states, tables), logits


# Compiled fast rather than well; one program, so that its bits are its own.
_jit = functools.partial(jax.jit, compiler_options=programs._OPTIONS)
_forward = _jit(forward, donate_argnums=1)


@functools.partial(_jit, donate_argnums=0)
def put_pages(tables, row, start, pages):
    return tables.write_pages(row[None], start[None], pages[None])


@functools.partial(_jit, donate_argnums=(0, 1))
def forward_and_publish(cache, pools, params, row, tokens, num_new, key, receipt):
    """A forward and the publishing of what it wrote, as one program."""
    pools, logits = forward(params, pools, row, tokens, num_new, jnp.int32(0))
    cache, tables, published = u.cache_unfinished_req(
        cache, pools.tables, row, key, receipt
    )
    return cache, pools._replace(tables=tables), published, logits


class Running:
    """A request that runs."""

    def __init__(self, row: int, tokens, hit: int, receipt, branching: int):
        self.row, self.tokens, self.hit = row, list(tokens), hit
        self.receipt, self.branching, self.written = receipt, branching, hit


class ToyEngine:
    """Requests of the toy model; every step ends with a check of every entry."""

    def __init__(self, seed: int = 0):
        self.params = init_params(seed)
        self.cache = u.init(CONFIG)
        self.pools = Pools(
            u.init_kv_pool(KV),
            u.init_recurrent_state_pool(STATES),
            u.init_hybrid_req_to_token_pool(TABLES),
        )
        self.rows = {1, 2, 3}
        self.set_aside: list[int] = []

    def key(self, tokens):
        return u.radix_key(np.asarray(tokens), CONFIG, num_pages=32)

    def match(self, tokens):
        self.cache, match = programs.match(self.cache, self.key(tokens))
        return numpy(match)

    def slots(self, count: int) -> list[int]:
        """Allocate so many slots, or none."""
        self.cache, result = programs.alloc_request(
            self.cache, *map(np.int32, (0, 0, count)), max_pages=32, max_slots=8
        )
        return np.asarray(result.slots.ids)[: int(result.slots.count)].tolist()

    def admit(self, tokens, match=None) -> Running:
        """Match all but the last token, clone, take slots and a row."""
        match = self.match(tokens[:-1]) if match is None else match
        self.cache, states, clone = programs.cow_clone(
            self.cache, self.pools.states, match
        )
        assert bool(clone.ok)
        tracks = self.slots(2)
        row, hit = min(self.rows), int(match.hit_length)
        self.rows.remove(row)
        tables = programs.seat(
            self.pools.tables,
            np.int32(row),
            match.device_indices,
            np.zeros(32, np.int32),
            pad([int(clone.slot), *tracks], 3),
            np.int32(hit),
        )
        self.pools = self.pools._replace(states=states, tables=tables)
        branching = int(match.recurrent_branching_seqlen)
        request = Running(row, tokens, hit, clone.receipt, branching)
        self.check()
        return request

    def give_pages(self, request: Running, num_new: int) -> None:
        """Take pages for the next tokens into the request's table."""
        start = -(-request.written // PAGE)
        need = -(-(request.written + num_new) // PAGE) - start
        self.cache, result = programs.alloc_request(
            self.cache, *map(np.int32, (need, 0, 0)), max_pages=32, max_slots=8
        )
        assert bool(result.ok)
        tables = put_pages(
            self.pools.tables, np.int32(request.row), np.int32(start), result.pages.ids
        )
        self.pools = self.pools._replace(tables=tables)

    def forward(self, request: Running, num_new: int):
        """Logits of the next `num_new` tokens, at most a chunk."""
        self.give_pages(request, num_new)
        chunk = request.tokens[request.written : request.written + num_new]
        self.pools, logits = _forward(
            self.params,
            self.pools,
            np.int32(request.row),
            pad(chunk, CHUNK),
            np.int32(num_new),
            np.int32(request.branching),
        )
        request.written += num_new
        self.check()
        return np.asarray(logits)[:num_new]

    def run(self, request: Running, upto: int | None = None):
        """Prefill, cut at boundaries; all logits, [tokens, vocabulary]."""
        upto = len(request.tokens) if upto is None else upto
        found = []
        while request.written < upto:
            cut = programs.cut_prefill(
                request.written,
                upto,
                CHUNK,
                interval=INTERVAL,
                page_size=PAGE,
                branching_length=request.branching,
            )
            found.append(self.forward(request, int(cut.num_tokens)))
        return np.concatenate(found)

    def publish(self, request: Running):
        self.cache, tables, published = programs.cache_unfinished_req(
            self.cache,
            self.pools.tables,
            np.int32(request.row),
            self.key(request.tokens),
            request.receipt,
        )
        self.pools = self.pools._replace(tables=tables)
        request.receipt = published.receipt
        self.check()
        return numpy(published.insert)

    def finish(self, request: Running, tokens=None):
        """Publish what is written of `tokens` (default: the request's) and end it."""
        self.cache, tables, result = programs.cache_finished_req(
            self.cache,
            self.pools.tables,
            np.int32(request.row),
            self.key(request.tokens if tokens is None else tokens),
            request.receipt,
        )
        self.pools = self.pools._replace(tables=tables)
        self.rows.add(request.row)
        self.check()
        return numpy(result)

    def abort(self, request: Running) -> None:
        self.cache, tables = programs.abort_req(
            self.cache, self.pools.tables, np.int32(request.row), request.receipt
        )
        self.pools = self.pools._replace(tables=tables)
        self.rows.add(request.row)
        self.check()

    def evict(self, **wanted):
        params = u.EvictParams(
            num_tokens=np.int32(wanted.get("num_tokens", 0)),
            swa_num_tokens=np.int32(0),
            recurrent_num=np.int32(wanted.get("recurrent_num", 0)),
        )
        self.cache, result = programs.evict(self.cache, params)
        self.check()
        return np.asarray(result.scalars).tolist()

    def serve(self, tokens):
        """A request from its match to its end: its logits."""
        request = self.admit(tokens)
        logits = self.run(request)
        self.finish(request)
        return logits

    # Reading.

    def state_of(self, slot: int) -> list[np.ndarray]:
        """The bits of a slot, all layers, temporal and conv."""
        states = self.pools.states
        return [np.asarray(x)[slot] for x in (*states.temporal, *states.conv)]

    def running_slot(self, request: Running) -> int:
        return int(self.pools.tables.running_slot[request.row])

    def tree_slots(self) -> dict[int, int]:
        """Tokens before each snapshot of the tree -> its slot; of one line."""
        value = np.asarray(self.cache.tree.value)[2]
        depth = np.asarray(self.cache.tree.depth)
        return {int(depth[n]) * PAGE: int(value[n]) for n in np.flatnonzero(value >= 0)}

    def take_status(self) -> Status:
        status = Status(int(self.cache.status))
        self.cache = with_counter(self.cache, Counter.STATUS, 0)
        return status

    def check(self) -> None:
        """Count every entry of every pool, then ask every invariant."""
        cache, tables = numpy((self.cache, self.pools.tables))
        owned = numpy(programs.owned(tables))
        slots = np.append(owned.slots, np.array(self.set_aside, np.int32))
        owned = owned._replace(slots=slots)
        checks.check_entries(cache, owned)
        u.check_invariants(cache, owned)


@functools.cache
def reference(tokens: tuple[int, ...], seed: int = 0):
    """Logits and final states of a prompt, computed in NumPy without cache or pool."""
    params = jax.tree.map(np.asarray, init_params(seed))
    keys = {layer: [] for layer in ATTENTION}
    temporal = {layer: np.zeros((1, 2), np.float32) for layer in RECURRENCE}
    conv = {layer: np.zeros(4, np.float32) for layer in RECURRENCE}
    logits = []
    for token in tokens:
        x = params["embed"][token]
        for layer in range(4):
            y = x @ params["layers"][layer]
            if layer in ATTENTION:
                keys[layer].append((y[2:4], y[4:]))
                score = np.array([k @ y[:2] for k, _ in keys[layer]])
                weight = np.exp(score - score.max())
                y = sum(w * v for w, (_, v) in zip(weight, keys[layer], strict=True))
                y = y / weight.sum()
            else:
                now = np.asarray(
                    jnp.asarray(y).astype(jnp.bfloat16).astype(jnp.float32)
                )
                z = conv[layer] * params["taps"][0] + now * params["taps"][1]
                conv[layer] = now
                temporal[layer] = temporal[layer] * 0.9 + np.outer(z[1:2], z[2:])
                y = z[0] * temporal[layer][0]
            x = x + np.tanh(y) @ params["out"][layer]
        logits.append(params["embed"] @ x)
    states = [temporal[x][None] for x in RECURRENCE]
    states += [conv[x][:, None] for x in RECURRENCE]
    return np.stack(logits), states
