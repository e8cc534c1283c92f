"""Checkpoints with compressed matrices: what they mean, whole and split, and every kind of wrong
tensor.
"""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.mesh import make_mesh
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from kernels_pallas.compressed import SCALES
from kernels_pallas.formats import FP8
from tests.compressed_checkpoint import QUANTIZATION, write_compressed_checkpoint
from tests.models.test_pretrained import arrays_of, rewritten

GATE = "model.layers.2.mlp.experts.2.gate_proj.weight"
SCALE = GATE.removesuffix("weight") + "scale"


@pytest.fixture(scope="module", params=[*QUANTIZATION, "deepseek_v3 fp8"])
def compressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint with compressed matrices, and the one with what they mean."""
    folder = tmp_path_factory.mktemp("compressed")
    name, _, kind = (
        request.param.rpartition(" ")
        if "deepseek" in request.param
        else ("qwen3_moe", "", request.param)
    )
    write_compressed_checkpoint(kind, name, folder / "compressed", folder / "wide")
    return folder / "compressed", folder / "wide"


def test_compressed_weights_are_their_values_times_their_scales(
    compressed: tuple[Path, Path], tmp_path: Path
) -> None:
    """Bit for bit, whole and split over devices; saved, it is an ordinary checkpoint."""
    folder, wide = compressed
    found = jmoe.load_pretrained(folder, dtype="float32")
    expected = arrays_of(jmoe.load_pretrained(wide))
    jmoe.save_pretrained(found, tmp_path / "saved")
    described = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not described.keys() & {"quantization_config", "expert_dtype"}
    split = jmoe.load_pretrained(
        folder, dtype="float32", mesh=make_mesh((1, 1, 4), jax.devices()[:4])
    )
    for model in (found, split, jmoe.load_pretrained(tmp_path / "saved")):
        for path, array in arrays_of(model).items():
            np.testing.assert_array_equal(array, expected[path], path)
    assert "bfloat16" in {
        array.dtype.name for array in arrays_of(jmoe.load_pretrained(folder)).values()
    }


def renamed(name: str) -> Any:
    """Give a tensor another name: without its entry the file would have a gap, which is refused
    before.
    """
    return lambda header: header.update({f"{name}_under_another_name": header.pop(name)})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "fp8",
            renamed(GATE + "_scale_inv"),
            "needs '.*gate_proj.weight_scale_inv', which is missing",
        ),
        (
            "fp8",
            lambda h: h[GATE + "_scale_inv"].update(shape=[4, 1]),
            r"is F32 \[4, 1\], must be BF16 or F16 or F32 or F8_E8M0",
        ),
        (
            "fp8",
            lambda h: h[GATE + "_scale_inv"].update(dtype="I32"),
            r"is I32 .*, must be BF16 or F16 or F32 or F8_E8M0 \[2, 2\]",
        ),
        (
            "fp8",
            lambda h: h.update({"x_scale_inv": h[GATE + "_scale_inv"]}),
            "x_scale_inv.* is unexpected",
        ),
        ("int4", renamed(GATE + "_shape"), "needs '.*weight_shape', which is missing"),
        (
            "int4",
            lambda h: h[GATE + "_packed"].update(shape=[48, 40]),
            r"is I32 \[48, 40\], must be I32 \[96, 40\]",
        ),
        (
            "int4",
            lambda h: h[GATE + "_scale"].update(shape=[80, 6]),
            r"must be BF16 or F16 or F32 \[96, 1\] or with",
        ),
        (
            "int8 by row",
            lambda h: h[GATE + "_scale"].update(dtype="U8", shape=[192]),
            r"is U8 \[192\], must be BF16",
        ),
        (
            "mxfp4 of experts",
            lambda h: h[SCALE].update(dtype="U8"),
            r"is U8 \[96, 5\], must be F8_E8M0 \[96, 5\]",
        ),
        (
            "mxfp4 of experts",
            lambda h: h[SCALE].update(shape=[48, 10]),
            r"F8_E8M0 \[48, 10\], must be F8_E8M0 \[96",
        ),
        ("mxfp4 of experts", renamed(SCALE), "needs '.*gate_proj.weight_scale', which is missing"),
        (
            "mxfp4",
            lambda h: h[GATE + "_scale"].update(shape=[48, 10]),
            r"is U8 \[48, 10\], must be U8 \[96, 5\]",
        ),
    ],
)
def test_wrong_compressed_tensors(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    write_compressed_checkpoint(kind, "qwen3_moe", tmp_path / "good", tmp_path / "wide")
    with pytest.raises(ValueError, match=message):
        jmoe.load_pretrained(rewritten(tmp_path / "good", tmp_path / "bad", change))


def added(name: str, of: str, **entry: Any) -> Any:
    return lambda header: header.update({name: header[of] | entry})


@pytest.mark.parametrize(
    ("name", "of", "entry"),
    [
        (GATE.replace("weight", "input_scale"), GATE + "_scale", {}),
        (GATE.replace("weight", "input_global_scale"), GATE + "_scale", {}),
        (GATE.replace("weight", "activation_scale"), GATE + "_scale", {}),
        ("model.layers.2.self_attn.k_scale", GATE + "_scale", {}),
        ("model.layers.2.self_attn.q_proj.output_scale", GATE + "_scale", {}),
    ],
)
def test_scales_of_activations_are_left_aside(
    name: str, of: str, entry: Any, tmp_path: Path
) -> None:
    """They change no weight, and activations stay wide here."""
    write_compressed_checkpoint("int4", "qwen3_moe", tmp_path / "good", tmp_path / "wide")
    changed = rewritten(tmp_path / "good", tmp_path / "more", added(name, of, **entry))
    expected = arrays_of(jmoe.load_pretrained(tmp_path / "wide"))
    for path, array in arrays_of(jmoe.load_pretrained(changed, dtype="float32")).items():
        np.testing.assert_array_equal(array, expected[path], path)


@pytest.mark.parametrize("value", [0, 1])
def test_zero_points_must_be_zero(value: int, tmp_path: Path) -> None:
    write_compressed_checkpoint("int4", "qwen3_moe", tmp_path / "good", tmp_path / "wide")
    folder = rewritten(tmp_path / "good", tmp_path / "more", lambda header: None)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    start = len(raw) - 8 - length
    header[GATE + "_zero_point"] = {
        "dtype": "I8",
        "shape": [96, 5],
        "data_offsets": [start, start + 480],
    }
    text = json.dumps(header).encode()
    file.write_bytes(
        struct.pack("<Q", len(text)) + text + raw[8 + length :] + bytes([0] * 479 + [value])
    )
    if value:
        with pytest.raises(ValueError, match=rf"tensor '{GATE}_zero_point' is unexpected"):
            jmoe.load_pretrained(folder)
    else:
        jmoe.load_pretrained(folder)


@pytest.mark.parametrize("kind", ["fp8", "fp8 of bfloat16"])
def test_experts_kept_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """One by one, as an engine streams them: values as they are, scales of bfloat16 widened."""
    write_compressed_checkpoint(kind, "qwen3_moe", tmp_path / "compressed", tmp_path / "wide")
    with LazyCheckpoint(tmp_path / "compressed") as kept, LazyCheckpoint(tmp_path / "wide") as wide:
        assert kept.stored_format is FP8
        views = {
            name: np.empty(shape, dtype) for name, (shape, dtype) in kept.expert_fields.items()
        }
        kept.fill_expert(2, 3, views)
        for name, matrix in wide.read_expert(2, 3).items():
            scales = np.repeat(views[name + SCALES], FP8.block, axis=0)[: matrix.shape[0]]
            np.testing.assert_array_equal(
                views[name].view(jnp.float8_e4m3fn).astype(np.float32) * scales, matrix
            )
