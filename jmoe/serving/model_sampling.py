"""How a chat's tokens are drawn, and where its turns end, unless a request says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from jmoe.inference.sampling_params import SamplingParams
from jmoe.models.generation_config import FILE, GenerationConfig
from jmoe.models.pretrained import read_config


@dataclass(frozen=True)
class ModelSampling:
    """Defaults from a model's files for requests that leave sampling open.

    defaults: fields of `SamplingParams`. turn_end_token_ids: end a turn of a chat, beside those
    that end any text.
    """

    config: GenerationConfig
    defaults: Mapping[str, Any] = field(default_factory=dict)
    turn_end_token_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, folder: Path, wanted: Literal["model", "openai"]) -> ModelSampling:
        """Read a Hugging Face folder's; `ValueError` naming the file for numbers that cannot be
        drawn by.
        """
        config = GenerationConfig.read(folder, read_config(folder))
        if wanted == "openai":
            return cls(config)
        try:
            SamplingParams(**config.sampling)
        except ValueError as error:
            hint = "correct it, or give --sampling-defaults openai"
            raise ValueError(f"{folder / FILE}: {error}; {hint}") from error
        return cls(config, config.sampling)

    def with_turn_ends(
        self, names: Iterable[str], tokenizer: Tokenizer, vocab_size: int
    ) -> ModelSampling:
        """Return it with the tokens of these names, and config.json's, as ends of turns."""
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
