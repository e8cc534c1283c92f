"""Convert Hugging Face configurations to `ModelConfig`, and back.

`config_fields.py` says which fields are read, limited or ignored. A field that a `config.json`
omits has the default of the family's configuration class in transformers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from jmoe.config import (
    MODEL_LIMITS,
    ModelConfig,
    RouterConfig,
    YarnConfig,
    check,
    describe_differences,
)
from jmoe.models.config_fields import check_fields_supported
from jmoe.models.stored_formats import COMPRESSION_FIELDS, check_quantization
from jmoe.types import Json, JsonObject

ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gpt_moe": "GptMoeForCausalLM",  # jmoe's own family: transformers has no such decoder
}
SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types with the fields and tensors of another family
# Fields of every family that have the same names in `ModelConfig`.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class _Fields:
    """Typed access to the fields of a `config.json`; null counts as missing.

    Each method raises ValueError naming a field of the wrong type.
    """

    def __init__(self, fields: JsonObject, prefix: str = "") -> None:
        self._fields, self._prefix = fields, prefix

    def value(self, name: str, default: Json = None) -> Json:
        value = self._fields.get(name)
        return default if value is None else value

    def _typed_value(self, name: str, default: Json, kinds: tuple[type, ...], words: str) -> Json:
        value = self.value(name, default)
        ok = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        check(ok, self._prefix + name, value, f"must be {words}")
        return value

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the integer under the first of these names that is present.

        Raises ValueError if several are present and differ, or if the value exceeds jmoe's limit.
        """
        said = [n for n in names if self.value(n) is not None]
        name = said[0] if said else names[0]
        value: int = self._typed_value(name, default, (int,), "an integer")
        most = (
            MODEL_LIMITS["num_experts"]
            if name.endswith("experts")
            else MODEL_LIMITS.get(name, value)
        )
        check(value <= most, self._prefix + name, value, f"must be at most {most:,}")
        for other in said[1:]:
            check(
                self.value(other) == value,
                self._prefix + other,
                self.value(other),
                f"must be {name} = {value}",
            )
        return value

    def integers(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self.integer(name) for name in names}

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer, None if the field is null, or `default` if it is missing."""
        value = self._fields.get(name, default)
        return None if value is None else self.integer(name, default=default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._typed_value(name, default, (int, float), "a number")
        check(math.isfinite(value), self._prefix + name, value, "must be finite")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self._typed_value(name, default, (bool,), "true or false")
        return value

    def nullable_flag(self, name: str, default: bool) -> bool:
        """Return a boolean, False if the field is null (as in transformers), or `default` if it is
        missing.
        """
        return self._fields.get(name, default) is not None and self.flag(name, default)

    def tuple_value(self, name: str) -> tuple[Json, ...]:
        return tuple(self._typed_value(name, [], (list, tuple), "a list"))

    def require_value(self, name: str, supported: Json) -> None:
        """Raise ValueError unless the field is missing, null or equal to `supported`."""
        value = self.value(name, supported)
        check(
            value == supported, self._prefix + name, value, f"is not supported, only {supported!r}"
        )


def _checked_rope_table(fields: _Fields, name: str) -> JsonObject:
    table = fields.value(name) or {}
    nested = not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values())
    check(not nested, name, table, "must be one flat table for all layers")
    _Fields(table, f"{name}.").require_value("partial_rotary_factor", 1.0)
    return dict(table)


def _check_rope_tables_agree(scaling: JsonObject, parameters: JsonObject) -> None:
    """Raise ValueError if rope_scaling and rope_parameters contradict each other.

    A rope_parameters table that sets nothing but theta agrees with any scaling.
    """
    kinds = [
        table.get("rope_type") or table.get("type") or "default" for table in (scaling, parameters)
    ]
    named = ("rope_type", "type", "rope_theta")
    scales, other = (
        {name: value for name, value in table.items() if name not in named and value is not None}
        for table in (scaling, parameters)
    )
    theta = scaling.get("rope_theta")
    agrees = (kinds[1] == "default" or (kinds[0] == kinds[1] and scales == other)) and (
        theta is None or parameters.get("rope_theta", theta) == theta
    )
    check(
        agrees,
        "rope_scaling",
        scaling,
        f"must say what rope_parameters = {parameters!r} says, or one must be null",
    )


def _read_rope_fields(
    fields: _Fields, theta: float, default: JsonObject | None = None
) -> JsonObject:
    """Return rope_theta and, for YaRN, rope_scaling as fields of `ModelConfig`.

    transformers writes either rope_scaling (4) or rope_parameters (5). A rope_scaling table
    replaces rope_parameters, as in transformers 5, except that theta is still read from
    rope_parameters if only that table sets it.
    """
    scaling = _checked_rope_table(fields, "rope_scaling")
    parameters = _checked_rope_table(fields, "rope_parameters")
    if scaling and parameters:
        _check_rope_tables_agree(scaling, parameters)
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = _Fields(scaling or parameters or default or {}, f"{name}.")
    elsewhere = _Fields(parameters, "rope_parameters.").number("rope_theta", theta)
    theta = rope.number("rope_theta", fields.number("rope_theta", elsewhere))
    kind = rope.value("rope_type", rope.value("type", "default"))
    check(
        kind in ("default", "yarn"),
        f"{name}.rope_type",
        kind,
        "is not supported, only default and yarn",
    )
    if kind == "default":
        return {"rope_theta": theta}
    positions = fields.integer("max_position_embeddings")
    original = fields.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=positions),
    )
    check(original > 0, "original_max_position_embeddings", original, "must be greater than 0")
    attention_factor = rope.value("attention_factor")
    yarn = YarnConfig(
        factor=rope.number("factor", positions / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
    )
    return {"rope_theta": theta, "rope_scaling": yarn}


def _common_fields(fields: _Fields, norm_eps: float) -> JsonObject:
    sizes = fields.integers(_SIZES)
    return sizes | {
        "num_key_value_heads": fields.integer(
            "num_key_value_heads", default=sizes["num_attention_heads"]
        ),
        "intermediate_size": fields.integer("intermediate_size"),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "initializer_range": fields.number("initializer_range", 0.02),
    }


def _softmax_router_config(
    fields: _Fields, choices: int, norm_topk_prob: bool, aux_loss_coef: float = 0.001
) -> RouterConfig:
    """Return a softmax router's configuration.

    The auxiliary loss of transformers sums over a token's K choices; jmoe's is their mean, so the
    coefficient is multiplied by K.
    """
    coef = choices * fields.number("router_aux_loss_coef", aux_loss_coef)
    return RouterConfig(kind="softmax", norm_topk_prob=norm_topk_prob, aux_loss_coef=coef)


def _mixtral_fields(fields: _Fields) -> JsonObject:
    choices = fields.integer("num_experts_per_tok", default=2)
    return _common_fields(fields, 1e-5) | {
        "head_dim": fields.optional_integer("head_dim"),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", "num_experts", default=8),
        "num_experts_per_tok": choices,
        "sliding_window": fields.optional_integer("sliding_window"),
        "router": _softmax_router_config(fields, choices, True),
        **_read_rope_fields(fields, 1e6),
    }


def _qwen_fields(fields: _Fields) -> JsonObject:
    sliding = fields.flag("use_sliding_window", False)
    choices = fields.integer("num_experts_per_tok")
    return _common_fields(fields, 1e-6) | {
        "head_dim": fields.optional_integer("head_dim"),
        "num_experts_per_tok": choices,
        "decoder_sparse_step": fields.integer("decoder_sparse_step", default=1),
        "mlp_only_layers": fields.tuple_value("mlp_only_layers"),
        "sliding_window": fields.optional_integer("sliding_window", 4096) if sliding else None,
        "router": _softmax_router_config(fields, choices, fields.flag("norm_topk_prob", False)),
        **_read_rope_fields(fields, 1e4),
    }


def _qwen3_moe_fields(fields: _Fields) -> JsonObject:
    return _qwen_fields(fields) | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=768),
        "num_experts": fields.integer("num_experts", "num_local_experts", default=128),
        "qk_norm": "head",
        "attention_bias": fields.flag("attention_bias", False),
    }


def _qwen2_moe_fields(fields: _Fields) -> JsonObject:
    model = _qwen_fields(fields)
    types = fields.tuple_value("layer_types")
    if model["sliding_window"] is None:
        check("sliding_attention" not in types, "layer_types", types, "needs use_sliding_window")
        types = ()
    elif not types:
        below = fields.integer("max_window_layers", default=28)
        layers = range(model["num_hidden_layers"])
        types = tuple(
            "full_attention" if i % 2 or i >= below else "sliding_attention" for i in layers
        )
    return model | {
        "moe_intermediate_size": fields.integer("moe_intermediate_size", default=1408),
        "num_experts": fields.integer("num_experts", default=60),
        "layer_types": types,
        "qkv_bias": fields.flag("qkv_bias", True),
        "shared_expert_intermediate_size": fields.integer(
            "shared_expert_intermediate_size", default=5632
        ),
        "shared_expert_gate": True,
    }


def _olmoe_fields(fields: _Fields) -> JsonObject:
    fields.require_value(
        "head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads")
    )
    choices = fields.integer("num_experts_per_tok", default=8)
    return _common_fields(fields, 1e-5) | {
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_experts", "num_local_experts", default=64),
        "num_experts_per_tok": choices,
        "qk_norm": "full",
        "clip_qkv": None if fields.value("clip_qkv") is None else fields.number("clip_qkv"),
        "attention_bias": fields.flag("attention_bias", False),
        "router": _softmax_router_config(
            fields, choices, fields.flag("norm_topk_prob", False), 0.01
        ),
        **_read_rope_fields(fields, 1e4),
    }


def _deepseek_v3_fields(fields: _Fields) -> JsonObject:
    # transformers uses head_dim for the rotary positions alone
    fields.require_value("head_dim", fields.integer("qk_rope_head_dim"))
    moe_size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", default=1)
    check(shared > 0, "n_shared_experts", shared, "must be greater than 0")
    return _common_fields(fields, 1e-6) | {
        "moe_intermediate_size": moe_size,
        "num_experts": fields.integer("n_routed_experts", "num_local_experts"),
        "num_experts_per_tok": fields.integer("num_experts_per_tok"),
        "first_k_dense_replace": fields.integer("first_k_dense_replace"),
        "shared_expert_intermediate_size": moe_size * shared,
        "attention_bias": fields.flag("attention_bias", False),
        "q_lora_rank": fields.optional_integer("q_lora_rank", 1536),
        **fields.integers(_LATENT_SIZES),
        "rope_interleave": fields.nullable_flag("rope_interleave", True),
        "router": RouterConfig(
            kind="group_limited",
            norm_topk_prob=fields.nullable_flag("norm_topk_prob", True),
            aux_loss_coef=0.0,  # the correction bias balances the experts
            n_group=fields.integer("n_group"),
            topk_group=fields.integer("topk_group"),
            routed_scaling_factor=fields.number("routed_scaling_factor"),
        ),
        **_read_rope_fields(fields, 1e4),
    }


def _gpt_oss_fields(fields: _Fields) -> JsonObject:
    layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window", 128)
    types = fields.tuple_value("layer_types") or tuple(
        "full_attention" if i % 2 else "sliding_attention" for i in range(layers)
    )
    choices = fields.integer("num_experts_per_tok", default=4)
    router = _softmax_router_config(fields, choices, True)
    return _common_fields(fields, 1e-5) | {
        "head_dim": fields.optional_integer("head_dim", 64),
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "num_experts": fields.integer("num_local_experts", "num_experts"),
        "num_experts_per_tok": choices,
        "hidden_act": "clamped_swiglu",
        "mlp_bias": True,
        "sliding_window": window,
        "layer_types": types,
        "attention_sinks": True,
        "attention_bias": fields.flag("attention_bias", True),
        "router": dataclasses.replace(router, bias=True),
        **_read_rope_fields(fields, 150_000.0, _GPT_OSS_YARN),
    }


def _gpt_moe_fields(fields: _Fields) -> JsonObject:
    """Read jmoe's own GPT-MoE: LayerNorm, exact GELU, learned positions, biases.

    Its field names are those of transformers.
    """
    sizes, choices = fields.integers(_SIZES), fields.integer("num_experts_per_tok", default=1)
    return sizes | {
        "num_key_value_heads": fields.integer(
            "num_key_value_heads", default=sizes["num_attention_heads"]
        ),
        "head_dim": fields.optional_integer("head_dim"),
        "intermediate_size": fields.integer("intermediate_size"),
        "moe_intermediate_size": fields.integer("moe_intermediate_size"),
        "num_experts": fields.integer("num_experts"),
        "num_experts_per_tok": choices,
        "mlp_only_layers": fields.tuple_value("mlp_only_layers"),
        "hidden_act": "gelu",
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_eps", 1e-5),
        "position": "learned",
        "attention_bias": fields.flag("attention_bias", True),
        "mlp_bias": fields.flag("mlp_bias", True),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "initializer_range": fields.number("initializer_range", 0.02),
        "router": _softmax_router_config(
            fields, choices, fields.flag("norm_topk_prob", False), 0.01
        ),
    }


_READERS: dict[str, Callable[[_Fields], JsonObject]] = {
    "mixtral": _mixtral_fields,
    "qwen3_moe": _qwen3_moe_fields,
    "qwen2_moe": _qwen2_moe_fields,
    "olmoe": _olmoe_fields,
    "deepseek_v3": _deepseek_v3_fields,
    "gpt_oss": _gpt_oss_fields,
    "gpt_moe": _gpt_moe_fields,
}


def family_of(hf: JsonObject) -> str:
    """Return the family of a `config.json`, a key of `ARCHITECTURES`.

    Raises ValueError if jmoe does not support its model_type.
    """
    kind = hf.get("model_type")
    family = SAME_AS.get(kind, kind) if isinstance(kind, str) else ""
    check(
        family in _READERS, "model_type", kind, f"must be one of {', '.join([*_READERS, *SAME_AS])}"
    )
    return family


def model_config(hf: JsonObject) -> ModelConfig:
    """Return the `ModelConfig` of a Hugging Face `config.json`.

    Raises ValueError naming the field whose value jmoe does not support.
    """
    family = family_of(hf)
    check_fields_supported(hf, family)
    check_quantization(hf.get("quantization_config"), family, hf.get("expert_dtype"))
    config = ModelConfig(**_READERS[family](_Fields(hf)))
    # with one expert per token jmoe does not normalize the weight, so that the router gets a
    # gradient; transformers makes the weight 1
    unlike = config.num_experts_per_tok == 1 and config.router.norm_topk_prob
    check(
        not unlike,
        "num_experts_per_tok",
        1,
        "is not supported where weights are divided by their sum",
    )
    return config


def _rope_parameters_json(config: ModelConfig) -> JsonObject:
    yarn = config.rope_scaling
    if yarn is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    fields = {name: value for name, value in dataclasses.asdict(yarn).items() if value is not None}
    unset = [name for name in ("mscale", "mscale_all_dim") if not fields[name]]
    return {"rope_type": "yarn", "rope_theta": config.rope_theta} | {
        k: v for k, v in fields.items() if k not in unset
    }


def _same_named_fields(config: ModelConfig, *names: str) -> JsonObject:
    """Return fields of `ModelConfig` that have the same names in `config.json`."""
    return {name: getattr(config, name) for name in names}


def _family_specific_fields(config: ModelConfig) -> dict[str, JsonObject]:
    """Return the fields that only some families have, by family."""
    router = config.router
    head_dim = {"head_dim": config.dim_per_head}
    types = config.layer_types or ("sliding_attention",) * config.num_hidden_layers
    coef = router.aux_loss_coef / config.num_experts_per_tok
    experts = {"router_aux_loss_coef": coef, "output_router_logits": False}
    windowed = (
        experts
        | head_dim
        | {
            "num_local_experts": config.num_experts,
            "sliding_window": config.sliding_window,
        }
    )
    divided = {"norm_topk_prob": router.normalizes_weights(config.num_experts_per_tok)}
    dense_layers = {
        "mlp_only_layers": [i for i, kind in enumerate(config.layer_kinds) if kind == "dense"]
    }
    qwen: JsonObject = (
        experts
        | head_dim
        | divided
        | _same_named_fields(config, "moe_intermediate_size", "num_experts", "sliding_window")
    )
    qwen |= dense_layers | {
        "decoder_sparse_step": 1,
        "use_sliding_window": config.sliding_window is not None,
    }
    qwen2_types = types if config.sliding_window else ("full_attention",) * config.num_hidden_layers
    return {
        "mixtral": windowed,
        "qwen3_moe": qwen | _same_named_fields(config, "attention_bias"),
        "qwen2_moe": (
            qwen
            | _same_named_fields(config, "qkv_bias", "shared_expert_intermediate_size")
            | {"layer_types": list(qwen2_types)}
        ),
        "olmoe": experts
        | divided
        | _same_named_fields(config, "num_experts", "clip_qkv", "attention_bias"),
        "deepseek_v3": _deepseek_config_json(config),
        "gpt_oss": windowed | {"attention_bias": config.attention_bias, "layer_types": list(types)},
        "gpt_moe": (
            experts
            | head_dim
            | divided
            | dense_layers
            | _same_named_fields(
                config, "moe_intermediate_size", "num_experts", "attention_bias", "mlp_bias"
            )
        ),
    }


def _deepseek_config_json(config: ModelConfig) -> JsonObject:
    router = config.router
    n_group, topk_group = router.n_group, router.topk_group
    moe_size = config.moe_intermediate_size
    return {
        "moe_intermediate_size": moe_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_expert_intermediate_size // moe_size,
        "first_k_dense_replace": config.first_k_dense_replace,
        "norm_topk_prob": router.normalizes_weights(config.num_experts_per_tok),
        "n_group": n_group,
        "topk_group": topk_group,
        "routed_scaling_factor": router.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
        **_same_named_fields(
            config, "attention_bias", "q_lora_rank", "rope_interleave", *_LATENT_SIZES
        ),
    }


def _family_config_json(config: ModelConfig, family: str) -> JsonObject:
    """Return a `config.json` of this family for the decoder; options that the family lacks are
    omitted.
    """
    all_experts = family in ("mixtral", "olmoe", "gpt_oss")
    act_and_norm = {
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": _rope_parameters_json(config),
    }
    if family == "gpt_moe":
        act_and_norm = {"hidden_act": "gelu", "layer_norm_eps": config.norm_eps}
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        **_same_named_fields(config, *_SIZES, "num_key_value_heads", "num_experts_per_tok"),
        "intermediate_size": (
            config.moe_intermediate_size if all_experts else config.intermediate_size
        ),
        **act_and_norm,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "bos_token_id": None,  # the tokenizer decides; the family's default would be wrong
        "eos_token_id": None,
        "pad_token_id": None,
        **_family_specific_fields(config)[family],
    }


def _decoder_normal_form(config: ModelConfig) -> JsonObject:
    """Return the options that determine the decoder's output, in a normal form.

    Two configurations of the same function have equal normal forms.
    """
    router = config.router
    values = dataclasses.asdict(config) | {
        "head_dim": config.dim_per_head,
        "layer_types": config.layer_types or ("sliding_attention",) * config.num_hidden_layers,
        "layer_kinds": config.layer_kinds,
        "router": (
            router.bias,
            router.rules.scores,
            router.rules.has_bias,
            router.normalizes_weights(config.num_experts_per_tok),
            router.n_group,
            router.topk_group,
        ),
        "routed_scaling_factor": router.routed_scaling_factor,
    }
    if config.sliding_window is None:
        del values["layer_types"]
    if "dense" not in config.layer_kinds:
        del values["intermediate_size"]
    if config.position == "learned":
        del values["rope_theta"]
    if config.attention_bias:
        del values["qkv_bias"]
    for name in (
        "capacity_factor",
        "decoder_sparse_step",
        "first_k_dense_replace",
        "mlp_only_layers",
    ):
        del values[name]
    return values


def hf_config(config: ModelConfig) -> JsonObject:
    """Return a `config.json` of the first family that computes the same function as this decoder.

    Raises ValueError with the options that the closest family lacks.
    """
    tried = {}
    for family in _READERS:
        hf = _family_config_json(config, family)
        try:
            tried[family] = describe_differences(
                _decoder_normal_form(config), _decoder_normal_form(model_config(hf))
            )
        except ValueError:  # the family has no such sizes at all
            continue
        if not tried[family]:
            return hf
    near = min(tried, key=lambda family: len(tried[family]))
    raise ValueError(
        f"model: no Hugging Face family has all its options; {near} differs in"
        f" {'; '.join(tried[near])}"
    )


def updated_hf_config(hf: JsonObject, config: ModelConfig) -> JsonObject:
    """Return the `config.json` `hf` with the sizes and options of `config`; other fields are kept.

    The fields that describe quantized weights are dropped. Raises ValueError if the family has no
    such decoder.
    """
    family = family_of(hf)
    known_here = (
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_router_logits",
    )
    written = {
        name: value
        for name, value in _family_config_json(config, family).items()
        if name not in known_here
    }
    changed = {
        name: value for name, value in hf.items() if name not in COMPRESSION_FIELDS
    } | written
    unlike = describe_differences(
        _decoder_normal_form(config), _decoder_normal_form(model_config(changed))
    )
    if unlike:
        raise ValueError(f"model_type = {family!r}: has no decoder with {'; '.join(unlike)}")
    return changed
