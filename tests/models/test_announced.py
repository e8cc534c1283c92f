"""The tensors that a `config.json` and an index announce are those of the files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jmoe.models.announced import has_all_weights, read_announced, read_index
from jmoe.models.safetensors_io import read_headers
from tests.model_configs import CHECKPOINTS

COMPRESSED = Path(__file__).parents[1] / "fixtures" / "compressed"
INDEX = "model.safetensors.index.json"


def described(folder: Path, tmp_path: Path, names: list[str]) -> Path:
    """A folder with the `config.json` of another one and an index of these tensors."""
    shutil.copy(folder / "config.json", tmp_path)
    places = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 7_000_000_000}, "weight_map": places}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize(
    "folder",
    [
        *(CHECKPOINTS / n for n in ("mixtral", "deepseek_v3", "gpt_oss_mxfp4")),
        *(COMPRESSED / n for n in ("fp8", "int4", "int8", "mxfp4", "fp4_experts")),
    ],
    ids=lambda folder: folder.name,
)
def test_with_an_index_every_tensor_is_as_in_the_files(folder: Path, tmp_path: Path) -> None:
    stored = read_headers(folder)
    announced = read_announced(described(folder, tmp_path, list(stored)))
    assert announced.absent == announced.unexpected == ()
    assert announced.file_bytes == 7_000_000_000
    shapes = {name: tensor.shape for name, tensor in announced.tensors.items()}
    assert shapes == {name: tensor.shape for name, tensor in stored.items() if name in shapes}
    assert {t.file.name for t in announced.tensors.values()} == {"model-00001-of-00002.safetensors"}


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    names = list(read_headers(CHECKPOINTS / "mixtral"))
    gone, more = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.extra.weight"
    left = [name for name in names if name != gone]
    folder = described(CHECKPOINTS / "mixtral", tmp_path, [*left, more])
    announced = read_announced(folder)
    assert (announced.absent, announced.unexpected) == ((gone,), (more,))
    assert not has_all_weights(folder) and has_all_weights(CHECKPOINTS / "mixtral")


def test_an_index_without_a_map_is_named(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: has no weight_map"):
        read_index(tmp_path)
