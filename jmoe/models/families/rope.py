"""The rotary positions of a Hugging Face `config.json`: read and written."""

import dataclasses

from jmoe.config import ModelConfig, YarnConfig, check
from jmoe.models.families.reader import ConfigFields
from jmoe.types import JsonObject


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
) -> JsonObject:
    """Return rope_theta, partial_rotary_factor and, for YaRN, rope_scaling as fields of
    `ModelConfig`.

    theta, partial: the family's defaults; it rotates whole heads if `partial` is None.
    default: the family's rope_parameters.

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
    kind = rope.value("rope_type", rope.value("type", "default"))
    check(
        kind in ("default", "yarn"),
        f"{name}.rope_type",
        kind,
        "is not supported, only default and yarn",
    )
    if kind == "default":
        return read
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
    return {**read, "rope_scaling": yarn}


def rope_parameters_json(config: ModelConfig) -> JsonObject:
    """Return the table `rope_parameters` of a `config.json`."""
    plain: JsonObject = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1.0:
        plain["partial_rotary_factor"] = config.partial_rotary_factor
    yarn = config.rope_scaling
    if yarn is None:
        return plain
    fields = {name: value for name, value in dataclasses.asdict(yarn).items() if value is not None}
    unset = [name for name in ("mscale", "mscale_all_dim") if not fields[name]]
    scaling = {name: value for name, value in fields.items() if name not in unset}
    return plain | {"rope_type": "yarn"} | scaling
