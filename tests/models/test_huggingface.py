"""Configurations of Hugging Face folders: what is read, what is written back, and every option
that is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from jmoe.config import (
    LinearRopeConfig,
    Llama3RopeConfig,
    ModelConfig,
    RopeScaling,
    RouterConfig,
    YarnConfig,
)
from jmoe.configs import PRESETS
from jmoe.models.huggingface import hf_config, model_config, updated_hf_config
from tests.compressed_checkpoint import compressed_tensors
from tests.model_configs import CHECKPOINTS

NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())


def fields_of(name: str, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((CHECKPOINTS / name / "config.json").read_text()) | changes
    return fields


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def test_mixtral_as_published() -> None:
    """The file of mistralai/Mixtral-8x7B-v0.1: theta beside the other fields, no
    rope_parameters.
    """
    config = model_config(
        {
            "model_type": "mixtral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        }
    )
    preset = PRESETS["mixtral-8x7b"][1].model
    assert dataclasses.replace(preset, router=RouterConfig(aux_loss_coef=2 * 0.02)) == config


def test_gpt_oss_as_published() -> None:
    """openai/gpt-oss-20b: rope_scaling instead of rope_parameters, quantized experts, windows in
    every second layer.
    """
    config = model_config(
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        }
    )
    assert config.total_and_active_parameters()[0] == pytest.approx(20.9e9, rel=0.01)
    assert config.rope_scaling == YarnConfig(
        factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    assert config.rope_theta == 150_000 and config.layer_types[:2] == (
        "sliding_attention",
        "full_attention",
    )


def test_defaults_of_the_families() -> None:
    """What a file leaves out is what transformers' configuration classes say."""
    names = (
        "rope_parameters",
        "rms_norm_eps",
        "sliding_window",
        "layer_types",
        "head_dim",
        "attention_bias",
    )
    gpt_oss = model_config(without(fields_of("gpt_oss"), *names))
    assert gpt_oss.sliding_window == 128 and gpt_oss.layer_types[:2] == (
        "sliding_attention",
        "full_attention",
    )
    assert (
        gpt_oss.rope_scaling is not None
        and gpt_oss.rope_scaling.factor == 32.0
        and gpt_oss.rope_theta == 150_000
    )
    assert gpt_oss.norm_eps == 1e-5 and gpt_oss.head_dim == 64 and gpt_oss.attention_bias
    qwen = fields_of("qwen2_moe", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert (
        model_config(without(qwen, "layer_types")).layer_types
        == ("sliding_attention",) + ("full_attention",) * 2
    )
    off = model_config(
        fields_of("qwen2_moe", use_sliding_window=False, sliding_window=4, layer_types=None)
    )
    assert off.sliding_window is None and off.layer_types == ()
    deepseek = model_config(without(fields_of("deepseek_v3"), "q_lora_rank"))
    assert deepseek.q_lora_rank == 1536
    assert model_config(fields_of("deepseek_v3", q_lora_rank=None)).q_lora_rank is None
    assert model_config(fields_of("mixtral", num_key_value_heads=None)).num_key_value_heads == 4


def test_yarn_without_a_factor() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10.0,
        "original_max_position_embeddings": 16,
        "factor": None,
    }
    config = model_config(fields_of("olmoe", rope_parameters=rope, max_position_embeddings=64))
    assert config.rope_scaling == YarnConfig(factor=4.0, original_max_position_embeddings=16)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
STRETCHED = YarnConfig(factor=2.0, original_max_position_embeddings=16)
LINEAR = {"rope_type": "linear", "factor": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1, 1.5, 2, 3],
    "long_factor": [1, 2, 3, 4],
    "original_max_position_embeddings": 16,
}
LLAMA3_READ = Llama3RopeConfig(8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({"rope_theta": 700.0, "rope_scaling": YARN}, 700.0, STRETCHED),  # transformers 4
        ({"rope_theta": 700, "rope_scaling": {"type": "yarn"} | YARN}, 700.0, STRETCHED),
        ({"rope_parameters": YARN | {"rope_theta": 700.0}}, 700.0, STRETCHED),  # transformers 5
        # one, and what a model's card adds
        ({"rope_parameters": PLAIN, "rope_scaling": YARN}, 700.0, STRETCHED),
        ({"rope_theta": 500.0, "rope_parameters": PLAIN, "rope_scaling": YARN}, 500.0, STRETCHED),
        ({"rope_parameters": YARN | {"rope_theta": 700.0}, "rope_scaling": YARN}, 700.0, STRETCHED),
        ({"rope_parameters": {}, "rope_scaling": YARN}, 1e6, STRETCHED),
        ({"rope_parameters": PLAIN, "rope_scaling": None}, 700.0, None),
        ({"rope_parameters": PLAIN, "rope_theta": 500.0}, 700.0, None),
        # which transformers does not read
        ({"rope_scaling": YARN | {"attn_factor": 1.5}}, 1e6, STRETCHED),
        (  # the field beside the table goes first, as in transformers
            {"rope_scaling": YARN, "original_max_position_embeddings": 8},
            1e6,
            dataclasses.replace(STRETCHED, original_max_position_embeddings=8),
        ),
        ({"rope_parameters": LINEAR | {"rope_theta": 700.0}}, 700.0, LinearRopeConfig(2.0)),
        (
            {"rope_theta": 700.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            700.0,
            LinearRopeConfig(2.0),
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 700.0}}, 700.0, LLAMA3_READ),
        ({"rope_theta": 700.0, "rope_scaling": LLAMA3}, 700.0, LLAMA3_READ),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
            1e6,
            dataclasses.replace(LLAMA3_READ, original_max_position_embeddings=8),
        ),
        (
            {
                "rope_scaling": LLAMA3 | {"original_max_position_embeddings": None},
                "max_position_embeddings": 32,
            },
            1e6,
            dataclasses.replace(LLAMA3_READ, original_max_position_embeddings=32),
        ),
    ],
)
def test_positions_in_either_spelling_or_both(
    fields: dict[str, Any], theta: float, scaling: RopeScaling | None
) -> None:
    config = model_config(without(fields_of("mixtral"), "rope_parameters", "rope_theta") | fields)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    "scaling", [YARN, LINEAR, LLAMA3, LONGROPE, LINEAR | {"rope_type": "dynamic"}]
)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_scaled_positions_are_written_back(family: str, scaling: dict[str, Any]) -> None:
    """In either spelling; the new table replaces the old one."""
    for beside in ({}, {"original_max_position_embeddings": 8}):
        old = without(fields_of(family), "rope_parameters") | {"rope_scaling": scaling} | beside
        config = model_config(old)
        assert config.rope_scaling is not None
        changed = updated_hf_config(old, config)
        assert "rope_scaling" not in changed
        for written in (hf_config(config), changed):
            again = model_config(written)
            assert (again.rope_theta, again.rope_scaling) == (
                config.rope_theta,
                config.rope_scaling,
            )


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        (YARN, YARN | {"factor": 4.0}),
        (YARN, {"rope_type": "default"}),
        (YARN | {"beta_fast": 16.0}, YARN),
        (PLAIN, YARN | {"rope_theta": 500.0}),
        ({"rope_type": "linear", "factor": 2.0}, YARN),
    ],
)
def test_two_spellings_that_differ(parameters: dict[str, Any], scaling: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"rope_scaling = .*: must say what rope_parameters = .* says, or one must be",
    ):
        model_config(fields_of("mixtral", rope_parameters=parameters, rope_scaling=scaling))


def test_kimi_k2_as_published() -> None:
    """moonshotai/Kimi-K2-Instruct: DeepSeek-V3's fields and layout under a model type of its
    own.
    """
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": FP8 | {"activation_scheme": "dynamic", "fmt": "e4m3"},
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
    config = model_config(fields)
    assert config == model_config(fields | {"model_type": "deepseek_v3"})
    assert (
        config.total_and_active_parameters()[0] == pytest.approx(1.03e12, rel=0.01)
        and config.num_experts == 384
    )


def test_null_flags_of_deepseek_are_false() -> None:
    """As transformers takes them; what a file leaves out is true."""
    null = model_config(fields_of("deepseek_v3", norm_topk_prob=None, rope_interleave=None))
    assert not null.router.norm_topk_prob and not null.rope_interleave
    absent = model_config(without(fields_of("deepseek_v3"), "norm_topk_prob", "rope_interleave"))
    assert absent.router.norm_topk_prob and absent.rope_interleave


def test_null_sizes_of_deepseek() -> None:
    """Moonlight's queries are not compressed; a number of shared experts that is not given is the
    family's.
    """
    fields = fields_of("deepseek_v3", q_lora_rank=None, n_shared_experts=None)
    config = model_config(fields)
    assert config.q_lora_rank is None
    assert config.shared_expert_intermediate_size == fields["moe_intermediate_size"]


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def packed(layout: str, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    return {"quantization_config": compressed_tensors(layout, **weights)}


ROTATIONS = {
    "config_groups": {
        "R4": {"type": "hadamard", "apply": [{"targets": ["down_proj"], "location": "input"}]}
    }
}


FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def changed_quantization(fields: dict[str, Any], **of_group: Any) -> dict[str, Any]:
    described = packed("pack-quantized")["quantization_config"]
    group = described["config_groups"]["group_0"] | of_group
    return {"quantization_config": described | fields | {"config_groups": {"group_0": group}}}


@pytest.mark.parametrize(
    "changes",
    [
        packed("pack-quantized", actorder="static"),
        packed("pack-quantized", actorder="weight"),
        changed_quantization(
            {
                "transform_config": {},
                "sparsity_config": {"format": "dense"},
                "kv_cache_scheme": None,
            }
        ),
        changed_quantization(
            {"transform_config": {"config_groups": {}}, "sparsity_config": {}},
            format="pack-quantized",
        ),
        changed_quantization(
            {
                "quantization_status": "compressed",
                "global_compression_ratio": 1.5,
                "ignore": ["lm_head"],
            }
        ),
        changed_quantization(
            {}, input_activations={"num_bits": 8, "dynamic": True}, output_activations=None
        ),
        {
            "quantization_config": FP8
            | {"scale_fmt": "float", "activation_scheme": "static", "dequantize": False}
        },
        changed_quantization({"kv_cache_scheme": FP8_CACHE}),
        {"quantization_config": MODELOPT | {"kv_cache_scheme": FP8_CACHE}},
        {"quantization_config": MODELOPT | {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_quantizations_that_change_nothing_more(changes: dict[str, Any]) -> None:
    assert model_config(fields_of("mixtral", **changes)) == model_config(fields_of("mixtral"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mixtral",
            {"model_type": "llama"},
            "model_type = 'llama': must be one of mixtral, qwen3_moe",
        ),
        ("mixtral", {"model_type": None}, "model_type = None: must be one of"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu': is not supported, only 'silu'"),
        ("mixtral", {"hidden_size": None}, "hidden_size = None: must be an integer"),
        ("mixtral", {"hidden_size": "32"}, "hidden_size = '32': must be an integer"),
        ("mixtral", {"hidden_size": -32}, "hidden_size = -32: must be greater than 0"),
        ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers = True: must be an integer"),
        ("mixtral", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small': must be a number"),
        ("mixtral", {"rms_norm_eps": math.inf}, "rms_norm_eps = inf: must be finite"),
        (
            "mixtral",
            {"rope_parameters": {"rope_theta": math.inf}},
            "rope_parameters.rope_theta = inf: must be finite",
        ),
        (
            "mixtral",
            {"rope_parameters": YARN | {"factor": math.inf}},
            "rope_parameters.factor = inf: must be finite",
        ),
        (
            "mixtral",
            {"rope_parameters": YARN | {"factor": None, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings = 0: must be greater than 0",
        ),
        ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
        (
            "mixtral",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok = 1: is not supported where weights are divided",
        ),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok = 9: must be between 1 and num_experts = 4",
        ),
        (
            "mixtral",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5: is not supported, only 1.0",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "awq", "bits": 3}},
            "quantization_config.bits = 3: must be 4",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "= 'mxfp4': must be fp8 or compressed-tensors",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_parameters.rope_type = 'proportional': is not supported, only default, linear,",
        ),
        (
            "mixtral",
            {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
            "rope_scaling.factor = None: must be a number",
        ),
        (
            "mixtral",
            {"rope_parameters": {"full_attention": {}}},
            "must be one flat table for all layers",
        ),
        (
            "mixtral",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5",
        ),
        (
            "mixtral",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.low_freq_factor = None: must be a number",
        ),
        (
            "mixtral",
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "low_freq_factor = 1.0: must not exceed high_freq_factor 0.5",
        ),
        (
            "mixtral",
            {"rope_scaling": LINEAR | {"factor": "2"}},
            "rope_scaling.factor = '2': must be a number",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": LINEAR | {"mscale_all_dim": 1.0}},
            "rope_parameters.mscale_all_dim = 1.0: is not supported, only 0",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": [0]}},
            r"rope_parameters.rope_type = \[0\]: is not supported, only default, linear,",
        ),
        (
            "mixtral",
            {"rope_scaling": {"rope_type": "dynamic", "factor": None}},
            "rope_scaling.factor = None: must be a number",
        ),
        (
            "mixtral",
            {"rope_scaling": LONGROPE | {"long_factor": [1, 2, "3", 4]}},
            "rope_scaling.long_factor = .*: must be a list of finite numbers",
        ),
        (
            "mixtral",
            {"rope_scaling": LONGROPE | {"long_factor": None}},
            "long_factor = .*: must be numbers greater than 0",
        ),
        (
            "mixtral",
            {"rope_scaling": {"type": "ntk_alpha", "alpha": 8.0}},
            "rope_type = 'ntk_alpha': is not supported",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, "moe_topk = .*: must be the same for all layers"),
        ("hunyuan_v1_moe", {"moe_topk": 1}, "moe_topk = 1: must be at least 2"),
        (
            "hunyuan_v1_moe",
            {"num_shared_expert": [2, 2]},
            "num_shared_expert = .*: is not supported, only 1",
        ),
        (
            "hunyuan_v1_moe",
            {"moe_intermediate_size": 16},
            "moe_intermediate_size = 16: is not supported, only 12",
        ),
        (
            "deepseek_v3",
            {"topk_method": "group_limited_greedy"},
            "topk_method = 'group_limited_greedy': is not supported",
        ),
        ("deepseek_v3", {"n_group": None}, "n_group = None: must be an integer"),
        ("deepseek_v3", {"head_dim": 6}, "head_dim = 6: is not supported, only 8"),
        (
            "mixtral",
            {"per_layer_config": {"0": {"sliding_window": 3}}},
            "per_layer_config = .*: is not supported, only",
        ),
        (
            "mixtral",
            {"model_type": "deepseek_v32"},
            "model_type = 'deepseek_v32': must be one of .*, kimi_k2",
        ),
        ("qwen3_next", {"mlp_only_layers": [0]}, "mlp_only_layers = .* must give every layer"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias = True: is not supported"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types = .* must have"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3: must be a mul"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval = 0: must be"),
        ("qwen3_5_moe_text", {"attn_output_gate": False}, "attn_output_gate = False: is not supp"),
        ("mixtral", {"model_type": "llama4"}, "model_type = 'llama4': must be one of"),
        (
            "qwen3_moe",
            {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}},
            "model_type = 'qwen3_5_moe': must be one of",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config.bits = None: must be 4 or 8",
        ),
        (
            "mixtral",
            {
                "quantization_config": {
                    "quant_method": "gptq",
                    "bits": 4,
                    "checkpoint_format": "gptq_v2",
                }
            },
            "checkpoint_format = 'gptq_v2': must be gptq or none",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "version = 'gemv': must be gemm or GEMM or none",
        ),
        ("mixtral", packed("marlin-24"), "format = 'marlin-24': must be pack-quantized"),
        ("mixtral", {"num_experts": 5}, "num_experts = 5: must be num_local_experts = 4"),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quant_method = 'bitsandbytes': must be fp8 or .* call dequantize\(\)",
        ),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "modelopt"}},
            "quant_algo = None: must be NVFP4 or FP8",
        ),
        (
            "mixtral",
            {"rope_parameters": YARN | {"factor": "2"}},
            "rope_parameters.factor = '2': must be a number",
        ),
        (
            "mixtral",
            {"rope_parameters": YARN | {"factor": -2}},
            "factor = -2.0: must be greater than 0",
        ),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1: must be a list"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, "mlp_only_layers = .7,.: must lie between 0 and 3"),
        ("qwen2_moe", {"use_sliding_window": False}, "layer_types = .*: needs use_sliding_window"),
        ("olmoe", {"clip_qkv": -8.0}, "clip_qkv = -8.0: must be greater than 0"),
        (
            "granitemoe",
            {"residual_multiplier": 0},
            "residual_multiplier = 0.0: must be greater than 0",
        ),
        (
            "granitemoe",
            {"attention_multiplier": -1},
            "attention_multiplier = -1.0: must be greater than 0",
        ),
        ("granitemoe", {"logits_scaling": "6"}, "logits_scaling = '6': must be a number"),
        (
            "granitemoe",
            {"model_type": "granitemoehybrid"},
            "model_type = 'granitemoehybrid': must be .*; jmoe lacks Mamba-2 layers",
        ),
        (
            "phimoe",
            {"router_jitter_noise": 0},
            "router_jitter_noise = 0.0: must be greater than 0",
        ),
        (
            "phimoe",
            {"num_experts_per_tok": 4},
            "num_experts_per_tok = 4: is not supported, only 2",
        ),
        (
            "phimoe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = .linear.: is not supported, only longrope",
        ),
        (
            "phimoe",
            {"lm_head_bias": "yes"},
            "lm_head_bias = .yes.: must be true or false",
        ),
        ("bailing_moe", {"use_bias": True}, "use_bias = True: is not supported without use_qkv"),
        ("bailing_moe", {"norm_head": True}, "norm_head = True: is not supported, only False"),
        (
            "bailing_moe",
            {"moe_shared_expert_intermediate_size": 16},
            "moe_shared_expert_intermediate_size = 16: is not supported, only 8",
        ),
        (
            "bailing_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob = False: is not supported, only True",
        ),
        (
            "bailing_moe_v1",
            {"use_qk_norm": True},
            "use_qk_norm = True: is not supported, only False",
        ),
        (
            "bailing_moe",
            {"model_type": "bailing_hybrid"},
            "model_type = .bailing_hybrid.: must be .*; jmoe lacks Kimi delta attention",
        ),
        ("olmoe", {"clip_qkv": "8"}, "clip_qkv = '8': must be a number"),
        ("olmoe", {"head_dim": 16}, "head_dim = 16: is not supported, only 8"),
        (
            "deepseek_v3",
            {"scoring_func": "softmax"},
            "scoring_func = 'softmax': is not supported, only 'sigmoid'",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy': is not supported"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: is not supported, only 1"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts = 0: must be greater than 0"),
        (
            "deepseek_v3",
            {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
            "weight_block_size = .64, 64.: must",
        ),
        (
            "deepseek_v3",
            {"quantization_config": FP8 | {"fmt": "e5m2"}},
            "quantization_config.fmt = 'e5m2': must be e4m3",
        ),
        (
            "deepseek_v3",
            {"quantization_config": FP8 | {"scale_fmt": "e5m3"}},
            "quantization_config.scale_fmt = 'e5m3': must be ue8m0 or float or none",
        ),
        ("gpt_oss", {"quantization_config": FP8}, "quant_method = 'fp8': must be mxfp4"),
        (
            "deepseek_v3",
            {"quantization_config": FP8 | {"expert_dtype": "fp4"}},
            "expert_dtype = 'fp4': must be fp8",
        ),
        (
            "deepseek_v3",
            {"quantization_config": FP8, "expert_dtype": "fp6"},
            "expert_dtype = 'fp6': must be fp4 or",
        ),
        (
            "mixtral",
            packed("pack-quantized") | {"expert_dtype": "fp4"},
            "expert_dtype = 'fp4': needs quantization",
        ),
        (
            "gpt_oss",
            {"expert_dtype": "fp4"},
            "expert_dtype = 'fp4': needs quantization_config.quant_method = 'fp8'",
        ),
        (
            "mixtral",
            packed("nvfp4-pack-quantized"),
            "weights.type = 'int': must be 'float'",
        ),
        (
            "mixtral",
            packed("pack-quantized", num_bits=3),
            "weights.num_bits = 3: must be 4 or 8 with format = 'pack-",
        ),
        (
            "mixtral",
            packed("pack-quantized", symmetric=False),
            "group_0.weights.symmetric = False: must be True",
        ),
        (
            "mixtral",
            packed("pack-quantized", actorder="group"),
            "group_0.weights.actorder = 'group': must be None",
        ),
        (
            "mixtral",
            changed_quantization({"transform_config": ROTATIONS}),
            "quantization_config.transform_config = .*: is not supported: must be null",
        ),
        (
            "mixtral",
            changed_quantization({"kv_cache_scheme": {"num_bits": 8}}),
            "kv_cache_scheme = .*: is not supported",
        ),
        (
            "mixtral",
            {"quantization_config": MODELOPT | {"kv_cache_quant_algo": "INT8"}},
            "kv_cache_quant_algo = 'INT8': is not supported: must be FP8",
        ),
        (
            "mixtral",
            {"quantization_config": MODELOPT | {"kv_cache_scheme": FP8_CACHE | {"num_bits": 4}}},
            "kv_cache_scheme = .*'num_bits': 4.*: is not supported: must be FP8",
        ),
        (
            "mixtral",
            changed_quantization({"sparsity_config": {"format": "sparse-24-bitmask"}}),
            "sparsity_config = .*: is",
        ),
        (
            "mixtral",
            changed_quantization({}, format="int-quantized"),
            "config_groups.group_0.format = 'int-quantized'",
        ),
        (
            "mixtral",
            changed_quantization({"format": []}),
            r"quantization_config.format = \[\]: must",
        ),
        (
            "mixtral",
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "config_groups": {"group_0": {"weights": True}},
                }
            },
            "config_groups.group_0 = .*: must be a table with a table of weights",
        ),
        (
            "mixtral",
            packed("mxfp4-pack-quantized"),
            "group_0.weights.type = 'int': must be 'float'",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: is not supported, only 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0: is not supported"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None: is needed by layer_types"),
        (
            "gpt_oss",
            {"layer_types": ["local_attention"] * 3},
            "layer_types = .*: must each be one of",
        ),
    ],
)
def test_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(fields_of(name, **changes))


def spelled_out(config: ModelConfig) -> ModelConfig:
    """One form of what can be said in several ways, or does not matter."""
    types = config.layer_types or ("sliding_attention",) * config.num_hidden_layers
    patterned = config.has_linear_attention or config.has_chunked_attention
    return dataclasses.replace(
        config,
        head_dim=config.dim_per_head,
        decoder_sparse_step=1,
        first_k_dense_replace=0,
        mlp_only_layers=tuple(i for i, kind in enumerate(config.layer_kinds) if kind == "dense"),
        layer_types=types if config.sliding_window or patterned else (),
        intermediate_size=1 if "dense" not in config.layer_kinds else config.intermediate_size,
    )


@pytest.mark.parametrize("name", NAMES)
def test_written_and_read_again(name: str) -> None:
    config = model_config(fields_of(name))
    fields = hf_config(config)
    # Ling 2 computes what GLM-4.5 does
    expected = "glm4_moe" if name == "bailing_moe" else fields_of(name)["model_type"]
    assert fields["model_type"] == expected
    assert spelled_out(model_config(fields)) == spelled_out(config)


def test_clipped_queries_are_written_and_read_again() -> None:
    config = model_config(fields_of("olmoe", clip_qkv=8))
    assert config.clip_qkv == 8.0
    fields = hf_config(config)
    assert fields["model_type"] == "olmoe" and fields["clip_qkv"] == 8.0
    assert model_config(fields) == model_config(hf_config(model_config(fields)))
    with pytest.raises(ValueError, match=r"mixtral differs in clip_qkv: 8.0 -> None"):
        hf_config(dataclasses.replace(model_config(fields_of("mixtral")), clip_qkv=8.0))


@pytest.mark.parametrize(
    ("preset", "family"),
    [
        ("tiny", "mixtral"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("olmoe-1b-7b", "olmoe"),
        ("gpt-moe-8e", "gpt_moe"),
    ],
)
def test_presets_have_a_family(preset: str, family: str) -> None:
    fields = hf_config(PRESETS[preset][1].model)
    assert fields["model_type"] == family and json.dumps(fields)


def test_a_preset_without_a_family_names_what_is_missing() -> None:
    other = dataclasses.replace(PRESETS["gpt-moe-8e"][1].model, norm="rmsnorm")
    with pytest.raises(
        ValueError,
        match="no Hugging Face family has all its options; gpt_moe differs in norm: 'rmsnorm'",
    ):
        hf_config(other)
    with pytest.raises(ValueError, match="attention_sinks: True -> False"):
        hf_config(ModelConfig(attention_sinks=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routed_scaling_factor": 2.5}, r"router\.routed_scaling_factor: 2\.5 -> 1\.0"),
        ({"bias": True}, r"router\.bias: True -> False"),
        ({"kind": "softmax_group_limited", "n_group": 4}, r"router\.n_group: 4 -> 1"),
    ],
)
def test_a_router_without_a_family_names_what_is_missing(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        hf_config(ModelConfig(router=RouterConfig(**changes)))


def test_options_of_training_alone_need_no_family() -> None:
    router = RouterConfig(aux_loss_coef=0.5, z_loss_coef=0.1, jitter_noise=0.2)
    assert hf_config(ModelConfig(router=router))["model_type"] == "mixtral"
