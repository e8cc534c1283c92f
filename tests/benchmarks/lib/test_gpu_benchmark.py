"""The one call for all figures of a GPU: a part that fails is named, the rest goes on, and it
runs on a CPU too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.lib import gpu

WHERE = {"device": "NVIDIA H100 80GB HBM3", "versions": {"jax": "0.10.2"}}
FLOORS = {"floors": {"flops_per_s": 494.5e12, "host_to_device_bytes_per_s": 32.0}} | WHERE
TRAINED = {"mfu": 0.1, "of_dense_product": 0.2}
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[gpu.Part]:
    """Parts that succeed, fail, hang and depend on one that fails; each leaves a file named
    after it where it ran.
    """
    scripts = {
        "floors": f"print({json.dumps(FLOORS)!r})",
        "training_one": f"print({json.dumps({'model_flops_per_s': 98.9e12} | WHERE)!r})",
        "decode_ring": (
            f"print({json.dumps({'copied_bytes_per_s': {'1': 8.0, '8': 16.0}} | WHERE)!r})"
        ),
        "broken": "import sys; print('half of it'); sys.exit('out of memory')",
        "hanging": (
            f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
            "from benchmarks.lib import script; script.start()\n"
            "def deep(): print('{\"step\": 3}', file=sys.stderr, flush=True); time.sleep(3600)\n"
            "deep()"
        ),
        "too_large": "import sys; sys.exit('no space left')",
        "smaller": "print('{}')",
        "dependent": "print('{}')",
        "after_smaller": "print('{}')",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / name)!r}, 'w').close()\n{text}\n"
        )
    needs = {"dependent": "broken"}
    needs["after_smaller"] = "too_large"
    seconds, instead = {"hanging": 3}, {"too_large": str(tmp_path / "smaller.py")}
    made = [
        gpu.Part(
            name,
            str(tmp_path / f"{name}.py"),
            seconds.get(name, 300),
            needs.get(name),
            instead.get(name),
        )
        for name in scripts
        if name != "smaller"
    ]
    monkeypatch.setattr(gpu, "make_parts", lambda scratch, on_cpu: made)
    return made


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    code = gpu.main()
    return code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.usefixtures("parts")
def test_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, seen = call(monkeypatch, capsys, "--out", str(out))
    assert code == 1
    assert seen["ran"] == ["after_smaller", "decode_ring", "floors", "too_large", "training_one"]
    assert seen["limits"] == {
        "training_one": TRAINED,
        "decode_ring": {"of_link": {"1": 0.25, "8": 0.5}},
    }
    failed = seen["failed"]
    assert failed["broken"]["failed"] == "1"
    assert failed["broken"]["last_lines"] == ["half of it", "out of memory"]
    assert failed["hanging"]["failed"] == "longer than 3 s"
    assert failed["hanging"]["last_lines"] == ['{"step": 3}']
    assert failed["hanging"]["was_at"][0].endswith('hanging.py", line 4 in deep')
    assert (
        failed["too_large, as large as asked for"]["last_lines"] == ["no space left"]
        and "too_large" not in failed
    )
    assert failed["dependent"]["failed"] == "not run, for broken failed"
    assert not (tmp_path / "dependent").exists()
    files = {file.name.removeprefix("gpu_"): json.loads(file.read_text()) for file in out.iterdir()}
    assert files.pop("after_smaller.json") and files.pop("too_large.json")
    assert sorted(files) == ["decode_ring.json", "floors.json", "training_one.json"]
    for file in files.values():
        assert date.fromisoformat(file["date"]) and WHERE.items() <= file.items()
    assert files["training_one.json"]["limits"] == TRAINED and "limits" not in files["floors.json"]


@pytest.mark.usefixtures("parts")
def test_what_has_a_result_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--out", str(tmp_path / "out"), "--only", "floors", "training_one")
    assert call(monkeypatch, capsys, *options)[0] == 0
    os.remove(tmp_path / "floors")
    code, seen = call(monkeypatch, capsys, *options)
    assert (code, seen["ran"], seen["limits"]) == (0, [], {"training_one": TRAINED})
    assert not (tmp_path / "floors").exists()
    assert call(monkeypatch, capsys, *options, "--fresh")[1]["ran"] == ["floors", "training_one"]
    assert (tmp_path / "floors").exists()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "cpu"])
def test_limits_are_those_of_the_same_device(device: str) -> None:
    """Of another device's floors nothing is made; of a device without a data sheet no MFU."""
    trained = gpu.fractions_of_limits({"model_flops_per_s": 98.9e12, "device": device}, FLOORS)
    decoded = gpu.fractions_of_limits({"copied_bytes_per_s": {"1": 8.0}, "device": device}, FLOORS)
    same = device == FLOORS["device"]
    assert trained == {
        "mfu": None if device == "cpu" else 0.1,
        "of_dense_product": 0.2 if same else None,
    }
    assert decoded == {"of_link": {"1": 0.25} if same else None}
    assert (
        gpu.fractions_of_limits({"copied_bytes_per_s": {"1": 0.0}, "device": device}, FLOORS) == {}
    )


@pytest.mark.usefixtures("parts")
def test_no_time_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, seen = call(
        monkeypatch, capsys, "--out", str(tmp_path / "out"), "--only", "floors", "--budget-s", "0"
    )
    assert (code, seen["failed"]) == (1, {"floors": {"failed": "no time left"}})


def test_an_unknown_part_is_named(run_python: RunPython) -> None:
    done = run_python(["benchmarks/lib/gpu.py", "--only", "kernls"])
    assert done.returncode == 2
    assert "--only: kernls: must be among floors, kernels_olmoe" in done.stderr


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(run_python: RunPython, tmp_path: Path) -> None:
    done = run_python(
        ["benchmarks/lib/gpu.py", "--cpu", "--out", str(tmp_path), "--budget-s", "1800"],
        timeout=1900,
    )
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert (done.returncode, seen["failed"]) == (0, {}), done.stderr
    decoded = [f"decode_{policy}" for policy in ("resident", "ring", "experts", "hybrid")]
    assert {"floors", "kernels_tiny", "training_olmoe", *decoded, "retention", "collectives"} < set(
        seen["ran"]
    )
    files = {
        name: json.loads((tmp_path / f"gpu_{name}.json").read_text())
        for name in seen["ran"]
        if name != "model"
    }
    for file in files.values():
        assert (
            date.fromisoformat(file["date"])
            and file["device"] == "cpu"
            and {"jax", "python"} < set(file["versions"])
        )
    assert [files[name]["policy"] for name in decoded] == ["resident", "ring", "experts", "hybrid"]
    for name in decoded[1:3]:
        assert all(copied > 0 for copied in files[name]["copied_bytes_per_s"].values())
        assert files[name]["limits"]["of_link"].keys() == {"1", "8"}
    assert files["training_olmoe"]["limits"].keys() == {"mfu", "of_dense_product"}
    assert all(row["s"] > 0 and row["floor_s"] > 0 for row in files["collectives"]["rows"])
    rows = json.loads((tmp_path / "gpu_retention.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [128, 256]
    assert all(row["speed_of_device"] > 0 for row in rows)
