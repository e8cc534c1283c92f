"""train.py as users run it: real processes, real text, killed with SIGKILL, stopped by signals, split over ranks."""

import gzip
import json
import shutil
import signal
import socket
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NUM_STEPS = 24
SMALL = [
    "tiny",
    "--model.hidden-size",
    "32",
    "--model.num-hidden-layers",
    "2",
    "--model.num-attention-heads",
    "2",
    "--model.num-key-value-heads",
    "1",
    "--model.moe-intermediate-size",
    "32",
    "--model.vocab-size",
    "512",
    "--sequence-length",
    "64",
    "--batch-size",
    "8",
    "--checkpoint.every-steps",
    "5",
    "--evaluation.sample-tokens",
    "8",
    "--compute-dtype",
    "float32",
]
ONE_DEVICE = {"NPROC": None, "XLA_FLAGS": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    path = folder / "text"
    path.mkdir()
    for name in ("argparse", "ast", "calendar", "csv", "dataclasses", "difflib", "inspect", "textwrap", "zipfile"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", path)
    return path


@pytest.fixture
def environment(folder: Path) -> dict[str, str | None]:
    return {**ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(folder / "jax_cache")}


def command(text: Path, output: Path, *options: str) -> list[str]:
    steps = [] if "--num-steps" in options else ["--num-steps", str(NUM_STEPS)]
    return ["train.py", *SMALL, *steps, "--data.path", str(text), "--output-dir", str(output), *options]


def records(output: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """(the last record of every step, the events) of a run."""
    steps, events = {}, []
    for line in (output / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "event" in record:
            events.append(record)
        else:
            steps[record["step"]] = record
    return steps, events


def losses(output: Path) -> list[float]:
    steps, _ = records(output)
    return [steps[i]["loss"] for i in sorted(steps)]


def wait_for_step(output: Path, step: int, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (output / "metrics.jsonl").exists() and f'"step": {step},' in (output / "metrics.jsonl").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached in {timeout_s} s")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def ranks(count: int, devices: int, environment: dict[str, str | None], arguments: list[str]) -> list[Any]:
    """(arguments, environment) of every rank of a run of `count` processes with `devices` fake devices each."""
    address = f"127.0.0.1:{free_port()}"
    where = ["--distributed.coordinator-address", address, "--distributed.num-processes", str(count)]
    fake = {**environment, "JAX_NUM_CPU_DEVICES": str(devices), "NPROC": "16"}
    return [([*arguments, *where, "--distributed.process-id", str(i)], fake) for i in range(count)]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, text: Path, request: pytest.FixtureRequest) -> Path:
    """A run from the first step to the last."""
    output = folder / "uninterrupted"
    run = request.getfixturevalue("module_run")
    done = run(command(text, output), {**ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(folder / "jax_cache")})
    assert done.returncode == 0, done.stderr
    for words in ("held-out text", "unigram model", "xz -9", "least loaded expert", "sample", "report.png"):
        assert words in done.stdout
    return output


@pytest.fixture(scope="module")
def module_run() -> Callable[..., Any]:
    import os
    import subprocess
    import sys

    root = Path(__file__).resolve().parent.parent

    def run(arguments: list[str], changes: dict[str, str | None]) -> Any:
        merged = {**os.environ, **changes}
        env = {k: v for k, v in merged.items() if v is not None}
        return subprocess.run(
            [sys.executable, *arguments], cwd=root, env=env, capture_output=True, text=True, timeout=200
        )

    return run


def test_files_of_a_run(uninterrupted: Path) -> None:
    steps, events = records(uninterrupted)
    assert sorted(steps) == list(range(NUM_STEPS))
    for record in steps.values():
        assert {"loss", "tokens_per_s", "dropped_fraction", "grad_norm", "expert_load"} <= record.keys()
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [0, NUM_STEPS]
    assert evaluations[1]["bits_per_byte"] < evaluations[0]["bits_per_byte"]
    assert (uninterrupted / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((uninterrupted / "tensorboard").rglob("events*"))
    assert json.loads((uninterrupted / "config.json").read_text())["num_steps"] == NUM_STEPS


@pytest.mark.parametrize("step", [7, 18])
def test_killed_and_resumed_is_bit_identical(
    step: int, uninterrupted: Path, folder: Path, text: Path, environment: Any, start_python: Any, run_python: Any
) -> None:
    output = folder / f"killed_at_{step}"
    process = start_python(command(text, output), folder / "killed.log", environment)
    wait_for_step(output, step)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = run_python(command(text, output), environment)
    assert done.returncode == 0, done.stderr
    resumed = [event["step"] for event in records(output)[1] if event["event"] == "resume"]
    assert len(resumed) == 1
    assert resumed[0] % 5 == 0
    assert resumed[0] <= step + 5  # it ran on for a moment before the kill
    assert f"{'resuming' if resumed[0] else 'starting'} from step {resumed[0]}" in done.stdout
    assert losses(output) == losses(uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_well(
    number: signal.Signals,
    uninterrupted: Path,
    folder: Path,
    text: Path,
    environment: Any,
    start_python: Any,
    run_python: Any,
) -> None:
    output = folder / f"stopped_{number.name}"
    process = start_python(command(text, output), folder / "stopped.log", environment)
    wait_for_step(output, 6)
    process.send_signal(number)
    assert process.wait(timeout=30) == 0
    last = max(records(output)[0])
    done = run_python(command(text, output), environment)
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {last + 1} " in done.stdout
    assert losses(output) == losses(uninterrupted)


def test_one_two_and_four_processes_agree(
    folder: Path, text: Path, environment: Any, start_python: Any, run_python: Any
) -> None:
    """1 x 4, 2 x 2 and 4 x 1 devices; then the run of two goes on as one process with one device."""
    options = ("--num-steps", "8", "--mesh.expert-inter", "2", "--mesh.expert-intra", "2")
    seen = {}
    for count in (1, 2, 4):
        output = folder / f"processes_{count}"
        arguments = command(text, output, *options)
        started = [
            start_python(args, folder / f"rank_{count}_{i}.log", env)
            for i, (args, env) in enumerate(ranks(count, 4 // count, environment, arguments))
        ]
        for i, process in enumerate(started):
            assert process.wait(timeout=200) == 0, (folder / f"rank_{count}_{i}.log").read_text()[-3000:]
        seen[count] = losses(output)
    np.testing.assert_allclose(seen[2], seen[1], rtol=1e-5)
    np.testing.assert_allclose(seen[4], seen[1], rtol=1e-5)

    output = folder / "processes_2"
    done = run_python(command(text, output, "--num-steps", "12"), environment)
    assert done.returncode == 0, done.stderr
    assert "resuming from step 8 " in done.stdout
    whole = folder / "one_device"
    done = run_python(command(text, whole, "--num-steps", "8"), environment)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses(whole), seen[1], rtol=1e-5)


def test_a_rank_that_dies_ends_the_run(folder: Path, text: Path, environment: Any, start_python: Any) -> None:
    output = folder / "dead_rank"
    arguments = command(text, output, "--num-steps", "100000", "--distributed.heartbeat-timeout-s", "5")
    started = [
        start_python(args, folder / f"dead_{i}.log", env)
        for i, (args, env) in enumerate(ranks(2, 1, environment, arguments))
    ]
    wait_for_step(output, 3)
    started[1].send_signal(signal.SIGKILL)
    assert started[0].wait(timeout=60) != 0
    assert "rank 1" in (folder / "dead_0.log").read_text()


def test_a_missing_rank_is_named(folder: Path, text: Path, environment: Any, run_python: Any) -> None:
    arguments = command(text, folder / "missing_rank", "--distributed.start-timeout-s", "3")
    args, env = ranks(2, 1, environment, arguments)[0]
    done = run_python(args, env, timeout=60)
    assert done.returncode != 0
    assert "rank 1 did not start within distributed.start_timeout_s = 3 s" in done.stderr
    assert not (folder / "missing_rank").exists()


def test_another_model_does_not_touch_the_checkpoint(
    uninterrupted: Path, text: Path, environment: Any, run_python: Any
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (uninterrupted / "checkpoints").rglob("*")}
    done = run_python(command(text, uninterrupted, "--model.hidden-size", "64"), environment)
    assert done.returncode != 0
    assert "model.hidden_size: 32 -> 64" in done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in (uninterrupted / "checkpoints").rglob("*")}


def test_a_truncated_checkpoint_is_named(
    uninterrupted: Path, folder: Path, text: Path, environment: Any, run_python: Any
) -> None:
    output = folder / "truncated"
    shutil.copytree(uninterrupted, output)
    newest = output / "checkpoints" / str(NUM_STEPS)
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    done = run_python(command(text, output), environment)
    assert done.returncode != 0
    assert largest.name in done.stderr
    assert "20" in done.stderr  # the older step that is intact


def test_a_loss_that_is_not_finite_stops_the_run(folder: Path, text: Path, environment: Any, run_python: Any) -> None:
    options = ("--optimizer.learning-rate", "1e30", "--optimizer.warmup-steps", "0", "--optimizer.clip-norm", "0")
    done = run_python(command(text, folder / "not_finite", *options), environment)
    assert done.returncode != 0
    assert "loss = " in done.stderr
    assert "not finite in " in done.stderr
    assert "moe_layers 0, 1" in done.stderr


def test_profile_names_the_phases(folder: Path, text: Path, environment: Any, run_python: Any) -> None:
    output = folder / "profile"
    options = ("--num-steps", "5", "--profile.steps", "2:4", "--evaluation.sample-tokens", "0")
    done = run_python(command(text, output, *options), environment)
    assert done.returncode == 0, done.stderr
    traces = list((output / "profile").rglob("*.xplane.pb"))
    assert traces
    content = b"".join(path.read_bytes() for path in traces)
    if not content:  # some versions write the viewer's format alone
        content = b"".join(gzip.decompress(p.read_bytes()) for p in (output / "profile").rglob("*.trace.json.gz"))
    for phase in (b"attention", b"router", b"dispatch", b"experts", b"combine", b"loss", b"optimizer"):
        assert phase in content, phase


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tinny"], ["tinny", "did you mean tiny"]),
        (["tiny", "--model.hidden-sise", "64"], ["hidden-sise", "hidden-size"]),
        (["tiny", "--num-steps", "-3"], ["num_steps = -3", "greater than 0"]),
        (["tiny", "--batch-size", "0"], ["batch_size = 0"]),
        (["tiny", "--mesh.expert-intra", "3"], ["expert_intra", "1 devices"]),
        (["tiny", "--data.path", "no/such/file.txt"], ["data.path", "no/such/file.txt"]),
        (["tiny", "--profile.steps", "9"], ["profile.steps", "FIRST:LAST"]),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], words: list[str], folder: Path, environment: Any, run_python: Any
) -> None:
    output = folder / "mistake"
    done = run_python(["train.py", *arguments, "--output-dir", str(output)], environment, timeout=60)
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split()).lower()
    for word in words:
        assert word.lower() in said
    assert not (output / "checkpoints").exists()


def test_help_lists_the_presets(environment: Any, run_python: Any) -> None:
    done = run_python(["train.py", "--help"], environment, timeout=60)
    assert done.returncode == 0
    for preset in ("tiny", "small", "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-moe-128e"):
        assert preset in done.stdout
