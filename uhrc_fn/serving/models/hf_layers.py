"""Which kind each layer is, by the fields of a Hugging Face config.json.

Fields, and the public configs or modelling code that they were read from:

| field | in | says |
|---|---|---|
| `linear_attn_config` | moonshotai/Kimi-Linear-48B-A3B | layers by number, from 1 |
| `layer_types` | Qwen3.5, Qwen3-Next, gpt-oss, Gemma 3 | the kind of each |
| `layers_block_type` | Ling 2.6 | the kind of each |
| `full_attention_interval` | Qwen3.5, Qwen3-Next | each n-th is full, others GDN |
| `layer_group_size` | Ring-linear 2.0, Ling 2.5, Ling 3.0 | each n-th is full |
| `hybrid_layer_pattern` | XiaomiMiMo/MiMo-V2-Flash | 1 where it slides |
| `sliding_window_pattern` | Gemma 3, EXAONE 4 | each n-th is full, or letters |
| `max_window_layers` | Qwen2, Qwen3 | layers from there on slide |
"""

from collections.abc import Mapping
from typing import Any

from ...pools.layout import require

_WORDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "swa",
    "linear_attention": "linear",
}
_UNSERVED = ("mamba_num_heads", "mamba_d_state", "ssm_state_size", "rwkv_version")
# Each n-th layer is full where their configs do not say so.
_PATTERNS = {"gpt_oss": 2, "gemma2": 2, "gemma3": 6, "gemma3_text": 6}


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kind of each layer: "full", "swa", "kda", "gdn" or "gla".

    Args:
      config: of the text model.

    Raises:
      ValueError: the layers cannot be told, or no cache can serve them together.
    """
    for field in _UNSERVED:
        require(
            config.get(field) is None,
            f"{field}={config.get(field)!r}",
            "recurrent layers of KDA, GDN or GLA",
            "Layers of another family cannot be served.",
        )
    number = config.get("num_hidden_layers")
    require(
        isinstance(number, int) and number > 0,
        f"num_hidden_layers={number!r}",
        "a positive integer",
        "Pass the model's config.json, as a dict.",
    )
    words = _words(config, int(number))  # type: ignore[arg-type]
    require(
        len(words) == number,
        f"{len(words)} kinds of layers with num_hidden_layers={number}",
        "one for each layer",
        "Correct the config.",
    )
    family = _linear_family(config)
    if "linear" in words:
        require(
            family is not None,
            "linear_attention layers without dimensions of a known family",
            "linear_num_value_heads (GDN), linear_attn_config (KDA) or "
            "layer_group_size (GLA)",
            "Layers of another family cannot be served.",
        )
    kinds = tuple(str(family) if word == "linear" else word for word in words)
    slides = "swa" in kinds
    require(
        not (slides and "linear" in words),
        "sliding windows and linear-recurrent layers",
        "one of them",
        "The cache has no such set of components.",
    )
    return kinds


def _words(config: Mapping[str, Any], number: int) -> list[str]:
    """Kinds as the config words them: "full", "swa" or "linear"."""
    linear = config.get("linear_attn_config")
    if linear and linear.get("kda_layers"):
        return _numbered(linear, number)
    for field in ("layer_types", "layers_block_type"):
        if config.get(field) is not None:
            return [_translated(field, word) for word in config[field]]
    if config.get("hybrid_layer_pattern") is not None:
        return [
            "swa" if slides else "full" for slides in config["hybrid_layer_pattern"]
        ]
    if config.get("linear_num_value_heads") is not None:
        interval = config.get("full_attention_interval", 4)
        return _every("linear", _positive("full_attention_interval", interval), number)
    if config.get("layer_group_size") is not None:
        size = _positive("layer_group_size", config["layer_group_size"])
        words = _every("linear", size, number)
        whole = number // size * size
        # What is left of the last group attends to all tokens.
        return words[:whole] + ["full"] * (number - whole)
    return _sliding(config, number)


def _sliding(config: Mapping[str, Any], number: int) -> list[str]:
    """Kinds of a model without linear layers and without a list of them."""
    if not window_of(config):
        return ["full"] * number
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    given = [config[name] for name in names if config.get(name) is not None]
    pattern = given[0] if given else _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str):
        letters = (pattern * number)[:number]
        return ["swa" if letter == "L" else "full" for letter in letters]
    if pattern is not None:
        return _every("swa", _positive("sliding_window_pattern", pattern), number)
    first = config.get("max_window_layers", 0)
    return ["full" if layer < first else "swa" for layer in range(number)]


def window_of(config: Mapping[str, Any]) -> int:
    """Tokens of the sliding window; 0 where there is none, or it is switched off."""
    if config.get("use_sliding_window") is False:
        return 0
    return config.get("sliding_window") or config.get("sliding_window_size") or 0


def is_bailing_kda(config: Mapping[str, Any]) -> bool:
    """Whether a Bailing hybrid is of Ling 3.0, whose linear layers are KDA.

    It shares `model_type` and `layer_group_size` with Ling 2.5; only the short
    convolution and the architecture's name tell them apart.
    """
    names = config.get("architectures") or ()
    is_named = any("BailingMoeV3" in name for name in names)
    return is_named or config.get("short_conv_kernel_size") is not None


def _linear_family(config: Mapping[str, Any]) -> str | None:
    """Family of the linear layers by the dimensions given; `None` without any."""
    linear = config.get("linear_attn_config") or {}
    found = {"kda"} if linear.get("kda_layers") else set()
    if config.get("linear_num_value_heads") is not None:
        found.add("gdn")
    if config.get("layer_group_size") is not None:
        found.add("kda" if is_bailing_kda(config) else "gla")
    require(
        len(found) <= 1,
        f"linear-recurrent layers of {sorted(found)}",
        "one family",
        "Their states differ in shape, and a model has one pool of them.",
    )
    return next(iter(found), None)


def _numbered(linear: Mapping[str, Any], number: int) -> list[str]:
    """Kinds from lists of layers that count from 1."""
    kda, full = list(linear["kda_layers"]), list(linear.get("full_attn_layers") or ())
    require(
        sorted(kda + full) == list(range(1, number + 1)),
        f"kda_layers={kda} and full_attn_layers={full}",
        f"each of 1 to {number} once",
        "Layers count from 1 in linear_attn_config.",
    )
    return ["linear" if layer + 1 in kda else "full" for layer in range(number)]


def _translated(field: str, word: Any) -> str:
    require(
        word in _WORDS,
        f"{word!r} in {field}",
        f"one of {tuple(_WORDS)}",
        "Layers of another kind cannot be served.",
    )
    return _WORDS[word]


def _every(kind: str, interval: int, number: int) -> list[str]:
    """Layers of a kind, but each `interval`-th, which is full."""
    return ["full" if (layer + 1) % interval == 0 else kind for layer in range(number)]


def _positive(name: str, value: Any) -> int:
    require(
        isinstance(value, int) and value > 0,
        f"{name}={value!r}",
        "a positive integer",
        "Correct the config.",
    )
    return value
