"""generation_config.json beside config.json, read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from jmoe.models.generation_config import GenerationConfig


def read(folder: Path, own: dict[str, Any] | None, config: dict[str, Any]) -> GenerationConfig:
    if own is not None:
        (folder / "generation_config.json").write_text(json.dumps(own))
    return GenerationConfig.read(folder, config)


@pytest.mark.parametrize(
    ("own", "config", "ends"),
    [
        (None, {}, ()),
        (None, {"eos_token_id": 3}, (3,)),
        ({}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (1, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, ()),
    ],
)
def test_ends_of_texts(
    tmp_path: Path, own: dict[str, Any] | None, config: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert read(tmp_path, own, config).eos_token_ids == ends


def test_what_the_authors_draw_by(tmp_path: Path) -> None:
    """Numbers are taken, what this engine does not do is named, what changes nothing is not."""
    own = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "do_sample": True,
        "typical_p": 1.0,
        "num_beams": 1,
    }
    found = read(
        tmp_path,
        own | {"no_repeat_ngram_size": 3, "transformers_version": "5.0"},
        {"eos_token_id": 2},
    )
    assert found.sampling == {"temperature": 0.6, "top_k": 20}
    assert found.not_used == {"no_repeat_ngram_size": 3}
    assert found.config_eos_token_ids == (2,)
    assert read(tmp_path, {"do_sample": False}, {}).sampling == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        (
            {"eos_token_id": "</s>"},
            "generation_config.json: eos_token_id = '</s>': must be a token id or a list of them",
        ),
        ({"eos_token_id": [1, -2]}, "must be a token id or a list of them"),
        ({"temperature": "0.6"}, "generation_config.json: temperature = '0.6': must be a number"),
        ({"top_p": True}, "generation_config.json: top_p = True: must be a number"),
    ],
)
def test_damage_is_named(tmp_path: Path, own: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        read(tmp_path, own, {})
