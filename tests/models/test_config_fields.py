"""Every field that a family's `config.json` may hold is honoured, refused by name, or changes
nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from jmoe.config import ModelConfig
from jmoe.models.config_fields import CONFIG_FIELDS, ignored_training_fields
from jmoe.models.families.outcomes import HONOURED, Outcome, SupportedValues, TrainingOnlyField
from jmoe.models.huggingface import hf_config, model_config
from tests.deploy.gpt_moe_models import gpt_moe_config
from tests.model_configs import CHECKPOINTS

CASES = [(family, name) for family, fields in CONFIG_FIELDS.items() for name in fields]
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
YARN = {"rope_type": "yarn", "rope_theta": 7.0, "factor": 3.0}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": None,
    "max_window_layers": 2,
}
# Of a field that is honoured: another value than the fixtures', and what must stand beside it.
OTHERS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 20,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "layer_norm_eps": 1e-3,
    "initializer_range": 0.5,
    "rope_parameters": YARN,
    "rope_scaling": YARN,
    "rope_theta": 7.0,
    "original_max_position_embeddings": 8,
    "router_aux_loss_coef": 0.5,
    "quantization_config": {"quant_method": "awq"},
    "expert_dtype": "fp6",
    "head_dim": 6,
    "layer_types": ["full_attention"] * 3,
    "max_window_layers": 0,
    "decoder_sparse_step": 3,
    "mlp_only_layers": [0],
    "sliding_window": 3,
    "first_k_dense_replace": 0,
    "n_shared_experts": 3,
    "n_group": 2,
    "topk_group": 3,
    "routed_scaling_factor": 7.5,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 10,
    "v_head_dim": 8,
    "clip_qkv": 4.0,
    "partial_rotary_factor": 1.0,
    "rotary_dim": 8,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 5,
    "attn_type_list": [1, 0],
    "topk_method": "noaux_tc",
    "embedding_multiplier": 5.0,
    "residual_multiplier": 5.0,
    "attention_multiplier": 5.0,
    "logits_scaling": 5.0,
    "router_jitter_noise": 5.0,
    "intermediate_size_mlp": 28,
    "moe_layers": [0, 1],
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [1, 0, 1, 1],
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 16,
    "attn_scale": 0.25,
    "floor_scale": 5,
    "moe_k": 4,
    "moe_topk": 4,
    "num_shared_expert": 3,
    "moe_num_shared_experts": 3,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 2,
    "moe_layer_interval": 1,
    **dict.fromkeys(EXPERTS, 12),
}
ALL_OF_A_HEAD = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
BESIDE: dict[str, dict[str, Any]] = {
    "architectures": {"score_function": None},
    **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim"), ALL_OF_A_HEAD),
    "partial_rotary_factor": ALL_OF_A_HEAD,
    "rotary_dim": ALL_OF_A_HEAD,
    "original_max_position_embeddings": {"rope_parameters": YARN},
    "sliding_window": WINDOWED,
    "max_window_layers": WINDOWED,
    "use_sliding_window": WINDOWED | {"use_sliding_window": False},
    "full_attention_interval": {"layer_types": None, "full_attention_interval": 3},
    "no_rope_layers": {"layer_types": None},
    "no_rope_layer_interval": {"layer_types": None, "no_rope_layers": None},
    "interleave_moe_layer_step": {"moe_layers": None, "interleave_moe_layer_step": 2},
}
NAMED_BY = {
    "num_hidden_layers": "layer_types",
    "qk_rope_head_dim": "head_dim",
    "norm_topk_prob": "num_experts_per_tok",
}
CHOICES = ("num_experts_per_tok", "moe_k", "moe_topk")
GROUPS = {
    **dict.fromkeys(EXPERTS, EXPERTS),
    **dict.fromkeys(CHOICES, CHOICES),
    **dict.fromkeys(ROPE, ROPE),
}


def fields_of(family: str) -> dict[str, Any]:
    if family == "gpt_moe":
        return hf_config(gpt_moe_config())
    fields: dict[str, Any] = json.loads((CHECKPOINTS / family / "config.json").read_text())
    return fields


def read(fields: dict[str, Any]) -> ModelConfig | str:
    """Return the decoder, or why there is none."""
    try:
        return model_config(fields)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f, name in CASES if CONFIG_FIELDS[f][name] == HONOURED]
)
def test_honoured(family: str, name: str) -> None:
    """Another value makes another decoder, or is refused by a name."""
    if name == "eos_token_id":  # of no decoder: tests/inference/test_engine.py
        return
    beside = BESIDE.get(name, {})
    if (family, name) == ("phimoe", "original_max_position_embeddings"):
        beside = {}  # its positions are scaled already, by LongRoPE alone
    fields = fields_of(family) | beside
    before = model_config(fields)
    alone = {key: value for key, value in fields.items() if key not in GROUPS.get(name, ())}
    value = OTHERS[name] if name in OTHERS else not fields.get(name, True)
    after = read(alone | {name: fields[name] + 1 if name == "num_hidden_layers" else value})
    assert after != before
    if isinstance(after, str):
        assert NAMED_BY.get(name, name) in after or name in after


@pytest.mark.parametrize("family", CONFIG_FIELDS)
def test_null_is_not_given(family: str) -> None:
    """transformers takes null for the class's default in most fields; nothing fails in another
    way than by a name.
    """
    for name, outcome in CONFIG_FIELDS[family].items():
        after = read(fields_of(family) | {name: None})
        assert not isinstance(after, str) or (
            outcome == HONOURED and (name in after or "layer_types" in after)
        ), name


@pytest.mark.parametrize("family", CONFIG_FIELDS)
def test_the_others(family: str) -> None:
    fields, expected = fields_of(family), model_config(fields_of(family))
    for name, outcome in CONFIG_FIELDS[family].items():
        if isinstance(outcome, SupportedValues):
            assert (
                read(fields | {name: "other"})
                == f"{name} = 'other': is not supported, only {only(outcome)}"
            )
            for value in (None, *outcome.values):
                assert read(fields | {name: value}) == expected, name
        elif outcome != HONOURED:
            for value in (0.25, "other", {"some": "thing"}, None):
                assert read(fields | {name: value}) == expected, name
                changed = ignored_training_fields(fields | {name: value}, family)
                assert changed == (
                    {name: value}
                    if isinstance(outcome, TrainingOnlyField) and value is not None
                    else {}
                ), name


def only(outcome: SupportedValues) -> str:
    return " or ".join(map(repr, outcome.values)) or "null"


def test_what_is_off_does_not_change_training() -> None:
    for family, fields in CONFIG_FIELDS.items():
        off = {
            name: outcome.off
            for name, outcome in fields.items()
            if isinstance(outcome, TrainingOnlyField)
        }
        assert (
            ignored_training_fields(off, family)
            == {}
            == ignored_training_fields(fields_of(family), family)
        )


def page_table() -> str:
    """Return the table of docs/families.md: a row a field, a column a family."""
    families = list(CONFIG_FIELDS)
    names = list(dict.fromkeys(name for fields in CONFIG_FIELDS.values() for name in fields))
    rows = [["field", *families], ["---"] * (len(families) + 1)]
    for name in sorted(names, key=lambda name: name.lstrip("_")):
        rows.append([f"`{name}`", *(cell(CONFIG_FIELDS[family].get(name)) for family in families)])
    return (
        "\n".join(
            f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows
        )
        + "\n"
    )


def cell(outcome: Outcome | None) -> str:
    if isinstance(outcome, SupportedValues):
        return "only " + " or ".join(
            f"`{json.dumps(value)}`" for value in outcome.values or (None,)
        )
    return "training" if isinstance(outcome, TrainingOnlyField) else outcome or ""


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    assert page_table() in page, f"docs/families.md needs this table:\n{page_table()}"
