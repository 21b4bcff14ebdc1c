"""Static settings of a cache: what is known before anything is traced."""

import dataclasses
import enum
import math
from typing import TypeGuard


class ComponentType(enum.IntEnum):
    """Index of a component's slot in `component_data` (not its eviction priority)."""

    FULL = 0
    SWA = 1
    RECURRENT = 2


NUM_COMPONENTS = len(ComponentType)

FULL_ONLY = (ComponentType.FULL,)
ALLOWED_COMPONENTS = (
    FULL_ONLY,
    (ComponentType.FULL, ComponentType.SWA),
    (ComponentType.FULL, ComponentType.RECURRENT),
)

# A children-table bucket holds this many entries; buckets are sized for a mean
# load of at most `MEAN_BUCKET_LOAD`, where a bucket of random keys overflows with
# a probability of about 2e-8.
WAYS = 16
MEAN_BUCKET_LOAD = 3
BUCKETS_PER_ROW = 4  # four buckets of 16 fingerprints + 16 ids fill 128 words

# Stamps stay far enough below 2^31 that an operation can add its own.
CLOCK_LIMIT = 1 << 30
MAX_CAPACITY = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheConfig:
    """Shapes and rules of one cache; hashable, so that it can be static under jit.

    Capacities count usable entries; row 0 of every array is the root or the dummy.
    They are fixed: a shortage of SWA pages or of slots makes room in its own pool and
    never takes from another.

    Args:
      components: component set, as `ComponentType` members or their names. Allowed:
        (FULL,), (FULL, SWA), (FULL, RECURRENT).
      page_size: tokens a page; one tree node holds exactly one page.
      num_pages: pages of the FULL pool.
      num_nodes: tree nodes; `None` means `num_pages`.
      max_prefix_pages: longest cacheable prefix, in pages; `None` means `num_pages`.
      num_swa_pages: pages of the SWA pool (SWA only).
      sliding_window_size: window, in tokens (SWA only).
      swa_inserts_are_recent: whether all SWA pages of a key count as used when it is
        inserted (SWA only). False counts its last window, and what it brings before
        that goes first: right where prompts are long against windows and continued at
        their end. True suits short prompts that are cut and continued anywhere.
      num_recurrent_slots: slots of the recurrent state pool (RECURRENT only).
      enable_recurrent_extra_buffer: publish snapshots through track slots; needs
        `page_size > 1` (RECURRENT only).
      recurrent_track_interval: tokens between snapshots, a positive multiple of
        `page_size`; `None` means `page_size`.
      max_live_receipts: lock receipts that can be live at once.
      victim_plan_size: victims that one selection prepares (see `ops/evict.py`).
      hash_seed: seeds the page hash. Keep it secret where tenants may craft keys.

    Raises:
      ValueError: a setting is out of range or contradicts another; the message says
        what came, what was wanted and what to do.
    """

    components: tuple = FULL_ONLY
    page_size: int = 1
    num_pages: int = 1024
    num_nodes: int = None  # pyright: ignore[reportAssignmentType]
    max_prefix_pages: int = None  # pyright: ignore[reportAssignmentType]
    num_swa_pages: int = 0
    sliding_window_size: int = 0
    swa_inserts_are_recent: bool = False
    num_recurrent_slots: int = 0
    enable_recurrent_extra_buffer: bool = False
    recurrent_track_interval: int | None = None
    max_live_receipts: int = 1024
    victim_plan_size: int = 2048
    hash_seed: int = 0x5EED

    def __post_init__(self):
        settle = lambda name, value: object.__setattr__(self, name, value)
        settle("components", _component_set(self.components))
        if self.num_nodes is None:
            settle("num_nodes", self.num_pages)
        if self.max_prefix_pages is None:
            settle("max_prefix_pages", self.num_pages)
        if self.has_recurrent and self.recurrent_track_interval is None:
            settle("recurrent_track_interval", self.page_size)
        _validate(self)
        # jit compares the static part of its arguments on every call.
        identity = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        settle("_identity", identity)
        settle("_hash", hash(identity))

    def __hash__(self):
        return self._hash  # type: ignore[attr-defined]

    def __eq__(self, other):
        if self is other:
            return True
        if not isinstance(other, CacheConfig):
            return NotImplemented
        return self._identity == other._identity  # type: ignore[attr-defined]

    @property
    def has_swa(self) -> bool:
        """Whether SWA is among the components."""
        return ComponentType.SWA in self.components

    @property
    def has_recurrent(self) -> bool:
        """Whether RECURRENT is among the components."""
        return ComponentType.RECURRENT in self.components

    @property
    def window_pages(self) -> int:
        """Pages that cover the sliding window."""
        return -(-self.sliding_window_size // self.page_size)

    @property
    def recurrent_grid(self) -> int:
        """Tokens between positions where a snapshot may stand."""
        if self.enable_recurrent_extra_buffer:
            return self.recurrent_track_interval or self.page_size
        return self.page_size

    @property
    def capacities(self) -> tuple[int, int, int]:
        """Usable pool entries by component: FULL pages, SWA pages, slots."""
        return self.num_pages, self.num_swa_pages, self.num_recurrent_slots

    @property
    def plan_size(self) -> int:
        """Victims that one selection prepares, never more than there are nodes."""
        return min(self.victim_plan_size, self.num_nodes)

    @property
    def num_buckets(self) -> int:
        """Buckets of the children table, a power of two."""
        wanted = max(-(-self.num_nodes // MEAN_BUCKET_LOAD), BUCKETS_PER_ROW)
        return 1 << math.ceil(math.log2(wanted))


def _component_set(components) -> tuple[ComponentType, ...]:
    if isinstance(components, str):
        components = tuple(components.replace(" ", "").split(","))
    allowed = "(FULL,), (FULL, SWA), (FULL, RECURRENT)"
    try:
        members = [
            ComponentType[c.upper()] if isinstance(c, str) else ComponentType(c)
            for c in components
        ]
    except (KeyError, ValueError, TypeError, AttributeError):
        raise ValueError(
            f"components={components!r} names an unknown component; "
            f"choose one of {allowed}."
        ) from None
    if tuple(sorted(members)) not in ALLOWED_COMPONENTS:
        names = ", ".join(m.name for m in members)
        raise ValueError(
            f"components=({names}) cannot share one tree; choose one of {allowed}."
        )
    return tuple(sorted(members))


def _validate(c: CacheConfig) -> None:
    def require(ok, came, wanted, remedy):
        if not ok:
            raise ValueError(f"{came}; wanted {wanted}. {remedy}")

    for name in ("page_size", "num_pages", "max_prefix_pages", "max_live_receipts"):
        value = getattr(c, name)
        require(
            _is_int(value) and 1 <= value <= MAX_CAPACITY,
            f"{name}={value!r}",
            f"an integer from 1 to {MAX_CAPACITY}",
            f"Set {name} to a positive count.",
        )
    require(
        _is_int(c.num_nodes) and c.num_pages <= c.num_nodes <= MAX_CAPACITY,
        f"num_nodes={c.num_nodes!r} with num_pages={c.num_pages}",
        f"num_pages <= num_nodes <= {MAX_CAPACITY}",
        "With fewer nodes than pages the tree would freeze while pages remain; "
        "leave num_nodes unset to follow num_pages.",
    )
    require(
        _is_int(c.victim_plan_size) and 1 <= c.victim_plan_size <= MAX_CAPACITY,
        f"victim_plan_size={c.victim_plan_size!r}",
        "a positive integer",
        "The default suits most pools.",
    )
    require(
        _is_int(c.hash_seed) and 0 <= c.hash_seed < 1 << 64,
        f"hash_seed={c.hash_seed!r}",
        "an integer in [0, 2^64)",
        "Draw one with secrets.randbits(64), the same on all ranks.",
    )
    _validate_swa(c, require)
    _validate_recurrent(c, require)


def _validate_swa(c: CacheConfig, require) -> None:
    for name in ("num_swa_pages", "sliding_window_size"):
        value = getattr(c, name)
        low = 1 if c.has_swa else 0
        high = MAX_CAPACITY if c.has_swa else 0
        require(
            _is_int(value) and low <= value <= high,
            f"{name}={value!r} with components={_names(c)}",
            "a positive integer" if c.has_swa else "0",
            f"Set {name}." if c.has_swa else "Add SWA to components, or leave it out.",
        )
    recent = c.swa_inserts_are_recent
    require(
        isinstance(recent, bool) and (c.has_swa or not recent),
        f"swa_inserts_are_recent={recent!r} with components={_names(c)}",
        "True or False" if c.has_swa else "False",
        "It says which SWA pages are evicted first.",
    )
    if c.has_swa:
        require(
            c.window_pages + 1 <= c.num_swa_pages,
            f"num_swa_pages={c.num_swa_pages} for a window of {c.window_pages} pages",
            "at least the window plus one page",
            "A smaller pool could never hold one window; add SWA pages.",
        )


def _validate_recurrent(c: CacheConfig, require) -> None:
    slots = c.num_recurrent_slots
    require(
        _is_int(slots)
        and (1 <= slots <= MAX_CAPACITY if c.has_recurrent else slots == 0),
        f"num_recurrent_slots={slots!r} with components={_names(c)}",
        "a positive integer" if c.has_recurrent else "0",
        "Size the recurrent state pool."
        if c.has_recurrent
        else "Add RECURRENT to components, or leave it out.",
    )
    extra = c.enable_recurrent_extra_buffer
    if not c.has_recurrent:
        require(
            not extra and c.recurrent_track_interval is None,
            f"recurrent settings with components={_names(c)}",
            "none of them",
            "Add RECURRENT to components, or leave them out.",
        )
        return
    require(
        isinstance(extra, bool) and extra == (c.page_size > 1),
        f"enable_recurrent_extra_buffer={extra!r} with page_size={c.page_size}",
        "the extra buffer exactly where page_size > 1",
        "Set page_size=1 for the base path, or enable the extra buffer.",
    )
    require(
        slots >= 2 or not extra,
        f"num_recurrent_slots={slots} with the extra buffer",
        "at least 2, the running and the track slot of one request",
        "With fewer every request would wait for ever; add slots. With two track "
        "slots a request owns 3: check_pools knows how many there are.",
    )
    interval = c.recurrent_track_interval
    require(
        _is_int(interval) and interval > 0 and interval % c.page_size == 0,
        f"recurrent_track_interval={interval!r} with page_size={c.page_size}",
        "a positive multiple of page_size",
        "Round the interval up to whole pages.",
    )
    require(
        c.recurrent_grid <= c.max_prefix_pages * c.page_size,
        f"recurrent_track_interval={interval} with a longest key of "
        f"{c.max_prefix_pages * c.page_size} tokens",
        "an interval no longer than the longest key",
        "No prefix could ever hit; shorten the interval or raise max_prefix_pages.",
    )


def _is_int(value) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _names(c: CacheConfig) -> str:
    return "(" + ", ".join(m.name for m in c.components) + ")"
