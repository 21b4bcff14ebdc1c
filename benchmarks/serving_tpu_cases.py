"""One chip's share of large models: shapes only, for `serving_tpu.py`."""

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from uhrc_fn import CacheConfig
from uhrc_fn.pools.tracking import TrackMetadata
from uhrc_fn.serving.config import ServeConfig
from uhrc_fn.serving.lanes import Lanes
from uhrc_fn.serving.models.config import ModelConfig
from uhrc_fn.serving.models.model import forward, init_model, init_pools
from uhrc_fn.serving.models.traits import traits_from_hf_config
from uhrc_fn.serving.state import init_serving

PAGE_SIZE, BATCH, CONTEXT, CHUNK = 128, 32, 4096, 512


@dataclasses.dataclass(frozen=True)
class TpuModel:
    """A model's share of one chip, and the server that would run there.

    Args:
      name: of the model.
      chips: that share its weights, by heads and widths.
      model: layers of all of it, dimensions of one chip.
      num_pages: what fits beside the weights in 32 GB.
      num_slots: likewise; 0 without recurrent layers.
      batch: requests at once.
    """

    name: str
    chips: int
    model: ModelConfig
    num_pages: int
    num_slots: int = 0
    batch: int = BATCH

    @property
    def config(self) -> ServeConfig:
        """Settings of the step."""
        more: dict = {}
        if self.num_slots:
            more = {
                "num_recurrent_slots": self.num_slots,
                "enable_recurrent_extra_buffer": True,
                "recurrent_track_interval": CHUNK,
            }
        cache = CacheConfig(
            components=self.model.components,
            page_size=PAGE_SIZE,
            num_pages=self.num_pages,
            max_prefix_pages=CONTEXT // PAGE_SIZE,
            **more,
        )
        return ServeConfig(
            cache=cache,
            max_length=CONTEXT,
            num_requests=self.batch,
            decode_lanes=self.batch,
            chunk_tokens=CHUNK,
        )

    def state(self, *, use_cache: bool) -> Any:
        """Shapes of the server's state; the control's pools are smaller."""
        config = dataclasses.replace(self.config, use_cache=use_cache)
        pages, _, slots = config.pool_pages
        make = lambda: init_serving(config, self._pools(self.model, pages, slots))
        return jax.eval_shape(make)

    def forward(self, pools: Any, model: Any, lanes: Lanes) -> Any:
        """One forward that decodes."""
        return forward(model, pools, lanes)

    def forward_args(self, layers: tuple[str, ...]) -> tuple:
        """Shapes of pools, weights and lanes of a model with these layers."""
        model = dataclasses.replace(self.model, layers=layers)

        def make():
            lanes = lambda *axes, dtype=jnp.int32: jnp.zeros((self.batch, *axes), dtype)
            decode = Lanes(
                token_ids=lanes(1),
                start=lanes(),
                num_new=lanes(),
                pages=lanes(CONTEXT // PAGE_SIZE),
                swa_pages=lanes(0),
                slots=lanes(),
                track=TrackMetadata(lanes(), lanes(dtype=bool)),
            )
            pools = self._pools(model, self.num_pages, self.num_slots)
            return pools, init_model(jax.random.key(0), model), decode

        return jax.eval_shape(make)

    @property
    def weight_bytes(self) -> int:
        """Weights that a step reads: of the embedding it reads a few rows."""
        model = jax.eval_shape(lambda: init_model(jax.random.key(0), self.model))
        skipped = 0 if model.head is None else _bytes(model.embedding)
        return _bytes(model) - skipped

    @property
    def kv_bytes(self) -> int:
        """KV of all requests at full context."""
        kv = self.state(use_cache=True).pools.kv
        return _bytes(kv) // (self.num_pages + 1) * self.batch * (CONTEXT // PAGE_SIZE)

    @property
    def state_bytes(self) -> int:
        """Recurrent states, read and written."""
        states = self.state(use_cache=True).pools.states
        return _bytes(states) // (self.num_slots + 1) * self.batch * 2

    def _pools(self, model: ModelConfig, pages: int, slots: int) -> Any:
        return init_pools(model, num_pages=pages, page_size=PAGE_SIZE, num_slots=slots)


def tpu_models() -> list[TpuModel]:
    """Qwen3-8B on two chips, Kimi-Linear-48B on eight."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    configs = importlib.import_module("hf_configs")
    qwen = traits_from_hf_config(configs.QWEN3).nearest
    kimi = traits_from_hf_config(configs.KIMI_LINEAR).nearest
    # A mixture of experts stands as an MLP that reads as much: the shared expert, and
    # those that a batch of independent tokens is expected to choose.
    of = configs.KIMI_LINEAR
    share = of["num_experts_per_token"] / of["num_experts"]
    chosen = of["num_experts"] * (1 - (1 - share) ** BATCH) + of["num_shared_experts"]
    width = round(chosen * of["moe_intermediate_size"])
    kimi = dataclasses.replace(kimi, intermediate_size=width)
    return [
        TpuModel("Qwen3-8B", 2, _share(qwen, 2), num_pages=2_304),
        TpuModel("Kimi-Linear-48B", 8, _share(kimi, 8), 8_192, num_slots=1_024),
    ]


def _share(model: ModelConfig, chips: int) -> ModelConfig:
    """One chip's part of a model; a width is rounded to whole registers."""
    part = lambda count: -(-count // chips)
    return dataclasses.replace(
        model,
        vocab_size=part(model.vocab_size),
        intermediate_size=-(-part(model.intermediate_size) // 128) * 128,
        num_heads=part(model.num_heads),
        num_kv_heads=part(model.num_kv_heads),
        recurrent_v_heads=part(model.recurrent_v_heads),
        recurrent_k_heads=part(model.recurrent_k_heads or 0) or None,
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
