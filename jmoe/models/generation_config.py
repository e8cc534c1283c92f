"""The default sampling parameters and end-of-text tokens of a checkpoint.

Read from generation_config.json; config.json supplies the end-of-text tokens if the former has
none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jmoe.config import check
from jmoe.models.folder import has_file
from jmoe.models.pretrained import read_json_object
from jmoe.types import Json, JsonObject

FILE = "generation_config.json"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Further fields that affect the output of transformers' `generate`, with the value besides None
# that disables each.
_NOT_USED: JsonObject = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_decoder_ids": [],
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "top_h": None,
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class GenerationConfig:
    """A checkpoint's default sampling parameters and end-of-text tokens.

    eos_token_ids: tokens that end a text, as in transformers.
    config_eos_token_ids: the eos_token_id of config.json, which also ends a chat's answer.
    sampling: the fields of `SAMPLING` that the files set.
    not_used: other fields set to values that would change what transformers generates.
    """

    eos_token_ids: tuple[int, ...]
    config_eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Json]
    not_used: Mapping[str, Json]

    @classmethod
    def read(cls, folder: Path, config_fields: Mapping[str, Json]) -> "GenerationConfig":
        """Return the generation defaults of a folder whose config.json holds `config_fields`.

        Raises ValueError naming the file and field of an invalid value.
        """
        file = folder / FILE
        fields = read_json_object(file) if has_file(file) else {}
        of_config = _token_ids(folder / "config.json", config_fields.get("eos_token_id"))
        own = "eos_token_id" in fields
        sampling = {name: fields[name] for name in SAMPLING if fields.get(name) is not None}
        for name, value in sampling.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            check(number, f"{file}: {name}", value, "must be a number")
        if fields.get("do_sample") is False:
            sampling["temperature"] = 0.0
        not_used = {
            name: fields[name]
            for name, no in _NOT_USED.items()
            if fields.get(name) not in (None, no)
        }
        eos = _token_ids(file, fields["eos_token_id"]) if own else of_config
        return cls(eos, of_config, sampling, not_used)


def _token_ids(file: Path, token: Json) -> tuple[int, ...]:
    """Return an eos_token_id, which is an id, a list of ids or None, as a tuple."""
    ids = token if isinstance(token, list) else [] if token is None else [token]
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids)
    check(whole, f"{file}: eos_token_id", token, "must be a token id or a list of them")
    return tuple(ids)
