"""Runs of train.py with a model so small that a step takes milliseconds, on a few modules of the
standard library.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tests.processes import Child, one_device

Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., Child]

MODULES = ("argparse", "ast", "difflib", "pickle", "random", "subprocess", "textwrap", "threading")
MODEL = (
    *("--model.vocab-size", "512", "--model.hidden-size", "32", "--model.num-hidden-layers", "2"),
    *(
        "--model.num-attention-heads",
        "2",
        "--model.num-key-value-heads",
        "1",
        "--model.moe-intermediate-size",
        "32",
    ),
)
# A constant learning rate: num_steps is no part of the compiled step, which all runs then share by
# the cache.
SHORT = (
    *("--sequence-length", "64", "--batch-size", "8", "--compute-dtype", "float32"),
    *("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "5"),
    *("--checkpoint.every-steps", "5", "--evaluation.sample-tokens", "4"),
)
REFERENCE_STEPS = 80
ENDLESS = ("--num-steps", "1000000")


def free_port() -> int:
    """Return a port that nobody listens on, for a process that is still to start.

    Linux gives out none of this range by itself, and a test in another process passes over it: this
    one holds a lock.
    """
    locks = Path(tempfile.gettempdir()) / f"jmoe-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    for port in range(20_000, 30_000):
        lock = os.open(locks / str(port), os.O_CREAT | os.O_RDWR)  # until this process ends
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("", port)).close()
            return port
        os.close(lock)
    raise RuntimeError("no port is free")


class TrainRuns:
    """Text, token shards and compile cache that the runs of one test session share."""

    def __init__(self, folder: Path, run_python: Run) -> None:
        self.folder, self._run_python = folder, run_python

    def environment(self, devices: int = 1) -> dict[str, str | None]:
        """Changes to the environment of a run: `devices` fake ones, and the shared compile
        cache.
        """
        return one_device(self.folder / "compile_cache") | {
            "JAX_NUM_CPU_DEVICES": str(devices) if devices > 1 else None,
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

    def command(
        self, output_dir: Path, *options: object, data: Path | None = None
    ) -> list[str | Path]:
        """Arguments of Python; later options take precedence."""
        common = (
            "train.py",
            "tiny",
            *MODEL,
            *SHORT,
            "--data.path",
            data or self.shards,
            "--output-dir",
            output_dir,
        )
        return [*common, *map(str, options)]

    def finish(
        self, output_dir: Path, *options: object, data: Path | None = None, devices: int = 1
    ) -> str:
        """The screen of a run to its end, which must be a good one."""
        done = self.run(output_dir, *options, data=data, devices=devices)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fail(
        self, output_dir: Path, *options: object, data: Path | None = None, devices: int = 1
    ) -> str:
        """What a run says that ends with a mistake."""
        done = self.run(output_dir, *options, data=data, devices=devices)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stderr, done.stderr
        return done.stderr

    def run(
        self, output_dir: Path, *options: object, data: Path | None = None, devices: int = 1
    ) -> subprocess.CompletedProcess[str]:
        """A run to its end, whatever that is."""
        return self._run_python(
            self.command(output_dir, *options, data=data), self.environment(devices), timeout=300
        )

    @cached_property
    def reference(self) -> tuple[Path, str]:
        """(output folder, screen) of an uninterrupted run on one device that kept every
        checkpoint.
        """
        options = (
            "--num-steps",
            REFERENCE_STEPS,
            "--checkpoint.keep",
            1000,
            "--profile.steps",
            "60:62",
        )
        return self.folder / "reference", self.finish(self.folder / "reference", *options)

    def from_checkpoint(self, step: int, output_dir: Path) -> Path:
        """A new output folder with one checkpoint of the reference run."""
        name = Path("checkpoints") / str(step)
        shutil.copytree(self.reference[0] / name, output_dir / name)
        return output_dir

    def ranks(self, output_dir: Path, processes: int, *options: object) -> list[list[str | Path]]:
        """The command of every rank of a run of so many processes."""
        if processes == 1:
            return [self.command(output_dir, *options)]
        address = f"127.0.0.1:{free_port()}"
        together = (
            "--distributed.coordinator-address",
            address,
            "--distributed.num-processes",
            processes,
        )
        return [
            self.command(output_dir, *together, "--distributed.process-id", rank, *options)
            for rank in range(processes)
        ]

    def start(
        self,
        start_python: Start,
        output_dir: Path,
        processes: int,
        *options: object,
        devices: int = 1,
    ) -> list[Child]:
        """The ranks of a run of so many processes with so many devices each; their logs are in
        its folder.
        """
        output_dir.mkdir(exist_ok=True)
        return [
            start_python(
                command, output_dir / f"rank-{processes}-{rank}", self.environment(devices)
            )
            for rank, command in enumerate(self.ranks(output_dir, processes, *options))
        ]


def records(output_dir: Path) -> list[dict[str, Any]]:
    """Every whole line of metrics.jsonl, in the order of the file."""
    path = output_dir / "metrics.jsonl"
    lines = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def losses(output_dir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step record."""
    return [
        (record["step"], record["loss"]) for record in records(output_dir) if "event" not in record
    ]


def evaluations(output_dir: Path) -> list[float]:
    """The held-out loss of every evaluation."""
    return [record["loss"] for record in records(output_dir) if record.get("event") == "evaluation"]


def resumes(output_dir: Path) -> list[int]:
    """The steps at which the run resumed."""
    return [record["step"] for record in records(output_dir) if record.get("event") == "resume"]


def committed(output_dir: Path) -> list[int]:
    """The steps with a checkpoint that has its final name."""
    return sorted(
        int(path.name) for path in (output_dir / "checkpoints").glob("*") if path.name.isdigit()
    )


def unfinished(output_dir: Path) -> set[Path]:
    """Folders of checkpoints that are being written, or were when the process died."""
    return set((output_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def kill_while_saving(process: Child, output_dir: Path, others: Sequence[Child] = ()) -> None:
    """SIGKILL at a moment when a checkpoint is half-written: the process is stopped first, to look.

    others: the other processes of the run, killed before they see that this one is gone and end by
    themselves.
    """
    before = unfinished(output_dir)
    while True:
        process.wait_until(lambda: unfinished(output_dir) - before)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.02)  # threads stop one by one
        if unfinished(output_dir) - before:
            break
        os.kill(process.pid, signal.SIGCONT)
    for child in (*others, process):
        child.kill_now()
    assert unfinished(output_dir) - before


def run_split(
    runs: TrainRuns,
    start_python: Start,
    output_dir: Path,
    processes: int,
    devices: int,
    *options: object,
) -> None:
    """A run of so many processes with so many devices each to its end."""
    for process in runs.start(start_python, output_dir, processes, *options, devices=devices):
        process.end(250)


def ranks_of(supervisor: int) -> dict[int, psutil.Process]:
    """The processes of train.py below a supervisor, by rank."""
    ranks = {}
    for process in psutil.Process(supervisor).children(recursive=True):
        with contextlib.suppress(psutil.Error, ValueError):
            words = process.cmdline()
            ranks[int(words[words.index("--distributed.process-id") + 1])] = process
    return ranks
