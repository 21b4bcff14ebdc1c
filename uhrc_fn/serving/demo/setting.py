"""The model and the engines of a demo."""

import dataclasses

import jax

from ...config import CacheConfig
from ..config import ServeConfig
from ..engine import Engine
from ..models.config import ModelConfig, small_config
from ..models.model import Model, init_model, init_pools

BYTES = 256
_CHUNK = 64
_CAPACITY_TOKENS = 16_384


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that two engines share, and the one thing that sets them apart."""

    model: Model
    config: ServeConfig
    steps_per_call: int

    def engine(self, *, use_cache: bool) -> Engine:
        """An engine with empty pools; the control holds no operation of the cache."""
        config = dataclasses.replace(self.config, use_cache=use_cache)
        pages, swa_pages, slots = config.pool_pages
        pools = init_pools(
            self.model.config,
            num_pages=pages,
            page_size=config.cache.page_size,
            num_swa_pages=swa_pages,
            num_slots=slots,
        )
        return Engine(self.model, config, pools, steps_per_call=self.steps_per_call)


def make_setting(arguments, max_length: int) -> Setting:
    """Size everything for requests of up to `max_length` tokens.

    Raises:
      ValueError: options contradict each other, or no request would fit.
    """
    model = _model_config(arguments.family)
    config = _serve_config(arguments, model, max_length)
    weights = init_model(jax.random.key(arguments.seed), model)
    return Setting(weights, config, arguments.steps_per_call)


def _model_config(family: str) -> ModelConfig:
    """A model of bytes, large enough that computing prompts takes most of the time."""
    wide = {"hidden_size": 384, "intermediate_size": 1024, "head_dim": 32}
    model = small_config(family, vocab_size=BYTES, **wide)
    if not model.recurrent_layers:
        return model
    return dataclasses.replace(model, recurrent_v_dim=32)


def _serve_config(arguments, model: ModelConfig, max_length: int) -> ServeConfig:
    size, lanes = arguments.page_size, arguments.batch_slots
    interval = _track_interval(arguments, model)
    chunk = interval or _chunk(size)
    max_pages = -(-max_length // size)
    pages = arguments.capacity_pages or max(_CAPACITY_TOKENS // size, max_pages)
    more: dict = {}
    if model.has("swa"):
        more |= {"sliding_window_size": model.sliding_window, "num_swa_pages": pages}
    if model.recurrent_layers:
        # A snapshot for each interval that the pages hold, and what requests own.
        snapshots = -(-pages * size // (interval or chunk))
        more |= {
            "num_recurrent_slots": snapshots + 3 * lanes,
            "enable_recurrent_extra_buffer": size > 1,
            "recurrent_track_interval": interval,
        }
    cache = CacheConfig(
        components=model.components,
        page_size=size,
        num_pages=pages,
        max_prefix_pages=max_pages,
        max_live_receipts=2 * lanes + 2,
        **more,
    )
    return ServeConfig(
        cache=cache,
        max_length=max_length,
        num_requests=lanes,
        decode_lanes=lanes,
        chunk_tokens=chunk,
    )


def _chunk(page_size: int) -> int:
    """Tokens of a prefill chunk: whole pages, about as many as a CPU likes."""
    return max(_CHUNK // page_size, 1) * page_size


def _track_interval(arguments, model: ModelConfig) -> int | None:
    """Tokens between snapshots; `None` where no prefill is cut for them."""
    asked, size = arguments.track_interval, arguments.page_size
    if model.recurrent_layers and size > 1:
        # A multiple of the page: the cache's config checks it.
        return asked or _chunk(size)
    if asked:
        why = "page size 1 takes its snapshots without cutting a prefill"
        if not model.recurrent_layers:
            why = f"{arguments.family} has no recurrent layers"
        raise ValueError(
            f"--track-interval {asked}: {why}. Leave it out, or choose a hybrid of "
            "recurrent layers and --page-size 64."
        )
    return None
