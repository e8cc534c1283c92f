"""Runs of train.py with a model so small that a step takes milliseconds, on a few modules of the standard library."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[str]]

MODULES = ("argparse", "ast", "difflib", "pickle", "random", "subprocess", "textwrap", "threading")
# A constant learning rate: num_steps is no part of the compiled step, which all runs then share by the cache.
OPTIONS = (
    *("--model.vocab-size", "512", "--model.hidden-size", "32", "--model.num-hidden-layers", "2"),
    *("--model.num-attention-heads", "2", "--model.num-key-value-heads", "1", "--model.moe-intermediate-size", "32"),
    *("--sequence-length", "64", "--batch-size", "8", "--compute-dtype", "float32"),
    *("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "5"),
    *("--checkpoint.every-steps", "5", "--evaluation.sample-tokens", "4"),
)
REFERENCE_STEPS = 80
ENDLESS = ("--num-steps", "1000000")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class TrainRuns:
    """Text, token shards and compile cache that the runs of one test session share."""

    def __init__(self, folder: Path, run_python: Run) -> None:
        self.folder, self._run_python = folder, run_python

    def environment(self, devices: int = 1) -> dict[str, str | None]:
        """Changes to the environment of a run: `devices` fake ones, and the shared compile cache."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compile_cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_NUM_CPU_DEVICES": str(devices) if devices > 1 else None,
            "XLA_FLAGS": None,
            "NPROC": None,  # train.py sets it by itself
            "JMOE_RUNTIME": None,
        }

    @cached_property
    def text(self) -> Path:
        """A folder of Python source."""
        folder = self.folder / "text"
        folder.mkdir()
        for name in MODULES:
            shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{name}.py", folder)
        return folder

    @cached_property
    def shards(self) -> Path:
        """The same text as token shards with their tokenizer."""
        folder = self.folder / "shards"
        limits = ("--vocab-size", "512", "--held-out-bytes", "20000")
        arguments = ("-m", "jmoe.data", self.text, "--out", folder, *limits)
        done = self._run_python(arguments, timeout=300)
        assert done.returncode == 0, done.stderr
        return folder

    def command(self, output_dir: Path, *options: object, data: Path | None = None) -> list[str | Path]:
        """Arguments of Python; later options take precedence."""
        common = ("train.py", "tiny", *OPTIONS, "--data.path", data or self.shards, "--output-dir", output_dir)
        return [*common, *map(str, options)]

    @cached_property
    def reference(self) -> tuple[Path, str]:
        """(output folder, screen) of an uninterrupted run on one device that kept every checkpoint."""
        output_dir = self.folder / "reference"
        command = self.command(output_dir, "--num-steps", REFERENCE_STEPS, "--checkpoint.keep", 1000)
        done = self._run_python(command, self.environment(), timeout=300)
        assert done.returncode == 0, done.stderr
        return output_dir, done.stdout

    def from_checkpoint(self, step: int, output_dir: Path) -> Path:
        """A new output folder with one checkpoint of the reference run."""
        name = Path("checkpoints") / str(step)
        shutil.copytree(self.reference[0] / name, output_dir / name)
        return output_dir

    def ranks(self, output_dir: Path, processes: int, *options: object) -> list[list[str | Path]]:
        """The command of every rank of a run of many processes."""
        address = f"127.0.0.1:{free_port()}"
        together = ("--distributed.coordinator-address", address, "--distributed.num-processes", processes)
        return [
            self.command(output_dir, *together, "--distributed.process-id", rank, *options) for rank in range(processes)
        ]


def records(output_dir: Path) -> list[dict[str, Any]]:
    """Every whole line of metrics.jsonl, in the order of the file."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def losses(output_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step record."""
    return [(record["step"], record["loss"]) for record in records(output_dir) if "event" not in record]


def resumes(output_dir: Path) -> list[int]:
    """The steps at which the run resumed."""
    return [record["step"] for record in records(output_dir) if record.get("event") == "resume"]


def committed(output_dir: Path) -> list[int]:
    """The steps with a checkpoint that has its final name."""
    return sorted(int(path.name) for path in (output_dir / "checkpoints").glob("*") if path.name.isdigit())


def unfinished(output_dir: Path) -> set[Path]:
    """Folders of checkpoints that are being written, or were when the process died."""
    return set((output_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def wait_until(ready: Callable[[], object], process: subprocess.Popen[str], log: Path, timeout_s: float = 300) -> None:
    """Wait for `ready()`; the test fails with the log when the process ends before, or after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"return code {process.poll()} while waiting\n{log.read_text()[-4000:]}")
        time.sleep(0.002)


def end_of(process: subprocess.Popen[str], log: Path, timeout_s: float) -> str:
    """What the process wrote until its end; the test fails if that does not come within `timeout_s`."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {timeout_s} s\n{log.read_text()[-4000:]}")
    return log.read_text()


def kill_while_saving(process: subprocess.Popen[str], output_dir: Path, log: Path) -> None:
    """SIGKILL at a moment when a checkpoint is half-written: the process is stopped first, to look."""
    before = unfinished(output_dir)
    while True:
        wait_until(lambda: unfinished(output_dir) - before, process, log)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.02)  # threads stop one by one
        if unfinished(output_dir) - before:
            break
        os.kill(process.pid, signal.SIGCONT)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert unfinished(output_dir) - before


def run_split(
    runs: TrainRuns, start_python: Start, output_dir: Path, processes: int, devices: int, *options: object
) -> None:
    """A run of so many processes with so many devices each to its end."""
    output_dir.mkdir(exist_ok=True)
    commands = runs.ranks(output_dir, processes, *options) if processes > 1 else [runs.command(output_dir, *options)]
    logs = [output_dir / f"rank-{processes}-{rank}" for rank in range(processes)]
    group = [start_python(command, log, runs.environment(devices)) for command, log in zip(commands, logs, strict=True)]
    for process, log in zip(group, logs, strict=True):
        screen = end_of(process, log, 250)
        assert process.returncode == 0, screen
