"""Sampling defaults and end-of-turn tokens from a model's files, for requests that do not set
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from jmoe.inference.sampling_params import SamplingParams
from jmoe.models.generation_config import FILE, GenerationConfig
from jmoe.models.pretrained import read_config
from jmoe.types import Json


@dataclass(frozen=True)
class ModelSamplingDefaults:
    """Sampling parameters and end-of-turn tokens that a model's files set as defaults.

    config: the contents of the files.
    defaults: values of `SamplingParams` fields for requests that do not set them; empty with
        `--sampling-defaults openai`.
    turn_end_token_ids: tokens that end a chat answer, besides those that end any text.
    """

    config: GenerationConfig
    defaults: Mapping[str, Json] = field(default_factory=dict)
    turn_end_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path, source: Literal["model", "openai"]) -> ModelSamplingDefaults:
        """Return the defaults in a Hugging Face folder.

        Raises ValueError naming the file if its values are no valid sampling parameters.

        source: "model" uses the folder's sampling parameters, "openai" ignores them.
        """
        config = GenerationConfig.read(folder, read_config(folder))
        if source == "openai":
            return cls(config)
        try:
            SamplingParams(**config.sampling)
        except ValueError as error:
            hint = "correct it, or give --sampling-defaults openai"
            raise ValueError(f"{folder / FILE}: {error}; {hint}") from error
        return cls(config, config.sampling)

    def with_turn_end_tokens(
        self, names: Iterable[str], tokenizer: Tokenizer, vocab_size: int
    ) -> ModelSamplingDefaults:
        """Return a copy whose turn ends are the tokens `names` and config.json's eos_token_id.

        Names that are no token, ids beyond `vocab_size`, and tokens that end any text are left out.
        """
        ids = {tokenizer.token_to_id(name) for name in names} | {*self.config.config_eos_token_ids}
        ends = {token for token in ids if token is not None and token < vocab_size} - {
            *self.config.eos_token_ids
        }
        return replace(self, turn_end_token_ids=tuple(sorted(ends)))

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value:g}" for name, value in self.config.sampling.items())
        line = "sampling defaults: OpenAI's, temperature 1"
        if self.defaults:
            line = (
                f"sampling defaults: {said}, from {FILE} (--sampling-defaults openai: temperature 1"
                " alone)"
            )
        elif said:
            line += f"; --sampling-defaults model: {said}, from {FILE}"
        not_used = ", ".join(f"{name} = {value!r}" for name, value in self.config.not_used.items())
        return f"{line}; not used of {FILE}: {not_used}" if not_used else line
