"""The metadata of a GGUF file as the fields of a Hugging Face `config.json`.

llama.cpp writes some settings of a family into its code and not into the file; they are in the
family's table here. A key that no table lists is refused, because it may change the model's
answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jmoe.config import check
from jmoe.models.gguf.file import GgufFile
from jmoe.types import Json, JsonObject

# {key below the architecture's name: field of config.json}
_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
}
# keys that are compared or read apart from the tables, or that change nothing
_OTHER = {
    "attention.value_length",
    "expert_feed_forward_length",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "vocab_size",
}
_SOFTMAX, _SIGMOID = 1, 2  # of expert_gating_func


@dataclass(frozen=True)
class GgufFamily:
    """How a family's metadata becomes `config.json`.

    model_type: its name there. keys: keys beyond `_COMMON`. fixed: fields that llama.cpp's code
    decides. more: a function of the file that returns further fields.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: JsonObject = field(default_factory=dict)
    more: Callable[[GgufFile], JsonObject] = lambda file: {}


def _glm_fields(file: GgufFile) -> JsonObject:
    value = _architecture_values(file)
    check(
        value.get("expert_gating_func", _SIGMOID) == _SIGMOID,
        "glm4moe.expert_gating_func",
        value.get("expert_gating_func"),
        f"must be {_SIGMOID}, sigmoid",
    )
    head_dim = _required_value(value, "attention.key_length", "glm4moe")
    rotated = _required_value(value, "rope.dimension_count", "glm4moe")
    return {
        "partial_rotary_factor": rotated / head_dim,
        "num_hidden_layers": value["block_count"] - value.get("nextn_predict_layers", 0),
        "num_nextn_predict_layers": value.get("nextn_predict_layers", 0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss_fields(file: GgufFile) -> JsonObject:
    layers = _architecture_values(file)["block_count"]
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return {"layer_types": kinds}


def _mixtral_fields(file: GgufFile) -> JsonObject:
    values = _architecture_values(file)
    head_dim = values.get("attention.key_length")
    if head_dim is None:
        head_dim = values["embedding_length"] // _required_value(
            values, "attention.head_count", "llama"
        )
    rotated = values.get("rope.dimension_count", head_dim)
    check(rotated == head_dim, "llama.rope.dimension_count", rotated, f"must be {head_dim}")
    return {"head_dim": head_dim}


def _deepseek_fields(file: GgufFile) -> JsonObject:
    """Return the sizes of latent attention and the router's kind.

    Files since 2025 describe the cached latents by key_length and value_length, and a head's sizes
    by key_length_mla and value_length_mla.
    """
    values, name = _architecture_values(file), "deepseek2"
    head = values.get("attention.key_length_mla", values.get("attention.key_length"))
    value = values.get("attention.value_length_mla", values.get("attention.value_length"))
    rotated = _required_value(values, "rope.dimension_count", name)
    for key, size in (("attention.key_length", head), ("attention.value_length", value)):
        check(size is not None, f"{name}.{key}", size, "is missing")
    gating = values.get("expert_gating_func", _SOFTMAX)
    kinds = {_SOFTMAX: "deepseek_v2", _SIGMOID: "deepseek_v3"}
    words = f"must be {_SOFTMAX}, softmax, or {_SIGMOID}, sigmoid"
    check(gating in kinds, f"{name}.expert_gating_func", gating, words)
    fields = {
        "model_type": kinds[gating],
        "head_dim": rotated if gating == _SIGMOID else None,
        "num_key_value_heads": values.get("attention.head_count"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": value,
        "q_lora_rank": values.get("attention.q_lora_rank"),
    }
    return fields | _deepseek_groups(values, gating)


def _deepseek_groups(values: JsonObject, gating: Json) -> JsonObject:
    """Return the groups of experts; older files leave those of DeepSeek-V3 out, of 256 experts."""
    v3 = gating == _SIGMOID and values.get("expert_count") == 256
    groups = values.get("expert_group_count", 8 if v3 else 1)
    used = values.get("expert_group_used_count", 4 if v3 else groups)
    if gating == _SIGMOID:
        return {"n_group": groups, "topk_group": used}
    if groups == 1:
        return {"topk_method": "greedy"}
    return {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": used}


# {general.architecture: family}
GGUF_FAMILIES = {
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "olmoe": GgufFamily(
        "olmoe",
        {"expert_count": "num_experts", "attention.clamp_kqv": "clip_qkv"},
        {"norm_topk_prob": False, "head_dim": None},
    ),
    "glm4moe": GgufFamily(
        "glm4_moe",
        {
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_gating_func": "",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        {"n_group": 1, "topk_group": 1},
        _glm_fields,
    ),
    "llama": GgufFamily("mixtral", {"expert_count": "num_local_experts"}, {}, _mixtral_fields),
    "deepseek2": GgufFamily(
        "deepseek_v3",
        {
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_gating_func": "",
            "expert_group_count": "",
            "expert_group_used_count": "",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
            "leading_dense_block_count": "first_k_dense_replace",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.key_length_mla": "",
            "attention.value_length_mla": "",
        },
        {},
        _deepseek_fields,
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        {"expert_count": "num_local_experts", "attention.sliding_window": "sliding_window"},
        {},
        _gpt_oss_fields,
    ),
}


def config_fields(file: GgufFile) -> JsonObject:
    """Return the fields of the `config.json` of a GGUF file's model.

    Raises ValueError naming the key whose value is missing or not supported.
    """
    name = file.architecture
    known = ", ".join(GGUF_FAMILIES)
    words = f"must be one of {known}: give the folder of safetensors that it was made from"
    check(name in GGUF_FAMILIES, "general.architecture", name, words)
    family, values = GGUF_FAMILIES[name], _architecture_values(file)
    keys = {**_COMMON, **family.keys}
    for key in sorted(values.keys() - keys.keys() - _OTHER):
        check(False, f"{name}.{key}", values[key], "is not known: it may change the answers")
    for key in ("context_length", "block_count", "embedding_length", "expert_count"):
        _required_value(values, key, name)
    fields = {to: values[key] for key, to in keys.items() if to and key in values}
    same = values.get("attention.value_length", fields.get("head_dim")) == fields.get("head_dim")
    words = "must be attention.key_length"
    check(
        same or "attention.kv_lora_rank" in values,
        f"{name}.attention.value_length",
        values.get("attention.value_length"),
        words,
    )
    shape = file.tensors["token_embd.weight"].shape if "token_embd.weight" in file.tensors else ()
    check(len(shape) == 2, "token_embd.weight", list(shape), "must be [vocabulary, hidden]")
    return {
        "model_type": family.model_type,
        **fields,
        "vocab_size": shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        **_rope_fields(values, name),
        **family.fixed,
        **family.more(file),
    }


def _architecture_values(file: GgufFile) -> JsonObject:
    """Return {key below the architecture's name: value}."""
    prefix = f"{file.architecture}."
    return {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }


def _required_value(values: JsonObject, key: str, name: str) -> Json:
    """Return the value of a key of the architecture `name`. Raises ValueError if it is missing."""
    check(key in values, f"{name}.{key}", None, "is missing")
    return values[key]


def _rope_fields(values: JsonObject, name: str) -> JsonObject:
    """Return `rope_scaling`, if the file scales positions."""
    kind: Json = values.get("rope.scaling.type", "none")
    is_known = kind in ("none", "linear", "yarn")
    check(is_known, f"{name}.rope.scaling.type", kind, "must be yarn, linear or none")
    if kind == "none":
        return {}
    table = {"rope_type": kind, "factor": _required_value(values, "rope.scaling.factor", name)}
    if kind == "yarn":
        original = _required_value(values, "rope.scaling.original_context_length", name)
        table |= {
            "original_max_position_embeddings": original,
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": name != "gpt-oss",
        }
        if name == "deepseek2":  # written as 0.1 of mscale_all_dim, which is mscale too
            mscale = 10 * values.get("rope.scaling.yarn_log_multiplier", 0.0)
            table |= {"mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_scaling": table}
