"""The `config.json` of models as their authors publish them: read as it is, with the number of
parameters that the model has.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jmoe
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder, read_config
from tests.checkpoint_variants import write_variant
from tests.model_configs import CHECKPOINTS

PLAIN = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
GLM_4_5_AIR = PLAIN | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
DOTS_LLM1 = PLAIN | {
    "model_type": "dots1",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "scoring_func": "noaux_tc",
    "vocab_size": 152064,
}
MINIMAX_M2 = PLAIN | {
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
DEEPSEEK_V2_LITE = PLAIN | {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
ERNIE_4_5_21B_A3B = PLAIN | {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 103424,
    "rope_theta": 500000,
    "use_rmsnorm": True,
    "use_bias": False,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_capacity": [64, 64, 64],
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_gate": "topk",
    "moe_use_aux_free": True,
}


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        # without the layer that predicts further tokens, with which its page counts 110
        pytest.param(GLM_4_5_AIR, 106.85, id="GLM-4.5-Air"),
        pytest.param(DOTS_LLM1, 142.77, id="dots.llm1"),
        pytest.param(MINIMAX_M2, 228.69, id="MiniMax-M2"),
        pytest.param(DEEPSEEK_V2_LITE, 15.706484224, id="DeepSeek-V2-Lite"),
        pytest.param(DEEPSEEK_V2, 235.741434880, id="DeepSeek-V2"),
        pytest.param(ERNIE_4_5_21B_A3B, 21.83, id="ERNIE-4.5-21B-A3B"),
    ],
)
def test_as_published(fields: dict[str, Any], billions: float) -> None:
    shapes = abstract_decoder(model_config(fields))[2]
    elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert elements / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("glm4_moe", ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight")),
        (
            "ernie4_5_moe",
            ("model.mtp_block.0.input_layernorm.weight", "model.mtp_linear_proj.0.weight"),
        ),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    name: str, further: tuple[str, ...], tmp_path: Path
) -> None:
    """Their tensors change no logits; a folder that is written anew says that it has none."""

    def predicting(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | dict.fromkeys(further, np.ones((4, 4), np.float32))

    folder = write_variant(
        CHECKPOINTS / name, tmp_path / "with", predicting, num_nextn_predict_layers=1
    )
    model = jmoe.load_pretrained(folder)
    tokens = np.arange(12, dtype=np.int32)[None]
    np.testing.assert_array_equal(model(tokens), jmoe.load_pretrained(CHECKPOINTS / name)(tokens))
    jmoe.save_pretrained(model, tmp_path / "again")
    assert read_config(tmp_path / "again")["num_nextn_predict_layers"] == 0
