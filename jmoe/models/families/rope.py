"""The rotary positions of a Hugging Face `config.json`: read and written."""

import dataclasses

from jmoe.config import (
    DynamicRopeConfig,
    LinearRopeConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    ModelConfig,
    NtkAlphaRopeConfig,
    RopeScaling,
    YarnConfig,
    check,
)
from jmoe.models.families.reader import ConfigFields
from jmoe.types import JsonObject

KNOWN = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


def _checked_rope_table(fields: ConfigFields, name: str, *, partial: bool) -> JsonObject:
    table = fields.value(name) or {}
    nested = not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values())
    check(not nested, name, table, "must be one flat table for all layers")
    if not partial:
        ConfigFields(table, f"{name}.").require_value("partial_rotary_factor", 1.0)
    return dict(table)


def _check_rope_tables_agree(scaling: JsonObject, parameters: JsonObject) -> None:
    """Raise ValueError if rope_scaling and rope_parameters contradict each other.

    A rope_parameters table of type `default` agrees with any scaling, unless both tables name a
    theta and the two differ.
    """
    kinds = [
        table.get("rope_type") or table.get("type") or "default" for table in (scaling, parameters)
    ]
    named = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
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


def read_rope_fields(
    fields: ConfigFields,
    theta: float,
    default: JsonObject | None = None,
    *,
    partial: float | None = None,
    alpha: bool = False,
) -> JsonObject:
    """Return rope_theta, partial_rotary_factor and, if positions are scaled, rope_scaling as fields
    of `ModelConfig`.

    theta, partial: the family's defaults; it rotates whole heads if `partial` is None.
    default: the family's rope_parameters. alpha: whether a `dynamic` table may have an `alpha`.

    transformers writes either rope_scaling (4) or rope_parameters (5). A rope_scaling table
    replaces rope_parameters, as in transformers 5, except that theta is still read from
    rope_parameters if only that table sets it. Raises ValueError for any other kind of positions.
    """
    scaling = _checked_rope_table(fields, "rope_scaling", partial=partial is not None)
    parameters = _checked_rope_table(fields, "rope_parameters", partial=partial is not None)
    if scaling and parameters:
        _check_rope_tables_agree(scaling, parameters)
    name = "rope_scaling" if scaling else "rope_parameters"
    rope = ConfigFields(scaling or parameters or default or {}, f"{name}.")

    def of_any_table(key: str, default: float) -> float:
        elsewhere = ConfigFields(parameters, "rope_parameters.").number(key, default)
        return rope.number(key, fields.number(key, elsewhere))

    read = {"rope_theta": of_any_table("rope_theta", theta)}
    if partial is not None:
        read["partial_rotary_factor"] = of_any_table("partial_rotary_factor", partial)
    if alpha and rope.value("rope_type", rope.value("type")) == "dynamic" and rope.value("alpha"):
        return {**read, "rope_scaling": NtkAlphaRopeConfig(rope.number("alpha"))}
    form = _read_scaling(fields, rope, name)
    return read if form is None else {**read, "rope_scaling": form}


def _read_scaling(fields: ConfigFields, rope: ConfigFields, name: str) -> RopeScaling | None:
    """Return how the table `rope`, called `name`, scales positions; None if it does not."""
    kind = rope.value("rope_type", rope.value("type", "default"))
    check(kind in KNOWN, f"{name}.rope_type", kind, f"is not supported, only {', '.join(KNOWN)}")
    if kind == "default":
        return None
    if kind != "yarn" and fields.value("kv_lora_rank") is not None:
        # DeepSeek's modelling code in transformers scales scores by it for every rope_type
        rope.require_value("mscale_all_dim", 0)
    if kind == "linear":
        return LinearRopeConfig(rope.number("factor"))
    positions = fields.integer("max_position_embeddings")
    if kind == "dynamic":
        return DynamicRopeConfig(rope.number("factor"), positions)
    original = fields.integer(
        "original_max_position_embeddings",
        default=rope.integer("original_max_position_embeddings", default=positions),
    )
    check(original > 0, "original_max_position_embeddings", original, "must be greater than 0")
    if kind == "llama3":
        return Llama3RopeConfig(
            factor=rope.number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    attention_factor = rope.value("attention_factor")
    if kind == "longrope":
        return LongRopeConfig(
            short_factor=rope.numbers("short_factor"),
            long_factor=rope.numbers("long_factor"),
            original_max_position_embeddings=original,
            factor=rope.number("factor", positions / original),
            attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        )
    return YarnConfig(
        factor=rope.number("factor", positions / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=None if attention_factor is None else rope.number("attention_factor"),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
    )


def rope_parameters_json(config: ModelConfig) -> JsonObject:
    """Return the table `rope_parameters` of a `config.json`."""
    plain: JsonObject = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1.0:
        plain["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling is None:
        return plain
    if isinstance(config.rope_scaling, NtkAlphaRopeConfig):
        return plain | {"rope_type": "dynamic", "alpha": config.rope_scaling.alpha, "factor": 1.0}
    scaling = dataclasses.asdict(config.rope_scaling)
    unset = ("mscale", "mscale_all_dim")  # 0 in YaRN
    chosen_later = ("length", "is_long")
    return plain | {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in scaling.items()
        if value is not None and not (name in unset and value == 0) and name not in chosen_later
    }
