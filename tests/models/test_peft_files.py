"""Adapters as PEFT's files: read, written again, and merged, against what PEFT computes.

The folders in tests/fixtures/lora are PEFT's own (tests/fixtures/make_lora.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jmoe.models.huggingface import family_of, model_config
from jmoe.models.lora import lora_target_of
from jmoe.models.peft_files import (
    CONFIG,
    WEIGHTS,
    AdapterFolder,
    read_adapter_folder,
    write_adapter_folder,
)
from jmoe.models.pretrained import read_config
from jmoe.models.safetensors_io import TensorReader, read_header
from tests.model_configs import CHECKPOINTS

LORA = CHECKPOINTS.parent / "lora"
NAMES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]


def read(folder: Path, name: str) -> AdapterFolder:
    fields = read_config(CHECKPOINTS / name)
    return read_adapter_folder(folder, model_config(fields), family_of(fields))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with TensorReader() as reader:
        return {
            name: np.concatenate(
                [rows.copy() for *_, rows in reader.read_chunks(tensor, 0, tensor.shape[0])]
            )
            for name, tensor in read_header(folder / WEIGHTS).items()
        }


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_are_the_tensors_of_peft(name: str, tmp_path: Path) -> None:
    own = read(LORA / name / "first", name)
    assert {lora_target_of(p.path) for p in own.parameters} == set(own.lora.targets)
    write_adapter_folder(tmp_path, own.parameters, own.adapters, own.lora, "base")
    written, expected = tensors(tmp_path), tensors(LORA / name / "first")
    assert written.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
    theirs = json.loads((LORA / name / "first" / CONFIG).read_text())
    ours = json.loads((tmp_path / CONFIG).read_text())
    for field in ("r", "lora_alpha", "use_rslora", "bias", "peft_type"):
        assert ours[field] == theirs[field]
    assert sorted(ours["target_modules"]) == sorted(theirs["target_modules"])
    assert set(ours["target_parameters"]) == set(theirs["target_parameters"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True: is not supported, only False"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3': must be LORA"),
        ({"bias": "all"}, "bias = 'all': is not supported, only 'none'"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights = 'pissa': is not supported, only True",
        ),
        ({"r": 3}, r"has shape \[\d+, \d+\], must have"),
        ({"r": 0}, "lora.rank = 0: must be at least 1"),
        ({"r": None}, "adapter_config.json: r = None: must be a whole number"),
        ({"lora_alpha": None}, "adapter_config.json: lora_alpha = None: must be a number"),
        ({"use_rslora": "no"}, "use_rslora = 'no': must be true or false"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = .* is not supported"),
    ],
)
def test_options_that_are_not_supported(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(LORA / "mixtral" / "first", folder)
    fields = json.loads((folder / CONFIG).read_text()) | change
    (folder / CONFIG).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        read(folder, "mixtral")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must have .* the adapter is of another model"):
        read(LORA / "mixtral" / "first", "qwen3_moe")
    with pytest.raises(ValueError, match=f"must be a folder with {CONFIG}"):
        read(tmp_path, "mixtral")


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """One adapter's NaN would reach the other rows of a batch: 0 x NaN is NaN."""
    own = read(LORA / "mixtral" / "first", "mixtral")
    own.adapters["moe_layers"]["attention"]["w_qkv"]["b"][0, 0, 0] = np.nan
    write_adapter_folder(tmp_path, own.parameters, own.adapters, own.lora, "base")
    with pytest.raises(ValueError, match=r"lora_B.weight' has values that are not finite"):
        read(tmp_path, "mixtral")
