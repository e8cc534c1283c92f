"""What `jmoe.deploy.check` says of published models, of folders that are still being downloaded,
and of models that jmoe refuses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jmoe.config import MachineConfig
from jmoe.config.engine import EngineConfig
from jmoe.deploy.check import ModelReport, check_model, main
from jmoe.inference.dry_run import engine_machine_from_config
from jmoe.inference.loading import (
    EngineMachine,
    model_bytes,
    plan_engine_memory,
    resolve_sequence_length,
)
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from tests.model_configs import CHECKPOINTS

RELEASES = json.loads((Path(__file__).parents[1] / "fixtures" / "releases.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
COMPRESSED = Path(__file__).parents[1] / "fixtures" / "compressed"
QUICK = ("DeepSeek-V2-Lite-Chat", "gpt-oss-20b", "Llama-4-Scout-17B-16E-Instruct")


def h100_with(host_bytes: int) -> EngineMachine:
    machine = engine_machine_from_config(
        MachineConfig(accelerator="h100", host_bytes=host_bytes), 1
    )
    assert machine is not None
    return machine


MACHINE = h100_with(512_000_000_000)


def report_of(name: str, folder: Path) -> ModelReport:
    release = RELEASES[name]
    is_float16 = release["config"].get("torch_dtype") == "float16"
    (folder / "config.json").write_text(json.dumps(release["config"]))
    if "hf_quant_config" in release:
        (folder / "hf_quant_config.json").write_text(json.dumps(release["hf_quant_config"]))
    return check_model(folder, EngineConfig(dtype="bfloat16" if is_float16 else None), MACHINE)


def row_of(name: str, folder: Path) -> str:
    """The row of the table of docs/families.md for a release."""
    report = report_of(name, folder)
    if report.refused:
        (message,) = report.refused
        why = message.rpartition("jmoe lacks ")[2]
        return f"| {name} | {RELEASES[name]['config']['model_type']} | | | | refused: {why} |"
    size, loaded = report.size, report.loaded
    assert size is not None and loaded is not None
    formats = loaded.experts_in_memory
    if loaded.conversion:
        formats = f"{loaded.stored_experts}, as {formats}"
    cells = [
        name,
        report.family,
        f"{size.parameters:,}",
        f"{size.active_parameters / 1e9:.1f}",
        f"{formats} {loaded.expert_bytes / 1e9:,.1f}, others {loaded.other_bytes / 1e9:,.1f}",
        plan_cell(report),
    ]
    return f"| {' | '.join(cells)} |"


def plan_cell(report: ModelReport) -> str:
    loaded = report.loaded
    assert loaded is not None
    if loaded.plan is None:
        return "does not fit"
    tier = loaded.plan.expert_tier
    where = "resident" if tier is None else f"from {'NVMe' if tier == 'nvme' else tier}"
    return f"{where}, {loaded.engine.max_seq_len:,} tokens"


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RELEASES],
)
def test_the_page_has_the_release(name: str, tmp_path: Path) -> None:
    """Its parameters are those that transformers counts, and its row is in the page."""
    row, counted = row_of(name, tmp_path), RELEASES[name].get("parameters")
    assert "| refused:" in row or f"| {counted:,} |" in row
    assert row in PAGE.read_text().splitlines(), f"docs/families.md needs this row:\n{row}"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss_mxfp4", "mixtral_sharded"])
def test_config_alone_says_the_sizes_of_the_files(name: str, tmp_path: Path) -> None:
    """Sizes and plan from `config.json`, and from it with the index, are those of the weights."""
    machine, engine = MACHINE, EngineConfig(max_seq_len=64)
    whole = check_model(CHECKPOINTS / name, engine, machine)
    shutil.copy(CHECKPOINTS / name / "config.json", tmp_path)
    alone = check_model(tmp_path, engine, machine)
    assert whole.fits and whole.size == alone.size
    assert "from config.json alone: not all weights are there" in alone.notes
    assert alone.loaded == whole.loaded
    if (index := CHECKPOINTS / name / "model.safetensors.index.json").is_file():
        shutil.copy(index, tmp_path)
        assert check_model(tmp_path, engine, machine).loaded == whole.loaded


@pytest.mark.parametrize("name", ["fp8", "int4", "int8", "mxfp4", "fp4_experts"])
def test_a_compressed_model_is_known_by_its_config(name: str, tmp_path: Path) -> None:
    shutil.copy(COMPRESSED / name / "config.json", tmp_path)
    machine, engine = MACHINE, EngineConfig(max_seq_len=64, dtype="bfloat16")
    alone, whole = (check_model(f, engine, machine) for f in (tmp_path, COMPRESSED / name))
    assert alone.refused == () and alone.loaded == whole.loaded


def test_the_plan_is_the_engines(tmp_path: Path) -> None:
    engine, machine = EngineConfig(max_batch=2), MACHINE
    report = check_model(CHECKPOINTS / "olmoe", engine, machine)
    with LazyCheckpoint(CHECKPOINTS / "olmoe") as checkpoint:
        options = resolve_sequence_length(checkpoint, engine, machine)
        assert report.loaded is not None and report.loaded.engine == options
        assert report.loaded.plan == plan_engine_memory(checkpoint, options, machine)
        assert report.loaded.plan.model == model_bytes(checkpoint, options)


def test_an_index_is_compared_by_name(tmp_path: Path) -> None:
    shutil.copy(CHECKPOINTS / "mixtral_sharded" / "config.json", tmp_path)
    name = "model.safetensors.index.json"
    index = json.loads((CHECKPOINTS / "mixtral_sharded" / name).read_text())
    places, gone = index["weight_map"], "model.layers.1.self_attn.q_proj.weight"
    places["model.layers.0.extra.weight"] = places.pop(gone)
    index["metadata"]["total_size"] = 7_000_000_000
    (tmp_path / name).write_text(json.dumps(index))
    report = check_model(tmp_path, EngineConfig(), MACHINE)
    assert report.refused == (
        f"tensors {gone} are missing from the index",
        "tensors model.layers.0.extra.weight are unexpected: the configuration has no place for"
        " them",
    )
    assert "the files named by the index have 7.0 GB" in report.notes
    assert not report.fits and str(report).endswith("loads: no")


def write_config(folder: Path, **changes: Any) -> Path:
    fields = json.loads((CHECKPOINTS / "qwen3_moe" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


def test_every_field_that_is_refused_is_named(tmp_path: Path) -> None:
    folder = write_config(tmp_path, hidden_act="gelu", partial_rotary_factor=0.5)
    report = check_model(folder, EngineConfig(), MACHINE)
    assert report.refused == (
        "hidden_act = 'gelu': is not supported, only 'silu' or 'swish'",
        "partial_rotary_factor = 0.5: is not supported, only 1.0",
    )
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    report = check_model(
        write_config(tmp_path, quantization_config=quantization), EngineConfig(), MACHINE
    )
    assert report.family == "qwen3_moe" and "quantization_config.quant_method" in report.refused[0]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path)
    machine = ["--machine.accelerator", "h100", "--machine.host-bytes", "64000000000"]
    machine += ["--max-seq-len", "64"]
    assert main([str(folder), *machine]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "family: qwen3_moe"
    assert main([str(folder), *machine, "--expert-dtype", "fp8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["loads"] and said["loaded"]["experts_in_memory"] == "fp8"
    assert said["loaded"]["plan"]["policy"] == "resident"
    assert main([str(write_config(tmp_path, model_type="jamba"))]) == 1
    assert "refused: model_type = 'jamba'" in capsys.readouterr().out
    for option in ("--machine.host-bytes", "--devices"):
        with pytest.raises(ValueError, match=f"{option}: needs --machine.accelerator"):
            main([str(folder), option, "2"])
    with pytest.raises(ValueError, match="host_bytes = -1: must not be negative"):
        main([str(folder), "--machine.accelerator", "h100", "--machine.host-bytes", "-1"])
    for size in ("nan", "inf"):
        with pytest.raises(SystemExit):
            main([str(folder), "--machine.accelerator", "h100", "--machine.host-bytes", size])
        assert f"--machine.host-bytes: invalid int value: '{size}'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"config\.json"):
        main([str(tmp_path / "missing")])


def test_a_model_that_does_not_fit_says_why(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    report = check_model(folder, EngineConfig(max_seq_len=64), h100_with(1))
    assert report.fits  # resident
    engine = EngineConfig(max_seq_len=64, device_bytes=1)
    report = check_model(folder, engine, MACHINE)
    assert not report.fits and "device_bytes = 1" in str(report)
