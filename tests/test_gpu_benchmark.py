"""The one call for all figures of a GPU: a part that fails is named, the rest goes on, and it runs on a CPU too."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[gpu.Part]:
    """Parts that succeed, fail, hang and depend on one that fails; each leaves a file named after it where it ran."""
    scripts = {
        "floors": 'print(\'{"floors": {"flops_per_s": 8.0}}\')',
        "training_one": "print('{\"model_flops_per_s\": 2.0}')",
        "broken": "import sys; print('half of it'); sys.exit('out of memory')",
        "hanging": "import time; time.sleep(3600)",
        "dependent": "print('{}')",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w').close()\n{text}\n")
    needs = {"dependent": "broken"}
    seconds = {"hanging": 3}
    made = [gpu.Part(name, str(tmp_path / f"{name}.py"), seconds.get(name, 300), needs.get(name)) for name in scripts]
    monkeypatch.setattr(gpu, "parts", lambda scratch, on_cpu: made)
    return made


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    code = gpu.main()
    return code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.usefixtures("parts")
def test_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, seen = call(monkeypatch, capsys, "--out", str(out))
    assert code == 1
    assert seen["ran"] == ["floors", "training_one"]
    assert seen["utilisation"] == {"gpu_training_one": 0.25}
    failed = seen["failed"]
    assert failed["broken"]["failed"] == "1"
    assert failed["broken"]["last_lines"] == ["half of it", "out of memory"]
    assert failed["hanging"]["failed"] == "longer than 3 s"
    assert failed["dependent"]["failed"] == "not run, for broken failed"
    assert not (tmp_path / "dependent").exists()
    assert sorted(file.name for file in out.iterdir()) == ["gpu_floors.json", "gpu_training_one.json"]


@pytest.mark.usefixtures("parts")
def test_what_has_a_result_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--out", str(tmp_path / "out"), "--only", "floors", "training_one")
    assert call(monkeypatch, capsys, *options)[0] == 0
    os.remove(tmp_path / "floors")
    code, seen = call(monkeypatch, capsys, *options)
    assert (code, seen["ran"], seen["utilisation"]) == (0, [], {"gpu_training_one": 0.25})
    assert not (tmp_path / "floors").exists()
    assert call(monkeypatch, capsys, *options, "--fresh")[1]["ran"] == ["floors", "training_one"]
    assert (tmp_path / "floors").exists()


@pytest.mark.usefixtures("parts")
def test_no_time_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, seen = call(monkeypatch, capsys, "--out", str(tmp_path / "out"), "--only", "floors", "--budget-s", "0")
    assert (code, seen["failed"]) == (1, {"floors": {"failed": "no time left"}})


def test_an_unknown_part_is_named(run_python: RunPython) -> None:
    done = run_python(["benchmarks/gpu.py", "--only", "kernls"])
    assert done.returncode == 2
    assert "--only: kernls: must be among floors, kernels_olmoe" in done.stderr


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(run_python: RunPython, tmp_path: Path) -> None:
    done = run_python(["benchmarks/gpu.py", "--cpu", "--out", str(tmp_path), "--budget-s", "1800"], timeout=1900)
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert (done.returncode, seen["failed"]) == (0, {}), done.stderr
    assert {"kernels", "training_olmoe", "decode_ring", "decode_experts", "retention"} < set(seen["ran"])
    rows = json.loads((tmp_path / "gpu_retention.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [128, 256]
    assert all(row["speed_of_device"] > 0 for row in rows)
