"""Compressed folders against a reader that knows only the layouts' definitions, and every way in
which none appears.
"""

import errno
import json
import math
import re
import shutil
import struct
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe.deploy import compress as stage
from jmoe.deploy.compress import compress_model
from jmoe.deploy.expert_layouts import LAYOUTS, expert_layout
from jmoe.deploy.prune import PruneOptions, prune
from jmoe.models.huggingface import hf_config, model_config
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.pretrained import abstract_decoder
from jmoe.models.safetensors_io import NewTensor, write_safetensors
from jmoe.models.weights import list_parameters
from kernels_pallas.compressed import SCALES
from kernels_pallas.formats import FORMATS
from tests.compressed_checkpoint import write_compressed_checkpoint
from tests.deploy.gpt_moe_models import gpt_moe_config
from tests.deploy.test_prune import TEXT, write_tokenizer
from tests.faults import FailingDisk
from tests.model_configs import CHECKPOINTS
from tests.models.test_pretrained import arrays_of
from tests.tiny_engines import tiny_engine

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "gpt_oss", "gpt_moe")
# hidden, expert's
SIZES = {"mxfp4": (64, 96), "int4": (64, 96), "int8": (64, 96), "fp8": (256, 128)}
PROMPTS = [[5, 9, 2, 30, 7], [11, 3, 3, 8]]
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 4,
    "ignore_eos": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
}
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)
NUMPY = {"F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "u1", "I8": "i1"}
NUMPY |= {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def fields_of(family: str, hidden: int, inner: int) -> dict[str, Any]:
    """Return the `config.json` of a small model of the family."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner}
    if family == "gpt_moe":
        return hf_config(gpt_moe_config(**sizes))
    fields = json.loads((CHECKPOINTS / family / "config.json").read_text())
    if family in ("mixtral", "olmoe", "gpt_oss"):
        sizes["intermediate_size"] = inner
    return (
        fields
        | sizes
        | (
            {"head_dim": hidden // 4}
            if fields.get("head_dim") and "kv_lora_rank" not in fields
            else {}
        )
    )


def write_tensors(
    folder: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], shard_bytes: int = 1 << 30
) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    new = [NewTensor(name, x.dtype, x.shape, partial(np.asarray, x)) for name, x in tensors.items()]
    write_safetensors(folder, new, shard_bytes)


def write_random(folder: Path, fields: dict[str, Any], dtype: Any = np.float32) -> Path:
    """Write a model with random weights, a tokenizer and a template."""
    rng, config, tensors = np.random.default_rng(0), model_config(fields), {}
    for parameter in list_parameters(abstract_decoder(config)[2], config, fields["model_type"]):
        for piece in parameter.pieces():
            noise = rng.normal(1.0 if "norm" in piece.name else 0.0, 0.1, piece.shape)
            tensors[piece.name] = noise.astype(dtype)
    write_tensors(folder, fields, tensors)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": 2}))
    return folder


def raw_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read the one file of weights by the definition of safetensors."""
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        data = np.frombuffer(content[8 + length + first : 8 + length + last], NUMPY[entry["dtype"]])
        found[name] = data.reshape(entry["shape"])
    return found


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Return 4-bit codes, the low one of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def dequantised(folder: Path) -> dict[str, np.ndarray]:
    """Return float32 {name: tensor} of a folder's weights, by its `quantization_config` alone."""
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    kind = quantization.get("format", quantization["quant_method"])
    tensors, wide = raw_tensors(folder), {}
    for name, x in tensors.items():
        base, _, end = name.rpartition("_")
        if (kind, end) == ("fp8", "inv"):
            base = name.removesuffix("_scale_inv")
            blocks = np.kron(x.astype(np.float64), np.ones((128, 128)))
            wide[base] = tensors[base].astype(np.float64) * blocks
        elif (kind, end) == ("pack-quantized", "packed"):
            bits = quantization["config_groups"]["group_0"]["weights"]["num_bits"]
            words, of_word = x.view(np.uint32), np.arange(0, 32, bits, dtype=np.uint32)
            codes = ((words[..., None] >> of_word) & (2**bits - 1)).astype(np.float64) - 2 ** (
                bits - 1
            )
            rows, columns = tensors[base + "_shape"].tolist()
            scales = np.repeat(tensors[base + "_scale"].astype(np.float64), 32, axis=1)
            wide[base] = codes.reshape(rows, columns) * scales
        elif (kind, end) == ("mxfp4-pack-quantized", "packed"):
            scales = 2.0 ** (
                np.repeat(tensors[base + "_scale"].astype(np.float64), 32, axis=1) - 127
            )
            wide[base] = E2M1[nibbles(x)] * scales
        elif (kind, end) == ("mxfp4", "blocks"):
            scales = 2.0 ** (tensors[base + "_scales"].astype(np.float64) - 127)
            values = (E2M1[nibbles(x)] * scales[..., None]).reshape(*x.shape[:2], -1)
            wide[base] = np.moveaxis(values, 1, 2)  # stored [out, in], wide [in, out]
        elif (
            end not in ("scale", "shape", "scales")
            and name not in wide
            and x.dtype in (np.float32, NUMPY["BF16"])
        ):
            wide[name] = x
    return {name: np.ascontiguousarray(x, np.float32) for name, x in wide.items()}


def write_dequantised(compressed: Path, folder: Path) -> Path:
    fields = json.loads((compressed / "config.json").read_text())
    del fields["quantization_config"]
    write_tensors(folder, fields, dequantised(compressed))
    return folder


def logprobs(completions: list[Any]) -> list[float]:
    return [lp.logprob for c in completions for lp in (*c.prompt_logprobs, *c.logprobs)]


@pytest.mark.parametrize(
    "experts",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("fp8", "int4", "mxfp4") else ())
        for name in LAYOUTS
    ],
)
def test_what_is_written_is_served_as_it_is_stored(experts: str, tmp_path: Path) -> None:
    """The log-probabilities of the weights that the layout's definition gives; streamed, the
    same to the bit.
    """
    source = write_random(tmp_path / "model", fields_of("qwen3_moe", *SIZES[experts]))
    out = tmp_path / "out"
    compress_model(source, out, experts)
    with tiny_engine(
        write_dequantised(out, tmp_path / "wide"), policy="resident", native="off"
    ) as engine:
        expected = engine.generate(PROMPTS, **OPTIONS)
    with LazyCheckpoint(out) as checkpoint:
        assert checkpoint.expert_format is FORMATS[experts]
        kept_bytes = (
            checkpoint.expert_bytes
            * checkpoint.config.num_experts
            * checkpoint.config.num_moe_layers
        )
    with tiny_engine(out, policy="resident") as engine:
        resident = engine.generate(PROMPTS, **OPTIONS)
        assert engine.stats().device_expert_bytes == kept_bytes
    with tiny_engine(out, policy="ring", ring_slots=1) as engine:
        assert logprobs(engine.generate(PROMPTS, **OPTIONS)) == logprobs(resident)
        assert engine.stats().streamed_bytes > 0
    assert [c.token_ids for c in resident] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(resident), logprobs(expected), atol=1e-4)
    weights = sum(x.size for name, x in raw_tensors(source).items() if ".experts." in name)
    of_experts = {name: x.nbytes for name, x in raw_tensors(out).items() if ".experts." in name}
    written_bytes = sum(size for name, size in of_experts.items() if not name.endswith("_shape"))
    bits = {"mxfp4": 4.25, "int4": 4.5, "int8": 8.5, "fp8": 8 + 2**-9}[experts]
    assert 8 * written_bytes / weights == pytest.approx(bits)


@pytest.mark.parametrize(
    ("family", "experts"),
    [*((family, "mxfp4") for family in FAMILIES), ("deepseek_v3", "fp8"), ("gpt_moe", "int4")],
)
def test_every_family(family: str, experts: str, tmp_path: Path) -> None:
    """Only matrices of experts change, each by less than the format's step; the others are named
    as wide.
    """
    source = write_random(tmp_path / "model", fields_of(family, *SIZES[experts]))
    compress_model(source, tmp_path / "out", experts)
    before = raw_tensors(source)
    after = raw_tensors(tmp_path / "out")
    wide = dequantised(tmp_path / "out")
    assert wide.keys() == before.keys()
    changed = {name for name in before if not np.array_equal(wide[name], before[name])}
    assert changed == {name for name in before if ".experts." in name and "bias" not in name}
    assert all(np.array_equal(after[name], before[name]) for name in before.keys() - changed)
    for name in changed:
        error = np.linalg.norm(wide[name] - before[name]) / np.linalg.norm(before[name])
        assert error < {"mxfp4": 0.15, "int4": 0.12, "fp8": 0.04}[experts], name
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = fields.pop("quantization_config")
    described = json.loads((source / "config.json").read_text())
    described |= {"num_nextn_predict_layers": 0} if family == "deepseek_v3" else {}
    assert fields == described
    ignored = set(quantization.get("ignore", quantization.get("modules_to_not_convert")))
    linear = {
        name.removesuffix(".weight")
        for name, x in before.items()
        if name.endswith(".weight") and x.ndim == 2
    }
    linear = {name for name in linear if ".experts." not in name and "embed_" not in name}
    assert ignored == linear | {"lm_head"}
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    found = arrays_of(jmoe.load_pretrained(tmp_path / "out", dtype="float32"))
    expected = arrays_of(
        jmoe.load_pretrained(write_dequantised(tmp_path / "out", tmp_path / "wide"))
    )
    for path, array in found.items():
        np.testing.assert_array_equal(array, expected[path], path)
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("qwen3_moe", "mxfp4"),
        ("qwen3_moe", "int4"),
        ("qwen3_moe", "int8"),
        ("qwen3_moe", "fp8"),
        ("gpt_oss", "mxfp4"),
        ("gpt_moe", "fp8"),
    ],
)
def test_an_engine_that_compresses_has_the_same_weights(
    family: str, experts: str, tmp_path: Path
) -> None:
    """Bit for bit, from bfloat16."""
    source = write_random(tmp_path / "model", fields_of(family, *SIZES[experts]), NUMPY["BF16"])
    compress_model(source, tmp_path / "out", experts)
    with LazyCheckpoint(source, None, experts) as first, LazyCheckpoint(tmp_path / "out") as second:
        assert second.expert_format is first.expert_format is FORMATS[experts]
        assert first.expert_fields == second.expert_fields
        for layer, expert in np.ndindex(first.config.num_moe_layers, first.config.num_experts):
            parts = []
            for checkpoint in (first, second):
                views = {name: np.zeros(*field) for name, field in checkpoint.expert_fields.items()}
                checkpoint.fill_expert(layer, expert, views)
                parts.append(views)
            assert sum(name.endswith(SCALES) for name in views) == 2
            for name, part in parts[0].items():
                np.testing.assert_array_equal(part, parts[1][name], name)


def test_sharded_files_and_half_precision(tmp_path: Path) -> None:
    """Tensors are read from wherever the index says they are; what is float16 stays so."""
    fields = fields_of("deepseek_v3", 64, 96) | {"num_nextn_predict_layers": 1}
    source = write_random(tmp_path / "model", fields, np.float16)
    tensors = raw_tensors(source)
    further = {"model.layers.3.mlp.experts.0.up_proj.weight": np.ones((96, 64), np.float16)}
    write_tensors(tmp_path / "sharded", fields, tensors | further, shard_bytes=100_000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 5
    for name in ("model", "sharded"):
        compress_model(tmp_path / name, tmp_path / f"{name}-out", "mxfp4")
    found, expected = raw_tensors(tmp_path / "sharded-out"), raw_tensors(tmp_path / "model-out")
    assert found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in found
    )
    assert found["lm_head.weight"].dtype == np.float16
    described = json.loads((tmp_path / "sharded-out" / "config.json").read_text())
    # layers that predict further tokens are left out
    assert described["num_nextn_predict_layers"] == 0
    model = jmoe.load_pretrained(tmp_path / "sharded-out", dtype="float32")
    assert np.isfinite(np.asarray(model(np.arange(6, dtype=np.int32)[None]))).all()


def test_one_matrix_is_in_memory_at_a_time(tmp_path: Path) -> None:
    fields = fields_of("qwen3_moe", 256, 192) | {"num_local_experts": 32, "num_experts": 32}
    source = write_random(tmp_path / "model", fields)
    size = (source / "model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        compress_model(source, tmp_path / "out", "int8")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 40e6 and peak < 12e6  # 4 MB of them to read through


def test_a_disk_that_fails_at_any_call(tmp_path: Path) -> None:
    """The folder is whole or absent, and nothing else is left."""
    source = write_random(
        tmp_path / "model",
        fields_of("gpt_moe", 32, 32) | {"num_hidden_layers": 1, "num_experts": 2},
    )
    work = tmp_path / "work"
    counted = FailingDisk(tmp_path, ("deploy", "models"), None)
    with counted.failing():
        compress_model(source, work / "out", "mxfp4")
    whole = {path.name: path.read_bytes() for path in (work / "out").iterdir()}
    failed = 0
    for at in range(len(counted.calls)):
        shutil.rmtree(work)
        disk = FailingDisk(tmp_path, ("deploy", "models"), at, errno.EIO)
        with disk.failing():
            try:
                compress_model(source, work / "out", "mxfp4")
            except OSError:
                failed += 1
        left = {path.name for path in work.iterdir()} if work.exists() else set()
        assert left <= {"out"}, disk.failed
        if left:
            assert {path.name: path.read_bytes() for path in (work / "out").iterdir()} == whole
        work.mkdir(exist_ok=True)
    assert failed > len(counted.calls) // 2


def test_a_disk_that_fills_in_mid_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_random(tmp_path / "model", fields_of("mixtral", 64, 96))
    real, calls = stage.ExpertLayout.compress_matrix, []

    def full(layout: Any, w_KN: np.ndarray) -> Any:
        calls.append(sorted(path.name for path in tmp_path.iterdir()))
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(layout, w_KN)

    monkeypatch.setattr(stage.ExpertLayout, "compress_matrix", full)
    with pytest.raises(OSError, match="No space left"):
        compress_model(source, tmp_path / "out", "int4")
    assert calls[-1] == [".out.partial", "model"] and [
        path.name for path in tmp_path.iterdir()
    ] == ["model"]


@pytest.mark.parametrize(
    ("family", "sizes", "experts", "message"),
    [
        ("mixtral", (64, 96), "int5", "experts = 'int5': must be one of mxfp4, int4, int8, fp8"),
        (
            "mixtral",
            (64, 80),
            "mxfp4",
            "moe_intermediate_size = 80: must be a multiple of 32 with experts = 'mxfp4'",
        ),
        (
            "mixtral",
            (48, 96),
            "int4",
            "hidden_size = 48: must be a multiple of 32 with experts = 'int4'",
        ),
        (
            "olmoe",
            (48, 96),
            "int8",
            "hidden_size = 48: must be a multiple of 32 with experts = 'int8'",
        ),
        (
            "qwen3_moe",
            (256, 96),
            "fp8",
            "moe_intermediate_size = 96: must be a multiple of 128 with experts = 'fp8'",
        ),
        (
            "gpt_oss",
            (64, 96),
            "int4",
            "experts = 'int4': must be mxfp4 with model_type = 'gpt_oss'",
        ),
    ],
)
def test_bad_input(
    family: str, sizes: tuple[int, int], experts: str, message: str, tmp_path: Path
) -> None:
    source = write_random(tmp_path / "model", fields_of(family, *sizes))
    with pytest.raises(ValueError, match=re.escape(message)):
        compress_model(source, tmp_path / "out", experts)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="must be one of mxfp4, int4, int8, fp8"):
        expert_layout("wide", family)


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="model_type = 'granitemoe': has all experts of a layer in"
    ):
        compress_model(CHECKPOINTS / "granitemoe", tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_a_compressed_model_is_refused(tmp_path: Path) -> None:
    """By its configuration, and by its tensors where the configuration says nothing."""
    write_compressed_checkpoint("fp8", "qwen3_moe", tmp_path / "fp8", tmp_path / "wide")
    for folder in (tmp_path / "fp8", CHECKPOINTS / "gpt_oss_mxfp4"):
        with pytest.raises(
            ValueError,
            match=r"quantization_config = '(fp8|mxfp4)': the model is compressed already",
        ):
            compress_model(folder, tmp_path / "out", "mxfp4")
    shutil.copytree(CHECKPOINTS / "gpt_oss_mxfp4", tmp_path / "gpt_oss")
    for folder in (tmp_path / "fp8", tmp_path / "gpt_oss"):
        fields = json.loads((folder / "config.json").read_text())
        del fields["quantization_config"]
        (folder / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"model.safetensors: tensor .* is compressed already"):
            compress_model(folder, tmp_path / "out", "mxfp4")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("layout", ["compressed-tensors", "expert_dtype"])
def test_mxfp4_becomes_fp8_to_the_bit(layout: str, tmp_path: Path) -> None:
    """And an engine that makes fp8 when it loads MXFP4 has the same numbers; where fp8 cannot
    have them it is said.
    """
    write_random(tmp_path / "model", fields_of("qwen3_moe", 256, 128))
    compress_model(tmp_path / "model", tmp_path / "mxfp4", "mxfp4")
    expected, source = dequantised(tmp_path / "mxfp4"), tmp_path / "mxfp4"
    tensors, fields = raw_tensors(source), json.loads((source / "config.json").read_text())
    if layout == "expert_dtype":
        source = tmp_path / "fp4"
        dtypes = {"packed": np.int8, "scale": NUMPY["F8_E8M0"]}
        for name in [name for name in tensors if name.endswith(("_packed", "_scale"))]:
            base, _, end = name.rpartition("_")
            renamed = base if end == "packed" else base.removesuffix("weight") + "scale"
            tensors[renamed] = tensors.pop(name).view(dtypes[end])
        del fields["quantization_config"]
        write_tensors(source, fields | {"expert_dtype": "fp4"}, tensors)
    compress_model(source, tmp_path / "fp8", "fp8")
    found = dequantised(tmp_path / "fp8")
    assert found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in found
    )
    assert "expert_dtype" not in json.loads((tmp_path / "fp8" / "config.json").read_text())
    with (
        LazyCheckpoint(source, expert_dtype="fp8") as loaded,
        LazyCheckpoint(tmp_path / "fp8") as kept,
    ):
        assert loaded.expert_fields == kept.expert_fields
        parts = [
            {name: np.zeros(*field) for name, field in loaded.expert_fields.items()}
            for _ in range(2)
        ]
        for checkpoint, views in zip((loaded, kept), parts, strict=True):
            checkpoint.fill_expert(0, 1, views)
        assert all(np.array_equal(parts[0][name], parts[1][name]) for name in parts[0])
    name = next(name for name in tensors if name.endswith("scale"))
    tensors[name] = tensors[name].copy()
    tensors[name].view(np.uint8)[0, :2] = 100, 120
    write_tensors(tmp_path / "far", json.loads((source / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match="has scales more than 2\\^14 apart in 128 x 128 weights"):
        compress_model(tmp_path / "far", tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """Named while the model is written; what a process that was killed has left there is gone
    too.
    """
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    source = write_random(tmp_path / "model", fields_of("olmoe", 64, 96))
    tensors = raw_tensors(source)
    tensors[name] = np.where(np.arange(64) == 7, np.float32(np.inf), tensors[name])
    write_tensors(tmp_path / "bad", json.loads((source / "config.json").read_text()), tensors)
    for good in (False, True):
        (tmp_path / ".out.partial").mkdir()
        (tmp_path / ".out.partial" / "model-00001-of-00009.safetensors").write_bytes(b"half")
        if good:
            compress_model(source, tmp_path / "out", "mxfp4")
        else:
            with pytest.raises(ValueError, match=f"tensor {name!r} has values that are not finite"):
                compress_model(tmp_path / "bad", tmp_path / "out", "mxfp4")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "model", *["out"] * good]
    assert not list((tmp_path / "out").glob("model-*"))


def test_pruned_before_and_after(tmp_path: Path) -> None:
    """A compressed model loses what its wide weights would lose, and is wide then; compressed
    again it is the same.
    """
    source = write_random(
        tmp_path / "model", fields_of("gpt_moe", 32, 32) | {"num_hidden_layers": 1}
    )
    write_tokenizer(source)
    (tmp_path / "text.txt").write_text(TEXT)
    options = PruneOptions(
        2, str(tmp_path / "text.txt"), sequence_length=16, max_tokens=300, dtype="float32"
    )
    compress_model(source, tmp_path / "compressed", "mxfp4")
    wide = write_dequantised(tmp_path / "compressed", tmp_path / "wide")
    write_tokenizer(wide)
    for name in ("compressed", "wide"):
        prune(tmp_path / name, tmp_path / f"{name}-2", options, lambda _: None)
    found, expected = (raw_tensors(tmp_path / f"{name}-2") for name in ("compressed", "wide"))
    assert found.keys() == expected.keys() and all(
        np.array_equal(found[name], expected[name]) for name in found
    )
    assert "quantization_config" not in json.loads(
        (tmp_path / "compressed-2" / "config.json").read_text()
    )
    compress_model(tmp_path / "compressed-2", tmp_path / "again", "mxfp4")
    again = dequantised(tmp_path / "again")
    assert all(np.array_equal(again[name], found[name]) for name in found)  # MXFP4 stays what it is
    assert jmoe.load_pretrained(tmp_path / "again").config.num_experts == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_random(tmp_path / "model", fields_of("mixtral", 64, 96))
    arguments = [str(source), "--experts", "int4", "--out", str(tmp_path / "out")]
    stage.main(arguments)
    said = capsys.readouterr().out
    sizes = [
        math.floor((path / "model.safetensors").stat().st_size / 1e5)
        for path in (source, tmp_path / "out")
    ]
    assert re.search(r"([\d.]+) -> ([\d.]+) MB of weights, experts in int4; in ", said), said
    assert sizes[1] < 0.3 * sizes[0]
    with pytest.raises(
        ValueError, match=r"out = .*: must be an empty folder or none: nothing is written over"
    ):
        stage.main(arguments)
    with pytest.raises(ValueError, match=r"MODEL = .*: must be a folder"):
        stage.main([str(tmp_path / "none"), "--experts", "int4", "--out", str(tmp_path / "new")])
    with pytest.raises(SystemExit):
        stage.main([str(source), "--experts", "int5", "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
