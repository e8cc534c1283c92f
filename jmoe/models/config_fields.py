"""The fields of a Hugging Face `config.json`, by family: honoured, refused or harmless.

The table lists all fields of the family's configuration class in transformers 5, under all their
names, and further fields that published checkpoints have. A field that affects the logits is read
by the family's `read` (honoured) or limited to supported values (`SupportedValues`); a field that
cannot affect them is accepted (harmless). transformers ignores fields outside this table, and so
does jmoe.
"""

from collections.abc import Iterator, Mapping

from jmoe.models.families import FAMILIES
from jmoe.models.families.outcomes import Outcome, SupportedValues, TrainingOnlyField
from jmoe.types import JsonObject

CONFIG_FIELDS: dict[str, Mapping[str, Outcome]] = {
    name: family.fields for name, family in FAMILIES.items()
}


def unsupported_fields(fields: JsonObject, family: str) -> Iterator[str]:
    """Yield a message for each field whose value jmoe does not support."""
    for name, outcome in CONFIG_FIELDS[family].items():
        value = fields.get(name)
        if (
            isinstance(outcome, SupportedValues)
            and value is not None
            and value not in outcome.values
        ):
            only = " or ".join(map(repr, outcome.values)) or "null"
            yield f"{name} = {value!r}: is not supported, only {only}"


def check_fields_supported(fields: JsonObject, family: str) -> None:
    """Raise ValueError naming the first field whose value jmoe does not support."""
    for message in unsupported_fields(fields, family):
        raise ValueError(message)


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
