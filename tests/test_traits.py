"""What configs of public models ask of the cache."""

import jax
import pytest
from hf_configs import (
    BAILING_2_5,
    BAILING_3,
    GPT_OSS,
    KIMI_LINEAR,
    MIMO,
    QWEN3,
    QWEN3_5,
    RING_LINEAR,
    SMOL,
)

from uhrc_fn.pools.kv import KVConfig
from uhrc_fn.pools.mla import MLAConfig
from uhrc_fn.serving.models.config import FAMILIES, ModelConfig, small_config
from uhrc_fn.serving.models.model import init_model
from uhrc_fn.serving.models.traits import traits_from_hf_config

FULL, SWA, RECURRENT = ("FULL",), ("FULL", "SWA"), ("FULL", "RECURRENT")


def full_layers(traits):
    return traits.nearest.layers_of("gqa", "mla")


@pytest.mark.parametrize(
    ("config", "components", "layout", "family", "full"),
    [
        (KIMI_LINEAR, RECURRENT, "mla", "kda", (3, 7, 11, 15, 19, 23, 26)),
        (QWEN3_5, RECURRENT, "mha", "gdn", tuple(range(3, 64, 4))),
        (BAILING_2_5, RECURRENT, "mla", "gla", (7, 15)),
        (BAILING_3, RECURRENT, "mla", "kda", tuple(range(3, 24, 4))),
        (RING_LINEAR, RECURRENT, "mha", "gla", (4, 9, 14, 19)),
        (MIMO, SWA, "mha", None, (0, 5, 8)),
        (GPT_OSS, SWA, "mha", None, tuple(range(1, 24, 2))),
        (SMOL, FULL, "mha", None, tuple(range(30))),
        (QWEN3, FULL, "mha", None, tuple(range(36))),
    ],
)
def test_public_models_are_recognised(config, components, layout, family, full):
    traits = traits_from_hf_config(config)
    assert traits.components == components
    assert traits.kv_layout == layout
    assert traits.recurrent_family == family
    assert full_layers(traits) == full


def test_kimi_linear_keeps_latents_and_kda_states():
    traits = traits_from_hf_config(KIMI_LINEAR)
    (latents,) = traits.kv_configs(num_pages=8, page_size=64)
    assert isinstance(latents, MLAConfig)
    assert (latents.kv_lora_rank, latents.rope_head_dim) == (512, 64)
    assert latents.layers == (3, 7, 11, 15, 19, 23, 26)
    states = traits.recurrent_config(num_slots=4)
    assert states.temporal_shape == (5, 32, 128, 128)
    assert states.conv_shape == (5, 3 * 32 * 128, 3)
    assert not traits.nearest.mla_rope
    # Eight experts and a shared one of 1024 each.
    assert traits.nearest.intermediate_size == 9 * 1024
    assert traits.missing == ("mixture of experts",) and traits.config is None


def test_a_dense_kimi_linear_can_be_built():
    traits = traits_from_hf_config(KIMI_LINEAR | {"num_experts": 0})
    assert traits.config == traits.nearest
    assert traits.config.intermediate_size == 9216


def test_gdn_has_key_heads_of_its_own():
    traits = traits_from_hf_config(QWEN3_5)
    states = traits.recurrent_config(num_slots=4)
    assert (states.num_k_heads, states.num_v_heads) == (16, 48)
    assert states.conv_shape == (5, (2 * 16 + 48) * 128, 3)
    assert traits.nearest.rotary_dim == 64 and traits.nearest.rope_theta == 1e7
    assert "output gate of the attention" in traits.missing


def test_lightning_has_no_convolution_and_ling_3_has():
    lightning = traits_from_hf_config(BAILING_2_5).recurrent_config(num_slots=4)
    assert not lightning.has_conv
    assert lightning.temporal_shape == (5, 64, 128, 128)
    kda = traits_from_hf_config(BAILING_3).recurrent_config(num_slots=4)
    assert kda.conv_kernel_size == 4 and kda.num_v_heads == 16


def test_what_is_left_of_the_last_group_is_full():
    traits = traits_from_hf_config(RING_LINEAR | {"num_hidden_layers": 22})
    assert full_layers(traits) == (4, 9, 14, 19, 20, 21)


def test_sliding_layers_have_heads_of_their_own():
    traits = traits_from_hf_config(MIMO)
    full, swa = traits.kv_configs(num_pages=8, page_size=64, num_swa_pages=4)
    assert isinstance(full, KVConfig) and isinstance(swa, KVConfig)
    assert (full.num_kv_heads, full.layers) == (4, (0, 5, 8))
    assert (swa.num_kv_heads, swa.layers) == (8, (1, 2, 3, 4, 6, 7))
    assert (full.num_pages, swa.num_pages) == (8, 4)
    assert traits.nearest.sliding_window == 128
    assert traits.nearest.rotary_dim == 64
    assert {
        "attention sinks",
        "other heads in sliding layers",
        "another rope theta in sliding layers",
        "value heads of another width",
    } <= set(traits.missing)


SLIDES = {"sliding_window": 512, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "full"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, (1, 3, 5)),
        ({"sliding_window_pattern": 3}, (2, 5)),
        ({"sliding_window_pattern": "LLG"}, (2, 5)),
        ({"model_type": "gemma3_text"}, (5,)),
        ({"max_window_layers": 4}, (0, 1, 2, 3)),
        ({"use_sliding_window": False}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_ways_to_say_which_layers_slide(changes, full):
    traits = traits_from_hf_config(SMOL | {"num_hidden_layers": 6} | SLIDES | changes)
    assert full_layers(traits) == full


def test_a_plain_model_can_be_built():
    smol = traits_from_hf_config(SMOL).config
    assert smol == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        layers=("gqa",) * 30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        dtype="bfloat16",
    )
    shapes = jax.eval_shape(lambda: init_model(jax.random.key(0), smol))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 134_515_008
    qwen3 = traits_from_hf_config(QWEN3).config
    assert qwen3 is not None and qwen3.qk_norm and qwen3.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "qwen2"}, "bias of the attention"),
        ({"attention_bias": True}, "bias of the attention"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling 'llama3'"),
        ({"model_type": "starcoder2"}, "blocks of model_type 'starcoder2'"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"final_logit_softcapping": 30.0}, "capped logits"),
    ],
)
def test_a_model_with_more_than_we_compute_is_not_built(changes, reason):
    traits = traits_from_hf_config(SMOL | changes)
    assert traits.config is None and reason in traits.missing


LINEAR_TYPES = ["linear_attention", "sliding_attention", "full_attention"] * 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (KIMI_LINEAR | {"linear_num_value_heads": 32}, "wanted one family"),
        (QWEN3_5["text_config"] | {"layer_group_size": 4}, "wanted one family"),
        (
            SMOL | {"layer_types": LINEAR_TYPES, "linear_num_value_heads": 4},
            "sliding windows and linear-recurrent",
        ),
        (SMOL | {"layer_types": LINEAR_TYPES}, "dimensions of a known family"),
        (SMOL | {"layer_types": ["mamba"] * 30}, "'mamba' in layer_types"),
        (SMOL | {"layer_types": ["full_attention"]}, "1 kinds of layers"),
        (SMOL | {"mamba_num_heads": 64}, "mamba_num_heads=64"),
        (SMOL | {"sliding_window": 4096}, "a gqa layer beside"),
        (KIMI_LINEAR | {"index_topk": 2048}, "indexer"),
        (KIMI_LINEAR | {"num_hidden_layers": 28}, "Layers count from 1"),
        (RING_LINEAR | {"layer_group_size": 0}, "layer_group_size=0"),
        ({k: v for k, v in SMOL.items() if k != "vocab_size"}, "without vocab_size"),
        ({}, "num_hidden_layers=None"),
    ],
)
def test_what_cannot_be_served_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        traits_from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ("kda", "gdn")}, "one family"),
        ({"layers": ("mla", "gqa")}, "either mla, or gqa"),
        ({"layers": ("swa", "gla")}, "not both"),
        ({"layers": ("swa", "swa")}, "a gqa layer beside"),
        ({"layers": ()}, "at least one"),
        ({"layers": ["gqa"]}, "a tuple"),
        ({"layers": ("mamba",)}, "a tuple of"),
        ({"num_kv_heads": 3}, "a multiple of the kv heads"),
        ({"rotary_dim": 3}, "an even number"),
        ({"rotary_dim": 32}, "at most head_dim=16"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"dtype": "int32"}, "a floating type"),
        ({"layers": ("mla",)}, "kv_lora_rank=0"),
        ({"layers": ("gla", "gqa")}, "recurrent_v_heads=0"),
    ],
)
def test_a_config_that_fits_no_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small_config("gqa", **changes)


def test_small_configs_are_of_their_families():
    with pytest.raises(ValueError, match="family='mamba'"):
        small_config("mamba")
    for family in FAMILIES:
        config = small_config(family, num_layers=8)
        assert config.num_layers == 8
        assert set(config.layers) == set(family.split("-"))
