"""Shapes of published models, as their `config.json` gives them, with as many layers as a benchmark
can hold.
"""

from benchmarks.lib.report import JsonObject

# name: layers whose weights, gradients and two moments fit a GPU of 80 GB in float32
LAYERS = {"olmoe": 6, "mixtral": 2, "qwen3": 4}

CONFIGS: dict[str, JsonObject] = {
    "olmoe": {  # allenai/OLMoE-1B-7B-0924, 16 layers
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "mixtral": {  # mistralai/Mixtral-8x7B-v0.1, 32 layers
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "router_aux_loss_coef": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "qwen3": {  # Qwen/Qwen3-30B-A3B, 48 layers
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {  # openai/gpt-oss-20b, 24 layers: every other one sees 128 tokens
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "router_aux_loss_coef": 0.9,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "tie_word_embeddings": False,
    },
    # deepseek-ai/DeepSeek-V2-Lite, 27 layers, with DeepSeek-V3's router: keys of 192, values of 128
    "deepseek-lite": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # deepseek-ai/DeepSeek-V3, 61 layers
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


def published_config(name: str, layers: int) -> JsonObject:
    """Return the fields of a published model's `config.json`, with this number of layers."""
    return CONFIGS[name] | {"num_hidden_layers": layers}


def tiny_config(name: str) -> JsonObject:
    """Return the same model at a toy size: two layers of four experts, hidden size 64."""
    config = published_config(name, 2)
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    small = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    inner = (
        {"moe_intermediate_size": 64, "head_dim": 16} if "moe_intermediate_size" in config else {}
    )
    return config | small | inner | {experts: 4, "num_experts_per_tok": 2, "vocab_size": 256}
