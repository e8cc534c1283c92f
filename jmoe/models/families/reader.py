"""Typed access to a Hugging Face `config.json`, and the fields that most families read alike.

A field that a `config.json` omits has the default of the family's configuration class in
transformers.
"""

import math
from collections.abc import Iterable

from jmoe.config import MODEL_LIMITS, RouterConfig, check
from jmoe.types import Json, JsonObject

# Fields of every family that have the same names in `ModelConfig`.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


class ConfigFields:
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
        """Return the integer under the first of these names that is present, or `default`.

        Raises ValueError if none is present and there is no default, if several are present and
        differ, or if the value exceeds jmoe's limit.
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

    def integer_or_none(self, name: str, default: int | None = None) -> int | None:
        """Return an integer, None if the field is null, or `default` if it is missing."""
        value = self._fields.get(name, default)
        return None if value is None else self.integer(name, default=default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._typed_value(name, default, (int, float), "a number")
        check(math.isfinite(value), self._prefix + name, value, "must be finite")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if the field is missing."""
        values = self.tuple_value(name)
        are_numbers = all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
            for x in values
        )
        check(are_numbers, self._prefix + name, values, "must be a list of finite numbers")
        return tuple(map(float, values))

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


def common_fields(
    fields: ConfigFields, norm_eps: float, intermediate_size: int | None = None
) -> JsonObject:
    """Return the arguments of `ModelConfig` that most families read alike.

    norm_eps, intermediate_size: the family's defaults; None requires the field.
    """
    sizes = fields.integers(SIZES)
    return sizes | {
        "num_key_value_heads": fields.integer(
            "num_key_value_heads", default=sizes["num_attention_heads"]
        ),
        "intermediate_size": fields.integer("intermediate_size", default=intermediate_size),
        "norm_eps": fields.number("rms_norm_eps", norm_eps),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "initializer_range": fields.number("initializer_range", 0.02),
    }


def softmax_router_config(
    fields: ConfigFields, choices: int, norm_topk_prob: bool, aux_loss_coef: float = 0.001
) -> RouterConfig:
    """Return a softmax router's configuration.

    The auxiliary loss of transformers sums over a token's K choices; jmoe's is their mean, so the
    coefficient is multiplied by K. choices: K. aux_loss_coef: transformers' coefficient if
    `router_aux_loss_coef` is missing.
    """
    coef = choices * fields.number("router_aux_loss_coef", aux_loss_coef)
    return RouterConfig(kind="softmax", norm_topk_prob=norm_topk_prob, aux_loss_coef=coef)
