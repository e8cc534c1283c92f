"""The fields of a Hugging Face `config.json`, by family: honoured, refused or harmless.

The table lists all fields of the family's configuration class in transformers 5, under all their
names, and further fields that published checkpoints have. A field that affects the logits is read
by `huggingface.py` (honoured) or limited to supported values (`SupportedValues`); a field that
cannot affect them is accepted (harmless). transformers ignores fields outside this table, and so
does jmoe.
"""

from dataclasses import dataclass

from jmoe.types import Json, JsonObject

HONOURED, HARMLESS = "honoured", "harmless"


@dataclass(frozen=True)
class SupportedValues:
    """A field that must be null or one of `values`; `check_fields_supported` raises ValueError
    otherwise.
    """

    values: tuple[Json, ...]


@dataclass(frozen=True)
class TrainingOnlyField:
    """A field that affects training only. Values other than `off` and null are reported, not
    applied.
    """

    off: Json


Outcome = str | SupportedValues | TrainingOnlyField


def _outcomes_of_honoured(names: str) -> dict[str, Outcome]:
    return dict.fromkeys(names.split(), HONOURED)


def _outcomes_of_harmless(names: str) -> dict[str, Outcome]:
    return dict.fromkeys(names.split(), HARMLESS)


# Fields that every family has. `dtype` is harmless because the weights' headers say the dtype.
_EVERY: dict[str, Outcome] = {
    **_outcomes_of_honoured(
        """model_type vocab_size hidden_size num_hidden_layers num_attention_heads
        num_key_value_heads intermediate_size num_experts_per_tok max_position_embeddings
        rms_norm_eps initializer_range tie_word_embeddings rope_parameters rope_scaling
        rope_theta original_max_position_embeddings eos_token_id quantization_config
        expert_dtype"""
    ),
    **_outcomes_of_harmless(
        """architectures transformers_version dtype torch_dtype name_or_path _name_or_path auto_map
        bos_token_id pad_token_id use_cache return_dict output_hidden_states output_attentions
        output_router_logits attn_implementation experts_implementation tie_last_hidden_states
        is_encoder_decoder chunk_size_feed_forward id2label label2id num_labels problem_type"""
    ),
    "hidden_act": SupportedValues(("silu", "swish")),  # two names of the same function
    "partial_rotary_factor": SupportedValues((1.0,)),
    "per_layer_config": SupportedValues(({},)),
    "attention_dropout": TrainingOnlyField(0.0),
}
_QWEN = {
    **_outcomes_of_honoured(
        """head_dim moe_intermediate_size num_experts norm_topk_prob decoder_sparse_step
        mlp_only_layers router_aux_loss_coef use_sliding_window sliding_window"""
    ),
}
CONFIG_FIELDS: dict[str, dict[str, Outcome]] = {
    "mixtral": {
        **_EVERY,
        **_outcomes_of_honoured(
            "head_dim num_local_experts num_experts router_aux_loss_coef sliding_window"
        ),
        "router_jitter_noise": TrainingOnlyField(0.0),
    },
    "qwen3_moe": {
        **_EVERY,
        **_QWEN,
        **_outcomes_of_honoured("num_local_experts attention_bias"),
        **_outcomes_of_harmless("max_window_layers layer_types"),
    },
    "qwen2_moe": {
        **_EVERY,
        **_QWEN,
        **_outcomes_of_honoured(
            "shared_expert_intermediate_size qkv_bias layer_types max_window_layers"
        ),
    },
    "olmoe": {
        **_EVERY,
        **_outcomes_of_honoured(
            """head_dim num_experts num_local_experts norm_topk_prob router_aux_loss_coef clip_qkv
            attention_bias"""
        ),
        "sliding_window": SupportedValues(()),
    },
    "deepseek_v3": {
        **_EVERY,
        **_outcomes_of_honoured(
            """head_dim moe_intermediate_size n_routed_experts num_local_experts n_shared_experts
            first_k_dense_replace norm_topk_prob n_group topk_group routed_scaling_factor
            attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
            rope_interleave"""
        ),
        **_outcomes_of_harmless(
            "qk_head_dim num_mtp_layers num_nextn_predict_layers pretraining_tp ep_size"
            " aux_loss_alpha seq_aux"
        ),
        "scoring_func": SupportedValues(("sigmoid",)),
        "topk_method": SupportedValues(("noaux_tc",)),
        "moe_layer_freq": SupportedValues((1,)),
    },
    "gpt_oss": {
        **_EVERY,
        **_outcomes_of_honoured(
            """head_dim num_local_experts num_experts router_aux_loss_coef sliding_window
            layer_types attention_bias"""
        ),
        # hidden_act: the model class of transformers ignores it
        **_outcomes_of_harmless("hidden_act initial_context_length experts_per_token"),
        "swiglu_alpha": SupportedValues((1.702,)),
        "swiglu_limit": SupportedValues((7.0,)),
    },
    # jmoe's own family, which transformers lacks: LayerNorm, exact GELU, learned positions, biases
    "gpt_moe": {
        **_outcomes_of_honoured(
            """model_type vocab_size hidden_size num_hidden_layers num_attention_heads
            num_key_value_heads head_dim intermediate_size moe_intermediate_size num_experts
            num_experts_per_tok mlp_only_layers max_position_embeddings layer_norm_eps
            attention_bias mlp_bias tie_word_embeddings norm_topk_prob router_aux_loss_coef
            initializer_range eos_token_id quantization_config expert_dtype"""
        ),
        **_outcomes_of_harmless(
            "architectures dtype bos_token_id pad_token_id output_router_logits"
        ),
        "hidden_act": SupportedValues(("gelu",)),
    },
}


def check_fields_supported(fields: JsonObject, family: str) -> None:
    """Raise ValueError naming the first field whose value jmoe does not support."""
    for name, outcome in CONFIG_FIELDS[family].items():
        value = fields.get(name)
        if (
            isinstance(outcome, SupportedValues)
            and value is not None
            and value not in outcome.values
        ):
            only = " or ".join(map(repr, outcome.values)) or "null"
            raise ValueError(f"{name} = {value!r}: is not supported, only {only}")


def ignored_training_fields(fields: JsonObject, family: str) -> JsonObject:
    """Return {field: value} for each `TrainingOnlyField` whose value transformers applies and jmoe
    ignores.
    """
    outcomes = CONFIG_FIELDS[family].items()
    training = {
        name: outcome.off for name, outcome in outcomes if isinstance(outcome, TrainingOnlyField)
    }
    return {
        name: fields[name] for name, off in training.items() if fields.get(name) not in (None, off)
    }
