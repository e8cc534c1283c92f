"""The fields of a Hugging Face `config.json` that most families write alike."""

from jmoe.config import ModelConfig
from jmoe.models.families.reader import SIZES
from jmoe.models.families.rope import rope_parameters_json
from jmoe.types import JsonObject


def same_named_fields(config: ModelConfig, *names: str) -> JsonObject:
    """Return fields of `ModelConfig` that have the same names in `config.json`."""
    return {name: getattr(config, name) for name in names}


def common_json(config: ModelConfig) -> JsonObject:
    """Return the fields of every family with RMSNorm, SwiGLU and rotary positions."""
    return {
        **size_fields(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope_parameters_json(config),
    }


def size_fields(config: ModelConfig) -> JsonObject:
    """Return the fields of every family."""
    return {
        **same_named_fields(config, *SIZES, "num_key_value_heads", "num_experts_per_tok"),
        **same_named_fields(config, "intermediate_size", "tie_word_embeddings"),
        "initializer_range": config.initializer_range,
        "bos_token_id": None,  # the tokenizer decides; the family's default would be wrong
        "eos_token_id": None,
        "pad_token_id": None,
    }


def softmax_router_json(config: ModelConfig) -> JsonObject:
    """Return the balance loss's fields; see `softmax_router_config`."""
    coef = config.router.aux_loss_coef / config.num_experts_per_tok
    return {"router_aux_loss_coef": coef, "output_router_logits": False}


def normalization_json(config: ModelConfig) -> JsonObject:
    """Return whether the weights of a token's experts are divided by their sum."""
    return {"norm_topk_prob": config.router.normalizes_weights(config.num_experts_per_tok)}


def dense_layers_json(config: ModelConfig) -> JsonObject:
    """Return the list of layers without experts."""
    dense = [i for i, kind in enumerate(config.layer_kinds) if kind == "dense"]
    return {"mlp_only_layers": dense}


def layer_types_json(config: ModelConfig) -> list[str]:
    """Return the attention of each layer by its name; all slide if no layer is named."""
    return list(config.layer_types or ("sliding_attention",) * config.num_hidden_layers)
