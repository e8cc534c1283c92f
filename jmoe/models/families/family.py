"""The description of one Hugging Face family of models: its fields, tensors, reader and writer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jmoe.config import ModelConfig
from jmoe.models.families.outcomes import Outcome
from jmoe.models.families.reader import ConfigFields
from jmoe.models.families.tensors import FUSED, TensorSource
from jmoe.types import JsonObject


@dataclass(frozen=True)
class Family:
    """One Hugging Face family: `config.json` and tensor names as the decoder's parts, and back.

    model_type: its name in `config.json`. architecture: the class that `save_pretrained` names.
    read: a function of a file's `ConfigFields` that returns the arguments of `ModelConfig`; raises
        ValueError naming a field.
    write: a function of a decoder's `ModelConfig` that returns the fields of a `config.json`; it
        may omit the decoder's options that the family lacks, because `hf_config` reads the result
        back and compares.
    fields: the outcome of every field of its `config.json`.
    tensors: the parameters whose tensors have other names than in `LAYER`.
    fused_tensors: the parameters whose tensors have other names where transformers 5 stores a
        layer's experts in one tensor; empty if it never does.
    same_as: further model types with the same fields and tensors.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigFields], JsonObject]
    write: Callable[[ModelConfig], JsonObject]
    fields: Mapping[str, Outcome]
    tensors: Mapping[str, TensorSource] = field(default_factory=dict)
    fused_tensors: Mapping[str, TensorSource] = field(default_factory=lambda: FUSED)
    same_as: tuple[str, ...] = ()
