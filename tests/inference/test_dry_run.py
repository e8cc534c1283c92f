"""`serve.py --dry-run` for machines that are not here, from published configurations alone."""

import json
import re
import shutil
from pathlib import Path

import pytest

import serve
from benchmarks.serve.machines import MODELS
from jmoe.config import MachineConfig
from jmoe.config.serving import ServeConfig
from jmoe.inference.dry_run import engine_machine_from_config
from jmoe.planning.memory_plan import FreeMemory
from tests.model_configs import CHECKPOINTS

GPT_OSS = MODELS["gpt-oss-120b, MXFP4"]
CARD = ["--machine.accelerator", "rtx-5090", "--machine.host-bytes", "192000000000"]


def configuration(fields: object, folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_gpt_oss_on_one_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some of its 61 GB of experts on the device, the rest in host memory; the reason is said."""
    serve.run([configuration(GPT_OSS, tmp_path / "gpt-oss-120b"), "--dry-run", *CARD])
    said = capsys.readouterr().out
    assert "not all weights are here: sizes are those that config.json implies" in said
    assert "policy auto, experts from host" in said and "61002.0 MB" in said
    assert "expected of 1 x rtx-5090, not measured: memory 1.24 TB/s, link 53.8 GB/s" in said
    rates = [float(n.replace(",", "")) for n in re.findall(r"each: ([\d.,]+) tokens/s", said)]
    assert len(rates) == 2 and 0 < rates[0] < rates[1]
    assert len(re.findall(r"longest: .*, \d+ % of the step", said)) == 2
    assert re.search(r"experts cross the link +[\d.]+ ms  [\d.]+ GB at 53.8 GB/s", said)


def test_eight_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All experts stay on eight H100, whatever devices are here."""
    model = configuration(GPT_OSS, tmp_path / "gpt-oss-120b")
    on = ["--machine.accelerator", "h100", "--devices", "8", "--dense", "tensor"]
    serve.run([model, "--dry-run", *on])
    said = capsys.readouterr().out
    assert "policy resident" in said and "expected of 8 x h100" in said
    assert "rows cross between devices" in said


def test_experts_that_hosts_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight devices, and where the only device is the CPU itself."""
    model = configuration(GPT_OSS, tmp_path / "gpt-oss-120b")
    hybrid = ["--dry-run", "--policy", "hybrid"]
    eight = ["--machine.accelerator", "h100", "--devices", "8"]
    serve.run([model, *hybrid, *eight, "--machine.host-bytes", "2000000000000"])
    said = capsys.readouterr().out
    assert "policy hybrid, experts from host" in said and "ms a step, policy hybrid" in said
    assert re.search(
        r"over each of 8 links\n +host memory is read .* by experts that the CPU", said
    )
    serve.run([str(CHECKPOINTS / "mixtral"), *hybrid])
    assert "ms a step, policy hybrid" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_refused_with_its_sizes(tmp_path: Path) -> None:
    fields = MODELS["DeepSeek-V3, FP8"] | {"num_hidden_layers": 4}
    small = [*CARD, "--machine.device-bytes", "9000000000"]
    words = "must hold the 256 experts of a layer, of 45416448 bytes each; other weights take"
    with pytest.raises(ValueError, match=words):
        serve.run([configuration(fields, tmp_path / "deepseek"), "--dry-run", *small])


def test_this_machine_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a description the plan is for what is here; a description needs --dry-run."""
    folder = tmp_path / "mixtral"
    shutil.copytree(CHECKPOINTS / "mixtral", folder)
    serve.run([str(folder), "--dry-run"])
    said = capsys.readouterr().out
    assert "weights are here" not in said and "two CPU cores' figures" in said
    assert len(re.findall("tokens before each: ", said)) == 2
    with pytest.raises(SystemExit):
        serve.run([str(folder), *CARD])
    assert "machine.accelerator" in capsys.readouterr().err
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    places = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (alone / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ValueError, match=r"index.json: lacks tensor 'model.embed_tokens.weight'"):
        serve.run([str(alone), "--dry-run"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises((ValueError, OSError), match=r"config.json: is missing"):
        serve.run([str(empty), "--dry-run"])


def test_a_host_without_a_device() -> None:
    """The plan is for this machine, whose memory it takes."""
    with pytest.raises(ValueError, match=r"machine.host_bytes = 1000: must be 0 without"):
        ServeConfig("m", dry_run=True, machine=MachineConfig(host_bytes=1000))
    ServeConfig("m", dry_run=True, machine=MachineConfig("h100", host_bytes=1000))


def test_described_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert engine_machine_from_config(MachineConfig(), 1) is None
    h100 = engine_machine_from_config(MachineConfig("h100", host_bytes=10**12), 16)
    assert h100 is not None and h100.num_devices == 8
    assert h100.free == FreeMemory(72 * 10**9, 10**12, shared=False)
    given = engine_machine_from_config(MachineConfig("h100", device_bytes=79 * 10**9), 1)
    assert given is not None and given.free.device_bytes == 79 * 10**9
    assert given.free.host_bytes > 0
