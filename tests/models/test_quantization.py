"""The format of a matrix, by its tensors and by `config.json`. What is refused:
test_huggingface.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jmoe.models.huggingface import family_of, model_config
from jmoe.models.pretrained import abstract_decoder, read_config_file
from jmoe.models.quantization import (
    announced_format,
    announced_group_size,
    format_of_matrix,
    quantized_cache_note,
)
from jmoe.models.safetensors_io import read_headers
from jmoe.models.weights import list_parameters

FIXTURES = Path(__file__).parents[1] / "fixtures" / "compressed"


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_the_config_announces_the_format_of_the_tensors(name: str) -> None:
    fields, stored = read_config_file(FIXTURES / name), read_headers(FIXTURES / name)
    config = model_config(fields)
    shapes = abstract_decoder(config)[2]
    seen = set()
    for parameter in list_parameters(shapes, config, family_of(fields), stored):
        if parameter.experts and len(parameter.matrix_shape) == 2:
            for piece in parameter.pieces():
                form = format_of_matrix(stored, piece.name, piece.shape)
                assert form is not None
                seen.add((type(form), getattr(form, "bits", None), form.label))
    announced = announced_format(fields)
    assert seen == {(type(announced), getattr(announced, "bits", None), announced.label)}  # type: ignore[union-attr]


def test_plain_numbers_have_no_format() -> None:
    assert announced_format({}) is announced_format({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("quantization", "group"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 512),
        ({"config_groups": {"a": {"weights": {"group_size": 32}}}}, 32),
        ({"config_groups": {"a": {"weights": {"strategy": "channel"}}}}, 512),
        (None, 512),
    ],
)
def test_inputs_that_share_a_scale(quantization: dict[str, object] | None, group: int) -> None:
    assert announced_group_size({"quantization_config": quantization}, 512) == group


def test_a_quantized_cache_is_named() -> None:
    note = quantized_cache_note(read_config_file(FIXTURES / "nvfp4"))
    assert note.startswith("quantization_config.kv_cache_quant_algo = 'FP8': the KV cache is not")
    note = quantized_cache_note(read_config_file(FIXTURES / "nvfp4"), "fp8")
    assert note.endswith("= 'FP8': the KV cache is in FP8")
    scheme = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert "kv_cache_scheme = {'num_bits': 8" in quantized_cache_note(scheme)
    for fields in ({}, {"quantization_config": {"kv_cache_scheme": None}}):
        assert quantized_cache_note(fields) == ""
