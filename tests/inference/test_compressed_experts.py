"""Engines with compressed experts against a model whose weights were widened by the formats'
definitions.
"""

import logging
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import CHECKPOINTS, needs_compiler, run_as_on_accelerator, tiny_engine

import jmoe
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.loading import _check_expert_activations
from jmoe.inference.mesh.runner import MeshRunner
from jmoe.inference.sequence import Completion
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.safetensors_io import NewTensor, TensorReader, read_headers, write_safetensors
from kernels_pallas import compressed
from kernels_pallas.compressed import compress
from kernels_pallas.formats import EXPERT_DTYPES, FORMATS, Format
from tests.compressed_checkpoint import QUANTIZATION, write_compressed_checkpoint
from tests.kernels.test_compressed import read

DEVICES = 4
PROMPTS = [[5, 9, 2, 30, 7], [11, 3, 3, 8]]
# bits a weight, by the number of inputs
BITS = {
    "mxfp4": lambda _: 4.25,
    "int4": lambda _: 4.5,
    "int8": lambda _: 8.5,
    "fp8": lambda k: 8 + 32 * -(-k // 128) / k,
}
# int8: also in tests/deploy/test_compress.py
SLOW_KINDS = ("fp8", "fp8 of powers", "int4", "int4 in 128", "int8")
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 6,
    "ignore_eos": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
}


def logprobs(completions: list[Completion]) -> list[float]:
    return [lp.logprob for c in completions for lp in (*c.prompt_logprobs, *c.logprobs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32 whose experts' inputs are multiples of 32, with biases."""
    path = tmp_path_factory.mktemp("float32") / "model"
    model = jmoe.load_pretrained(CHECKPOINTS / "gpt_oss_mxfp4", dtype="float32")
    rng = np.random.default_rng(0)
    for parameter in (
        model.decoder.moe_layers.moe.experts.w_up,
        model.decoder.moe_layers.moe.experts.w_down,
    ):
        parameter[...] += jnp.asarray(0.05 * rng.normal(size=parameter.shape), jnp.float32)
    jmoe.save_pretrained(model, path)
    return path


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("native", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_compressed_experts(kind: str, native: str, folder: Path, tmp_path: Path) -> None:
    """The widened model's log-probabilities; streamed, bit for bit the same; bytes by the
    formula.
    """
    model = jmoe.load_pretrained(folder, dtype="float32")
    experts = model.decoder.moe_layers.moe.experts
    for parameter in (experts.w_up, experts.w_down):
        stacked = np.array(parameter[...])
        for at in np.ndindex(stacked.shape[:2]):
            stacked[at] = read(*compress(stacked[at], FORMATS[kind]), FORMATS[kind])
        parameter[...] = jnp.asarray(stacked)
    jmoe.save_pretrained(model, tmp_path / "wide")
    with tiny_engine(tmp_path / "wide", policy="resident", native="off") as wide:
        expected = wide.generate(PROMPTS, **OPTIONS)
        wide_bytes = wide.stats().device_expert_bytes
    with tiny_engine(folder, policy="resident", expert_dtype=kind, native=native) as resident:
        found = resident.generate(PROMPTS, **OPTIONS)
        device_bytes = resident.stats().device_expert_bytes
        biases = 4 * (experts.b_up[...].size + experts.b_down[...].size)
        weights = [w[...].shape for w in (experts.w_up, experts.w_down)]
        bits = sum(math.prod(shape) * BITS[kind](shape[-2]) for shape in weights)
        assert device_bytes - biases == bits / 8
        assert wide_bytes - biases == sum(4 * math.prod(shape) for shape in weights)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4)
    layers = experts.w_up.shape[0]
    chosen = {
        "device_bytes": device_bytes // layers,
        "host_cache_bytes": 1 << 20,
        "cache_dir": tmp_path / "records",
    }
    for policy in (
        {"policy": "ring", "ring_slots": 1},
        {"policy": "experts", "expert_tier": "nvme", **chosen},
    ):
        with tiny_engine(folder, expert_dtype=kind, native=native, **policy) as streamed:
            again = streamed.generate(PROMPTS, **OPTIONS)
            assert logprobs(again) == logprobs(found) and streamed.stats().streamed_bytes > 0


@pytest.mark.parametrize(
    "kind", ["int4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mxfp4", "int8"))]
)
def test_activations_in_8_bits(kind: str, folder: Path, tmp_path: Path) -> None:
    """Streamed experts give the bits of resident ones, with prompts of few and of many tokens;
    log-probabilities are near the exact ones, and not the same.
    """
    needs_compiler()
    prompts = [PROMPTS[0], [3 + 7 * i % 50 for i in range(40)]]
    options = {"expert_dtype": kind, "max_seq_len": 64}
    with tiny_engine(folder, policy="resident", **options) as exact:
        expected = exact.generate(prompts, **OPTIONS)
    rounded = {**options, "expert_activations": "int8"}
    with tiny_engine(folder, policy="resident", **rounded) as resident:
        found = resident.generate(prompts, **OPTIONS)
        device_bytes = resident.stats().device_expert_bytes
    # of the prompts alone: rounding may change a close choice, and later tokens with it
    pairs = zip(found, expected, strict=True)
    error = max(
        abs(f.logprob - e.logprob)
        for fs, es in pairs
        for f, e in zip(fs.prompt_logprobs, es.prompt_logprobs, strict=True)
    )
    assert 1e-5 < error < 0.2
    chosen = {
        "device_bytes": device_bytes // 2,
        "host_cache_bytes": 1 << 20,
        "cache_dir": tmp_path / "records",
    }
    for policy in (
        {"policy": "ring", "ring_slots": 1},
        {"policy": "experts", "expert_tier": "nvme", **chosen},
    ):
        with tiny_engine(folder, **rounded, **policy) as streamed:
            again = streamed.generate(prompts, **OPTIONS)
            assert logprobs(again) == logprobs(found) and streamed.stats().streamed_bytes > 0


def test_inputs_in_fp8(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Streamed experts give the bits of resident ones, on a CPU and in the programs of an
    accelerator, whose slots hold matrices transposed; log-probabilities are near the exact ones,
    and not the same.
    """
    options = {"expert_dtype": "fp8", "max_seq_len": 64}
    with tiny_engine(folder, policy="resident", native="off", **options) as exact:
        expected = exact.generate(PROMPTS, **OPTIONS)
    rounded: dict[str, Any] = options | {"expert_activations": "fp8"}
    caplog.set_level(logging.INFO, "jmoe")
    for on_accelerator in (False, True):
        if on_accelerator:
            run_as_on_accelerator(monkeypatch)
        with tiny_engine(folder, policy="resident", **rounded) as resident:
            found = resident.generate(PROMPTS, **OPTIONS)
            chosen: dict[str, Any] = {"device_bytes": resident.stats().device_expert_bytes // 2}
        assert "in float32, without native operations: slower" in caplog.text
        errors = [
            abs(f.logprob - e.logprob)
            for fs, es in zip(found, expected, strict=True)
            for f, e in zip(fs.prompt_logprobs, es.prompt_logprobs, strict=True)
        ]
        assert 1e-5 < max(errors) < 0.3
        chosen |= {"host_cache_bytes": 1 << 20, "cache_dir": tmp_path / "records"}
        for policy in (
            {"policy": "ring", "ring_slots": 1},
            {"policy": "experts", "expert_tier": "nvme", **chosen},
        ):
            with tiny_engine(folder, **rounded, **policy) as streamed:
                again = streamed.generate(PROMPTS, **OPTIONS)
                assert logprobs(again) == logprobs(found) and streamed.stats().streamed_bytes > 0


def test_inputs_in_fp8_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the options, by the experts' format, and on a GPU without FP8 tensor cores."""
    for changes, words in (
        ({"expert_dtype": "int4"}, "must be exact with expert_dtype = 'int4'"),
        ({"expert_dtype": "wide"}, "must be exact with expert_dtype = 'wide'"),
        ({"native": "on"}, "must be exact with native = 'on'"),
        ({"policy": "hybrid"}, "must be exact with policy = 'hybrid'"),
        ({"mesh": EngineMesh(devices=2)}, r"must be exact with mesh\.devices = 2"),
    ):
        with pytest.raises(ValueError, match=f"expert_activations = 'fp8': {words}"):
            EngineConfig(expert_activations="fp8", **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fp8': must be exact with experts that are wide; set"):
        tiny_engine(folder, policy="resident", expert_activations="fp8")
    monkeypatch.setattr(
        "jmoe.inference.loading.jax.devices",
        lambda: [SimpleNamespace(platform="gpu", compute_capability="8.0")],
    )
    options = EngineConfig(expert_dtype="fp8", expert_activations="fp8")
    checkpoint: Any = SimpleNamespace(expert_format=FORMATS["fp8"])
    with pytest.raises(
        ValueError, match="must be exact on this gpu: products of fp8 run on NVIDIA"
    ):
        _check_expert_activations(checkpoint, options, False)


def test_a_jax_that_widens_fp8_on_hopper_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "jmoe.inference.loading.jax.devices",
        lambda: [SimpleNamespace(platform="gpu", compute_capability="9.0")],
    )
    options = EngineConfig(expert_dtype="fp8", expert_activations="fp8")
    checkpoint: Any = SimpleNamespace(expert_format=FORMATS["fp8"])
    line = "expert_activations = fp8 on a gpu: the tensor cores multiply E4M3"
    assert _check_expert_activations(checkpoint, options, False) == line
    monkeypatch.setattr("kernels_pallas.fp8_dot.ALLOWS_FEWER_BITS", False)
    said = _check_expert_activations(checkpoint, options, False)
    assert said.startswith(f"{line}, which Hopper widens to float16")


def test_activations_that_nothing_rounds_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the options, by the experts' format and where there are no native operations."""
    for changes, words in (
        ({"expert_dtype": "fp8"}, "must be exact with expert_dtype = 'fp8'"),
        ({"expert_dtype": "wide"}, "must be exact with expert_dtype = 'wide'"),
        ({"native": "off"}, "must be exact with native = 'off'"),
        ({"policy": "hybrid"}, "must be exact with policy = 'hybrid'"),
        ({"mesh": EngineMesh(devices=2)}, r"must be exact with mesh\.devices = 2"),
    ):
        with pytest.raises(ValueError, match=f"expert_activations = 'int8': {words}"):
            EngineConfig(expert_activations="int8", **changes)  # type: ignore[arg-type]
    needs_compiler()
    with pytest.raises(ValueError, match="'int8': must be exact with experts that are wide; set"):
        tiny_engine(folder, policy="resident", expert_activations="int8")
    monkeypatch.setattr("jmoe.inference.loading._load_or_build_native", lambda say, *, waits: False)
    with pytest.raises(ValueError, match="'int8': must be exact without native operations"):
        tiny_engine(folder, policy="resident", expert_dtype="int4", expert_activations="int8")


def test_a_format_needs_its_row_and_its_codec_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine serves a format that no kernel reads, from both tiers."""
    kind = Format("int6", 1, "int8", "float32", 64, partial_block=True)  # type: ignore[arg-type]

    def compress_int6(w_KN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        starts = np.arange(0, len(w_KN), 64)
        scales = np.maximum.reduceat(np.abs(w_KN), starts, axis=0) / np.float32(31)
        by_weight = np.repeat(scales, 64, axis=0)[: len(w_KN)]
        return np.rint(w_KN / by_weight).astype(np.int8), scales

    monkeypatch.setitem(FORMATS, kind.name, kind)
    monkeypatch.setattr(jmoe.config.engine, "EXPERT_DTYPES", (*EXPERT_DTYPES, kind.name))
    codec = compressed._Codec(compress_int6, lambda v, scales: (v.astype(jnp.float32), scales))
    monkeypatch.setitem(compressed._CODECS, kind.name, codec)
    model = jmoe.load_pretrained(folder, dtype="float32")
    experts = model.decoder.moe_layers.moe.experts
    for parameter in (experts.w_up, experts.w_down):
        stacked = np.array(parameter[...])
        for at in np.ndindex(stacked.shape[:2]):
            values, scales = compress_int6(stacked[at])
            stacked[at] = values * np.repeat(scales, 64, axis=0)[: len(values)]
        parameter[...] = jnp.asarray(stacked)
    jmoe.save_pretrained(model, tmp_path / "wide")
    with tiny_engine(tmp_path / "wide", policy="resident", native="off") as wide:
        expected = wide.generate(PROMPTS, **OPTIONS)
    with tiny_engine(folder, policy="resident", expert_dtype=kind.name) as resident:
        found = resident.generate(PROMPTS, **OPTIONS)
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4)
    nvme = {"expert_tier": "nvme", "host_cache_bytes": 1 << 20, "cache_dir": tmp_path / "records"}
    with tiny_engine(folder, policy="ring", ring_slots=1, expert_dtype=kind.name, **nvme) as ring:
        assert logprobs(ring.generate(PROMPTS, **OPTIONS)) == logprobs(found)


def test_mxfp4_is_kept_as_it_is_stored() -> None:
    """17 bytes for 32 weights; nothing but the order of sums differs from weights made wide."""
    with tiny_engine("gpt_oss_mxfp4", policy="resident") as kept:
        found, kept_bytes = kept.generate(PROMPTS, **OPTIONS), kept.stats().device_expert_bytes
    with tiny_engine("gpt_oss_mxfp4", policy="resident", expert_dtype="wide") as wide:
        expected, wide_bytes = wide.generate(PROMPTS, **OPTIONS), wide.stats().device_expert_bytes
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=2e-5)
    with LazyCheckpoint(CHECKPOINTS / "gpt_oss_mxfp4", "float32") as checkpoint:
        fields = checkpoint.expert_fields
        experts = checkpoint.config.num_experts * checkpoint.config.num_moe_layers
    biases = sum(
        4 * int(np.prod(shape)) for name, (shape, _) in fields.items() if name.startswith("b_")
    )
    assert kept_bytes - experts * biases == (wide_bytes - experts * biases) / 32 * 4.25


@pytest.mark.parametrize(
    ("kind", "native"),
    [
        *(
            pytest.param(kind, "auto", marks=pytest.mark.slow if kind in SLOW_KINDS else ())
            for kind in QUANTIZATION
            if kind.partition(" ")[0] in FORMATS  # the others: tests/models/test_stored_formats.py
        ),
        pytest.param("fp8", "off", marks=pytest.mark.slow),
    ],
)
def test_what_is_stored_compressed_is_kept(kind: str, native: str, tmp_path: Path) -> None:
    """Its own bytes on every tier; nothing but the order of sums differs from weights made wide."""
    name = "deepseek_v3" if kind == "fp8" else "qwen3_moe"
    write_compressed_checkpoint(kind, name, tmp_path / "compressed", tmp_path / "wide")
    with tiny_engine(tmp_path / "wide", policy="resident", native="off") as wide:
        expected, wide_bytes = wide.generate(PROMPTS, **OPTIONS), wide.stats().device_expert_bytes
    with LazyCheckpoint(tmp_path / "compressed") as checkpoint:
        assert checkpoint.expert_format is FORMATS[kind.partition(" ")[0]]
        kept_bytes = (
            checkpoint.expert_bytes
            * checkpoint.config.num_experts
            * checkpoint.config.num_moe_layers
        )
    for policy in ({"policy": "resident"}, {"policy": "ring", "ring_slots": 1}):
        with tiny_engine(tmp_path / "compressed", native=native, **policy) as engine:
            found = engine.generate(PROMPTS, **OPTIONS)
            if policy["policy"] == "resident":
                assert engine.stats().device_expert_bytes == kept_bytes < 0.3 * wide_bytes
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=1e-4)


def test_scales_that_would_be_rounded_are_not_kept(tmp_path: Path) -> None:
    """Experts are made wide, exactly."""
    write_compressed_checkpoint("int4", "qwen3_moe", tmp_path / "int4", tmp_path / "wide")
    stored, tensors = read_headers(tmp_path / "int4"), []
    with TensorReader() as reader:
        for name, t in stored.items():
            x = np.concatenate(
                [rows.copy() for _, _, rows in reader.read_chunks(t, 0, math.prod(t.shape[:-1]))]
            )
            x = x.astype(np.float32) if name.endswith("weight_scale") else x
            tensors.append(
                NewTensor(name, x.dtype, t.shape, partial(np.asarray, x.reshape(t.shape)))
            )
    write_safetensors(tmp_path / "int4", tensors, 1 << 30)
    with LazyCheckpoint(tmp_path / "int4") as checkpoint:
        assert checkpoint.expert_format is None


def test_stored_experts_stay_compressed_on_several_devices() -> None:
    """A checkpoint's own MXFP4 gives the tokens of one device, through a ring."""
    model, sizes = CHECKPOINTS / "gpt_oss_mxfp4", {"max_batch": 2, "native": "off"}
    with tiny_engine(model, policy="resident", **sizes) as one:
        expected = one.generate(PROMPTS, **OPTIONS)
        one_bytes = one.stats().device_expert_bytes
        layers = one.config.num_moe_layers
    place = {"mesh": EngineMesh(devices=2), "policy": "ring", "ring_slots": 1}
    with tiny_engine(model, **sizes, **place) as ring:
        found = ring.generate(PROMPTS, **OPTIONS)
        stats = ring.stats()
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    np.testing.assert_allclose(logprobs(found), logprobs(expected), atol=2e-5)
    assert stats.device_expert_bytes == one_bytes / layers / 2 and stats.streamed_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_compressed_experts_on_several_devices(kind: str, folder: Path, tmp_path: Path) -> None:
    """The tokens of one device, by every policy and placement; bit for bit each other. An expert
    takes its compressed bytes.
    """
    sizes: dict[str, Any] = {"expert_dtype": kind, "max_batch": DEVICES}
    with tiny_engine(folder, policy="resident", native="off", **sizes) as one:
        expected = one.generate(PROMPTS, **OPTIONS)
        one_bytes = one.stats().device_expert_bytes
    eplb = {"slots_per_device": 2, "placement": "eplb", "rebalance_every": 2}
    policies: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"policy": "resident"}, {}),
        ({"policy": "ring", "ring_slots": 1}, {}),
        ({"policy": "experts"}, {}),
    ]
    if kind == "int4":
        nvme = {"expert_tier": "nvme", "cache_dir": tmp_path / "records"}
        policies += [
            ({"policy": "resident"}, eplb),
            ({"policy": "resident"}, {"dense": "tensor"}),
            ({"policy": "ring", "ring_slots": 1, **nvme}, {}),
            ({"policy": "experts", **nvme}, {}),
            ({"policy": "experts"}, {"dense": "tensor"}),
            ({"policy": "auto", "device_bytes": one_bytes // DEVICES // 2}, {}),
        ]
    found = []
    for options, mesh in policies:
        place = EngineMesh(devices=DEVICES, **mesh)
        with tiny_engine(folder, mesh=place, **sizes, **options) as engine:
            if mesh.get("placement"):
                assert isinstance(engine._runner, MeshRunner)
                engine._runner.enable_swaps(1.0, 0.0)
            answers = engine.generate(PROMPTS, **OPTIONS)
            stats = engine.stats()
            if (options["policy"], mesh) == ("resident", {}):
                assert stats.device_expert_bytes == one_bytes / DEVICES
            moves = options["policy"] != "resident" or "placement" in mesh
            assert (stats.streamed_bytes > 0) == moves
        assert [c.token_ids for c in answers] == [c.token_ids for c in expected]
        np.testing.assert_allclose(logprobs(answers), logprobs(expected), atol=2e-5)
        if not mesh.get("dense"):
            found.append(logprobs(answers))
    assert all(other == found[0] for other in found)


def test_bad_formats() -> None:
    with pytest.raises(
        ValueError, match="expert_dtype = 'int5': must be wide, mxfp4, int4, int8, fp8 or None"
    ):
        EngineConfig(expert_dtype="int5")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError,
        match=r"expert_dtype = 'int8': needs inputs of w_\w+ to be a multiple of 32, not \d+",
    ):
        LazyCheckpoint(CHECKPOINTS / "mixtral", None, "int8")
