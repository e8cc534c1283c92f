"""The outcomes of a field of a Hugging Face `config.json`: honoured, refused or harmless."""

from dataclasses import dataclass

from jmoe.types import Json

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


def honoured_fields(names: str) -> dict[str, Outcome]:
    return dict.fromkeys(names.split(), HONOURED)


def harmless_fields(names: str) -> dict[str, Outcome]:
    return dict.fromkeys(names.split(), HARMLESS)


# Fields that every family has. `dtype` is harmless because the weights' headers say the dtype.
EVERY_FAMILY: dict[str, Outcome] = {
    **honoured_fields(
        """model_type vocab_size hidden_size num_hidden_layers num_attention_heads
        num_key_value_heads intermediate_size num_experts_per_tok max_position_embeddings
        rms_norm_eps initializer_range tie_word_embeddings rope_parameters rope_scaling
        rope_theta original_max_position_embeddings eos_token_id quantization_config
        expert_dtype"""
    ),
    **harmless_fields(
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
