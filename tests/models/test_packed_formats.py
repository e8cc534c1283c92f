"""Integers with zero points and NVFP4: wrong tensors are named, and what has an exact form in
memory keeps it. Values are compared in test_stored_formats.py, logits in test_stored_parity.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmoe
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.packed_formats import Gptq
from jmoe.models.safetensors_io import DTYPES, read_headers
from kernels_pallas.compressed import SCALES
from kernels_pallas.formats import INT4
from tests.checkpoint_variants import Tensors, write_variant
from tests.compressed_checkpoint import write_compressed_checkpoint
from tests.models.test_pretrained import rewritten

FIXTURES = Path(__file__).parents[1] / "fixtures" / "compressed"
LAYER = "model.layers.2.mlp.experts.2.gate_proj."


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", {"qweight": [20, 192]}, r"qweight' is I32 \[20, 192\], must be I32 \[20, 96\]"),
        ("gptq", {"g_idx": [80, 2]}, r"g_idx' is I32 \[80, 2\], must be I32 \[160\]"),
        (
            "awq",
            {"scales": [96, 5]},
            r"scales' is F16 \[96, 5\], must be BF16 or F16 or F32 \[1, 96",
        ),
        ("nvfp4", {"weight_scale": [48, 20]}, r"must be F8_E4M3 \[96, 10\]"),
    ],
)
def test_wrong_tensors_are_named(
    kind: str, change: dict[str, list[int]], message: str, tmp_path: Path
) -> None:
    write_compressed_checkpoint(kind, "qwen3_moe", tmp_path / "good", tmp_path / "wide")

    def reshaped(header: dict[str, Any]) -> None:
        for part, shape in change.items():
            header[LAYER + part].update(shape=shape)

    with pytest.raises(ValueError, match=message):
        jmoe.load_pretrained(rewritten(tmp_path / "good", tmp_path / "bad", reshaped))


def changed(folder: Path, source: Path, name: str, change: Any) -> Path:
    """A copy of a checkpoint with one tensor changed."""

    def of_one(tensors: Tensors) -> Tensors:
        return tensors | {name: change(tensors[name].copy())}

    return write_variant(source, folder, of_one)


def test_integers_stay_compressed_only_where_that_is_exact(tmp_path: Path) -> None:
    source = FIXTURES / "gptq_symmetric"
    name = "model.layers.0.mlp.experts.1.up_proj."

    def first_zero_is_another(words: np.ndarray) -> np.ndarray:
        words[0, 0] ^= 1
        return words

    def scales_in_float16(scales: np.ndarray) -> np.ndarray:
        return scales.astype(np.float32).astype(np.float16)

    with LazyCheckpoint(source) as checkpoint:
        assert checkpoint.stored_format is INT4 and checkpoint.expert_conversion_note == ""
    uneven = changed(tmp_path / "uneven", source, name + "qzeros", first_zero_is_another)
    with LazyCheckpoint(uneven, "bfloat16") as checkpoint:
        assert checkpoint.stored_format is None
        assert checkpoint.expert_conversion_note.startswith("experts are stored in GPTQ, which no")
    with LazyCheckpoint(uneven, "bfloat16", "int4") as checkpoint:
        assert checkpoint.expert_conversion_note.endswith("every weight is rounded again")
    rounded = changed(tmp_path / "float16", source, name + "scales", scales_in_float16)
    with LazyCheckpoint(rounded, "bfloat16") as checkpoint:
        assert checkpoint.stored_format is None
    with LazyCheckpoint(rounded, "bfloat16", "int4") as checkpoint, LazyCheckpoint(source) as exact:
        said = "their scales are rounded to bfloat16"
        assert checkpoint.expert_conversion_note.endswith(said)
        views, same = (
            {n: np.empty(s, d) for n, (s, d) in c.expert_fields.items()}
            for c in (checkpoint, exact)
        )
        checkpoint.fill_expert(0, 1, views)
        exact.fill_expert(0, 1, same)
        for field, values in same.items():  # float16 held these scales exactly
            np.testing.assert_array_equal(views[field], values, field)
        assert {f"w_up{SCALES}", f"w_down{SCALES}"} <= views.keys()


def test_groups_outside_the_scales_are_named(tmp_path: Path) -> None:
    def outside(groups: np.ndarray) -> np.ndarray:
        groups[3] = 9
        return groups

    name = "model.layers.0.mlp.experts.1.up_proj.g_idx"
    folder = changed(tmp_path / "bad", FIXTURES / "gptq", name, outside)
    with pytest.raises(ValueError, match=r"up_proj\.scales' has 2 groups, and g_idx names others"):
        jmoe.load_pretrained(folder, dtype="float32")


def test_a_layer_is_named_without_its_weight() -> None:
    layer = "model.layers.0.mlp.experts.1.up_proj."
    assert Gptq(4).tensor_names(layer + "weight") == tuple(
        layer + part for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    assert set(Gptq(4).tensor_names(layer + "weight")) <= read_headers(FIXTURES / "gptq").keys()


def test_modelopts_file_describes_the_weights(tmp_path: Path) -> None:
    """NVIDIA's releases say nothing in `config.json`."""
    source = FIXTURES / "nvfp4"
    assert "quantization_config" not in json.loads((source / "config.json").read_text())
    folder = tmp_path / "bad"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((source / file).read_bytes())
    described = {"quantization": {"quant_algo": "W4A8_AWQ", "group_size": 128}}
    (folder / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"quant_algo = 'W4A8_AWQ': must be NVFP4 or FP8"):
        jmoe.load_pretrained(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quantization = None: must be a"):
        jmoe.load_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "suffix", "value"),
    [
        ("fp8", "weight_scale_inv", np.nan),
        ("fp8_rows", "weight_scale", np.inf),
        ("int8", "weight_scale", np.nan),
        ("gptq", "scales", np.inf),
        ("awq", "scales", np.nan),
        ("nvfp4", "weight_scale", 127),
        ("nvfp4", "weight_scale_2", np.nan),
        ("mxfp4", "weight_scale", 255),
    ],
)
def test_scales_that_are_not_finite_are_named(
    kind: str, suffix: str, value: float, tmp_path: Path
) -> None:
    """Of weights that are widened, and of experts in the format in which they are stored."""
    folder = shutil.copytree(FIXTURES / kind, tmp_path / "bad")
    ending = f".mlp.experts.1.up_proj.{suffix}"
    tensor = next(t for name, t in read_headers(folder).items() if name.endswith(ending))
    code = np.uint8 if isinstance(value, int) else DTYPES[tensor.dtype]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.array(value).astype(code).tobytes())
    name = tensor.name
    message = rf"{re.escape(name)}' has scales that are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        jmoe.load_pretrained(folder, dtype="float32")
    with LazyCheckpoint(folder, "bfloat16") as checkpoint:
        views = {n: np.empty(s, d) for n, (s, d) in checkpoint.expert_fields.items()}
        index = checkpoint.config.layers[int(name.split(".")[2])].record
        with pytest.raises(ValueError, match=message):
            checkpoint.fill_expert(index, 1, views)
