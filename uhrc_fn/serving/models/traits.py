"""`traits_from_hf_config`: what a model needs of the cache, by its config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...pools.kv import KVConfig
from ...pools.layout import require
from ...pools.mla import MLAConfig
from ...pools.recurrent_state import RecurrentConfig
from .config import ModelConfig
from .hf_layers import is_bailing_kda, layer_kinds, window_of

# Blocks that `model` computes as published, but for what `_missing` names.
_KNOWN = ("llama", "mistral", "qwen3", "kimi_linear")
_QK_NORM = ("qwen3", "gemma3")
_OUTPUT_GATE = ("qwen3_next", "qwen3_5")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """Components, pools and recurrent family of a model.

    Args:
      model_type: as the config says.
      nearest: layers and dimensions as `models` has them. A mixture of experts stands
        as an MLP of the width that one token activates.
      missing: what of the model `models` does not compute. Caches are of its shapes
        all the same, so that another forward can use them.
      swa_kv_heads: kv heads of sliding layers, 0 without such.
      swa_head_dim: their width.
      v_head_dim: width of a value head; a pool of K and V heads takes the wider.
    """

    model_type: str
    nearest: ModelConfig
    missing: tuple[str, ...] = ()
    swa_kv_heads: int = 0
    swa_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def config(self) -> ModelConfig | None:
        """Config to build the model from; `None` where something is missing."""
        return None if self.missing else self.nearest

    @property
    def layers(self) -> tuple[str, ...]:
        """Kind of each layer."""
        return self.nearest.layers

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the cache."""
        return self.nearest.components

    @property
    def kv_layout(self) -> str | None:
        """Pool of the attention layers: "mla" or "mha"; `None` without one."""
        if self.nearest.has("mla"):
            return "mla"
        return "mha" if self.nearest.attention_layers else None

    @property
    def recurrent_family(self) -> str | None:
        """Backend of the recurrent layers: "kda", "gdn" or "gla"; `None` without."""
        return self.nearest.recurrent_family

    def kv_configs(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_swa_pages: int = 0,
        dtype: str = "bfloat16",
    ) -> tuple[KVConfig | MLAConfig, ...]:
        """Configs of the KV pools: one, two with sliding layers, or none."""
        c = self.nearest
        shared = {"page_size": page_size, "dtype": dtype}
        if c.has("mla"):
            latents = MLAConfig(
                num_pages=num_pages,
                layers=c.layers_of("mla"),
                kv_lora_rank=c.kv_lora_rank,
                rope_head_dim=c.rope_head_dim,
                **shared,
            )
            return (latents,)

        def heads(kind, pages, kv_heads, head_dim):
            return KVConfig(
                num_pages=pages,
                layers=c.layers_of(kind),
                num_kv_heads=kv_heads,
                head_dim=max(head_dim, self.v_head_dim),
                **shared,
            )

        full = [heads("gqa", num_pages, c.num_kv_heads, c.head_dim)] * c.has("gqa")
        if not c.has("swa"):
            return tuple(full)
        swa = heads("swa", num_swa_pages, self.swa_kv_heads, self.swa_head_dim)
        return (*full, swa)

    def recurrent_config(
        self, *, num_slots: int, conv_dtype: str = "bfloat16"
    ) -> RecurrentConfig | None:
        """Config of the state pool; `None` without recurrent layers."""
        c = self.nearest
        if not c.recurrent_layers:
            return None
        return RecurrentConfig(
            num_slots=num_slots,
            layers=c.recurrent_layers,
            num_v_heads=c.recurrent_v_heads,
            v_head_dim=c.recurrent_v_dim,
            num_k_heads=c.recurrent_k_heads,
            k_head_dim=c.recurrent_k_dim,
            conv_kernel_size=c.conv_kernel_size,
            conv_dtype=conv_dtype,
        )


def traits_from_hf_config(config: Mapping[str, Any]) -> ModelTraits:
    """Read a config.json: Kimi Linear, Qwen3.5, Ling 2.5, sliding windows, plain ones.

    Args:
      config: the dict; of a multimodal model its `text_config` counts.

    Raises:
      ValueError: no cache can serve the model: two linear families, linear layers and
        sliding windows, layers of another kind, or no config at all.
    """
    text = {**config, **(config.get("text_config") or {})}
    require(
        not text.get("index_topk"),
        f"index_topk={text.get('index_topk')!r}",
        "attention without an index of its own",
        "Sparse attention caches keys of an indexer, for which there is no pool.",
    )
    is_mla = bool(text.get("kv_lora_rank"))
    full = "mla" if is_mla else "gqa"
    kinds = tuple(full if kind == "full" else kind for kind in layer_kinds(text))
    heads = _attention(text)
    settings = heads | _latents(text) if is_mla else heads
    slides = "swa" in kinds
    nearest = ModelConfig(
        vocab_size=_needed(text, "vocab_size"),
        hidden_size=_needed(text, "hidden_size"),
        intermediate_size=_width(text),
        layers=kinds,
        sliding_window=window_of(text) if slides else 0,
        norm_eps=_first(text, ("rms_norm_eps", "layernorm_epsilon"), 1e-6),
        tie_embeddings=bool(text.get("tie_word_embeddings", False)),
        dtype=_first(text, ("dtype", "torch_dtype"), "bfloat16"),
        **settings,
        **_recurrent(text, kinds, heads["head_dim"]),
    )
    kind = str(text.get("model_type", ""))
    return ModelTraits(
        model_type=kind,
        nearest=nearest,
        missing=_missing(text, kind, nearest),
        swa_kv_heads=_first(text, ("swa_num_key_value_heads",), nearest.num_kv_heads)
        if slides
        else 0,
        swa_head_dim=_first(text, ("swa_head_dim",), nearest.head_dim) if slides else 0,
        v_head_dim=0 if is_mla else text.get("v_head_dim") or 0,
    )


def _attention(c: Mapping[str, Any]) -> dict[str, Any]:
    heads = _needed(c, "num_attention_heads")
    head_dim = c.get("head_dim") or _needed(c, "hidden_size") // heads
    rope = _rope(c)
    share = _first(rope, ("partial_rotary_factor",), c.get("partial_rotary_factor"))
    kind = str(c.get("model_type", ""))
    return {
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope_theta": float(_first(rope, ("rope_theta",), c.get("rope_theta", 1e4))),
        "rotary_dim": int(head_dim * (share or 1)) // 2 * 2,
        "qk_norm": bool(c.get("use_qk_norm")) or kind.startswith(_QK_NORM),
    }


def _latents(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_lora_rank": c["kv_lora_rank"],
        "nope_head_dim": _needed(c, "qk_nope_head_dim"),
        "rope_head_dim": _needed(c, "qk_rope_head_dim"),
        "v_head_dim": _needed(c, "v_head_dim"),
        "mla_rope": not (c.get("mla_use_nope") or c.get("use_mla_nope")),
    }


def _recurrent(c: Mapping[str, Any], kinds, head_dim: int) -> dict[str, Any]:
    if "gdn" in kinds:
        return {
            "recurrent_v_heads": c["linear_num_value_heads"],
            "recurrent_v_dim": _needed(c, "linear_value_head_dim"),
            "recurrent_k_heads": _needed(c, "linear_num_key_heads"),
            "recurrent_k_dim": _needed(c, "linear_key_head_dim"),
            "conv_kernel_size": c.get("linear_conv_kernel_dim", 4),
        }
    own = c.get("linear_attn_config") or {}
    if "kda" in kinds and own.get("kda_layers"):
        return {
            "recurrent_v_heads": _needed(own, "num_heads"),
            "recurrent_v_dim": _needed(own, "head_dim"),
            "conv_kernel_size": own.get("short_conv_kernel_size", 4),
        }
    if "kda" not in kinds and "gla" not in kinds:
        return {}
    taps = _first(c, ("short_conv_kernel_size",), 4) if is_bailing_kda(c) else 1
    return {
        "recurrent_v_heads": _needed(c, "num_attention_heads"),
        "recurrent_v_dim": head_dim,
        "conv_kernel_size": taps,
    }


def _num_experts(c: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return _first(c, names, 0)


def _width(c: Mapping[str, Any]) -> int:
    """Width of the MLP; of a mixture of experts, what one token activates."""
    if _num_experts(c) <= 1:
        return _needed(c, "intermediate_size")
    names = ("moe_intermediate_size", "intermediate_size")
    expert = _first(c, names, 0)
    routed = _first(c, ("num_experts_per_tok", "num_experts_per_token"), 1)
    shared = _first(c, ("num_shared_experts", "n_shared_experts"), 0)
    own = c.get("shared_expert_intermediate_size") or shared * expert
    return routed * expert + own


def _missing(c: Mapping[str, Any], kind: str, nearest: ModelConfig) -> tuple[str, ...]:
    """What the config asks for and `models` does not compute."""
    rope = {**(c.get("rope_scaling") or {}), **_rope(c)}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    swa_heads = [c.get("swa_num_key_value_heads"), c.get("swa_head_dim")]
    own_heads = [nearest.num_kv_heads, nearest.head_dim]
    differs = lambda a, b: a is not None and a != b
    act = _first(c, ("hidden_act", "hidden_activation"), "silu")
    is_gated = kind.startswith(_OUTPUT_GATE) or c.get("attn_output_gate")
    has_bias = c.get("attention_bias") or c.get("use_qkv_bias") or kind == "qwen2"
    has_sinks = kind == "gpt_oss" or c.get("add_swa_attention_sink_bias")
    local_theta = _first(c, ("rope_local_base_freq", "swa_rope_theta"), None)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    is_gqa = not nearest.has("mla")
    reasons = {
        f"blocks of model_type {kind!r}": kind not in _KNOWN,
        "mixture of experts": _num_experts(c) > 1,
        "low-rank queries": not is_gqa and c.get("q_lora_rank"),
        "bias of the attention": has_bias,
        "output gate of the attention": is_gated or c.get("mla_use_output_gate"),
        "attention sinks": has_sinks,
        f"activation {act!r}": act not in ("silu", "swish"),
        "capped logits": any(c.get(name) for name in caps),
        f"rope scaling {scaling!r}": scaling != "default",
        "another rope theta in sliding layers": nearest.has("swa")
        and differs(local_theta, nearest.rope_theta),
        "other heads in sliding layers": any(map(differs, swa_heads, own_heads)),
        "value heads of another width": is_gqa
        and differs(c.get("v_head_dim"), nearest.head_dim),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def _rope(c: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rotary parameters of the layers that attend to all tokens."""
    rope = c.get("rope_parameters") or {}
    return rope.get("full_attention") or rope


def _needed(c: Mapping[str, Any], name: str) -> Any:
    require(
        c.get(name) is not None,
        f"a config without {name}",
        f"{name}, as an integer",
        "Pass the model's config.json, as a dict.",
    )
    return c[name]


def _first(c: Mapping[str, Any], names: tuple[str, ...], default: Any) -> Any:
    """The first of the named fields that is given."""
    return next((c[name] for name in names if c.get(name) is not None), default)
