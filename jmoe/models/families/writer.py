"""The fields of a Hugging Face `config.json` that most families write alike."""

from jmoe.config import ModelConfig
from jmoe.models.families.reader import SIZES
from jmoe.models.families.rope import rope_parameters_json
from jmoe.types import JsonObject


def same_named_fields(config: ModelConfig, *names: str) -> JsonObject:
    """Return {name: value} of fields of `ModelConfig` that `config.json` has by the same names."""
    return {name: getattr(config, name) for name in names}


def common_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that every family with RMSNorm, SwiGLU and rotary
    positions has.
    """
    return {
        **size_fields(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters_json(config),
    }


def size_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that every family has: sizes, initializer range, tied
    embeddings, and special token ids as null.
    """
    return {
        **same_named_fields(config, *SIZES, "num_key_value_heads", "num_experts_per_tok"),
        **same_named_fields(config, "intermediate_size", "tie_word_embeddings"),
        "initializer_range": config.initializer_range,
        "bos_token_id": None,  # the tokenizer decides; the family's default would be wrong
        "eos_token_id": None,
        "pad_token_id": None,
    }


def softmax_router_json(config: ModelConfig) -> JsonObject:
    """Return the fields of `config.json` that describe the balance loss; see
    `softmax_router_config`.
    """
    coef = config.router.aux_loss_coef / config.num_experts_per_tok
    return {"router_aux_loss_coef": coef, "output_router_logits": False}


def normalization_json(config: ModelConfig) -> JsonObject:
    """Return {"norm_topk_prob": whether a token's expert weights are divided by their sum}."""
    return {"norm_topk_prob": config.router.normalizes_weights(config.num_experts_per_tok)}


def dense_layers_json(config: ModelConfig) -> JsonObject:
    """Return {"mlp_only_layers": the indices of the layers without experts}."""
    dense = [i for i, kind in enumerate(config.layer_kinds) if kind == "dense"]
    return {"mlp_only_layers": dense}


def layer_types_json(config: ModelConfig) -> list[str]:
    """Return each layer's kind of attention by its name in transformers; all are
    "sliding_attention" if `ModelConfig.layer_types` is empty.
    """
    return list(config.layer_types or ("sliding_attention",) * config.num_hidden_layers)
