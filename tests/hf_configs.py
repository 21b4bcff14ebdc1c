"""Parts of public models' configs, as plain dicts.

Each holds the fields that matter, named and arranged as in the config.json of the model
above it. Sizes are of that model's order; not all of them are its own.
"""

# moonshotai/Kimi-Linear-48B-A3B-Instruct
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

# Qwen/Qwen3.5-27B, its text part
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}

# inclusionAI/Ling-2.5: Lightning and MLA, seven to one
BAILING_2_5 = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 16,
    "layer_group_size": 8,
    "vocab_size": 157184,
    "hidden_size": 8192,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "partial_rotary_factor": 0.5,
    "group_norm_size": 8,
    "use_qk_norm": True,
}

# inclusionAI/Ling-3.0-tiny: the same model_type, but KDA
BAILING_3 = {
    **BAILING_2_5,
    "architectures": ["BailingMoeV3ForCausalLM"],
    "num_hidden_layers": 24,
    "layer_group_size": 4,
    "hidden_size": 1536,
    "num_attention_heads": 16,
    "short_conv_kernel_size": 4,
}

# inclusionAI/Ring-mini-linear-2.0: Lightning and GQA
RING_LINEAR = {
    "architectures": ["BailingMoeLinearV2ForCausalLM"],
    "model_type": "bailing_moe_linear",
    "num_hidden_layers": 20,
    "layer_group_size": 5,
    "vocab_size": 157184,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "partial_rotary_factor": 0.5,
}

# XiaomiMiMo/MiMo-V2-Flash, cut to nine layers
MIMO = {
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 9,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 0],
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000.0,
    "swa_rope_theta": 10000.0,
    "layernorm_epsilon": 1e-5,
    "add_swa_attention_sink_bias": True,
}

# openai/gpt-oss-20b, its alternation left to the default
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "rope_theta": 150000,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
}

# HuggingFaceTB/SmolLM2-135M-Instruct
SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

# Qwen/Qwen3-8B
QWEN3 = {
    **SMOL,
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
