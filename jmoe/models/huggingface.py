"""Convert Hugging Face configurations to `ModelConfig`, and back.

`families/` has a file for each family; `config_fields.py` says which fields are read, limited or
ignored.
"""

import dataclasses

from jmoe.config import (
    ROUTER_TRAINING_ONLY,
    ModelConfig,
    RouterConfig,
    check,
    describe_differences,
)
from jmoe.models.config_fields import check_fields_supported
from jmoe.models.families import FAMILIES
from jmoe.models.families.reader import ConfigFields
from jmoe.models.families.unsupported import MISSING_PARTS
from jmoe.models.quantization import COMPRESSION_FIELDS, check_quantization
from jmoe.types import JsonObject

# {model type: family}
_MODEL_TYPES = {name: name for name in FAMILIES} | {
    alias: name for name, family in FAMILIES.items() for alias in family.same_as
}


def family_of(hf: JsonObject) -> str:
    """Return the family of a `config.json`, a key of `FAMILIES`.

    Raises ValueError if jmoe does not support its model_type; for a family in `MISSING_PARTS`, the
    message says what jmoe lacks.
    """
    kind = hf.get("model_type")
    family = _MODEL_TYPES.get(kind, "") if isinstance(kind, str) else ""
    missing = MISSING_PARTS.get(kind.removesuffix("_text"), "") if isinstance(kind, str) else ""
    why = f"; jmoe lacks {missing}" if missing else ""
    check(bool(family), "model_type", kind, f"must be one of {', '.join(_MODEL_TYPES)}{why}")
    return family


def model_config(hf: JsonObject) -> ModelConfig:
    """Return the `ModelConfig` of a Hugging Face `config.json`.

    Raises ValueError naming the field whose value jmoe does not support.
    """
    family = family_of(hf)
    check_fields_supported(hf, family)
    check_quantization(hf.get("quantization_config"), family, hf.get("expert_dtype"))
    config = ModelConfig(**FAMILIES[family].read(ConfigFields(hf)))
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


def _family_config_json(config: ModelConfig, family: str) -> JsonObject:
    """Return a `config.json` of this family for the decoder; options that the family lacks are
    omitted.
    """
    described = FAMILIES[family]
    return {
        "architectures": [described.architecture],
        "model_type": family,
        **described.write(config),
    }


def _decoder_normal_form(config: ModelConfig) -> JsonObject:
    """Return the options that determine the decoder's output, in a normal form.

    Two configurations of the same function have equal normal forms.
    """
    values = dataclasses.asdict(config) | {
        "head_dim": config.dim_per_head,
        "layer_types": config.layer_types or ("sliding_attention",) * config.num_hidden_layers,
        "layer_kinds": config.layer_kinds,
        "router": _router_normal_form(config.router, config.num_experts_per_tok),
    }
    if config.sliding_window is None and not config.has_chunked_attention:
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


def _router_normal_form(router: RouterConfig, num_experts_per_tok: int) -> JsonObject:
    """Return the rules and options that determine a router's choices and weights, in a normal form.

    A new column of `RouterRules` or field of `RouterConfig` is compared unless it is left out here.
    """
    values = dataclasses.asdict(router.rules) | dataclasses.asdict(router)
    values["normalizes"] = router.normalizes_weights(num_experts_per_tok)
    if router.n_group == 1:
        del values["limits_groups"]
    for name in ("kind", "norm_topk_prob", "num_experts_per_tok", "may_drop_second"):
        del values[name]
    for name in (*ROUTER_TRAINING_ONLY, "aux_loss_coef"):
        del values[name]
    return values


def hf_config(config: ModelConfig) -> JsonObject:
    """Return a `config.json` of the first family that computes the same function as this decoder.

    Raises ValueError with the options that the closest family lacks.
    """
    tried = {}
    for family in FAMILIES:
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
    # rope_parameters says all that these fields of transformers 4 say
    replaced = ("rope_scaling", "original_max_position_embeddings")
    dropped = (*COMPRESSION_FIELDS, *(replaced if "rope_parameters" in written else ()))
    changed = {name: value for name, value in hf.items() if name not in dropped} | written
    unlike = describe_differences(
        _decoder_normal_form(config), _decoder_normal_form(model_config(changed))
    )
    if unlike:
        raise ValueError(f"model_type = {family!r}: has no decoder with {'; '.join(unlike)}")
    return changed
