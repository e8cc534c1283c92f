"""A model as its users run it, and the loss of a text there: in programs for JAX alone, or served
over HTTP.

Legend: B windows of the text, S tokens of each, P rows of a program.
"""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import ROOT
from benchmarks.lib.ranks import free_port
from jmoe.deploy.portable import PortableModel

START_LIMIT_S, REQUEST_LIMIT_S = 900.0, 600.0
NOT_COPIED = (".*", "runs", "build", "*.egg-info", "__pycache__")


def lowered_model_loss(folder: Path, windows_BS: NDArray[np.int32]) -> float:
    """Return a lowered model's mean loss in nats, over all tokens of a window but the first."""
    model, nats = PortableModel(folder), 0.0
    size, length = model.max_batch, windows_BS.shape[1]
    rows_P, first_P = np.arange(size, dtype=np.int32), np.zeros(size, np.int32)
    for start in range(0, len(windows_BS), size):
        some = windows_BS[start : start + size]
        padded = np.pad(some, ((0, size - len(some)), (0, 0)))
        for at in range(length - 1):
            position_P1 = np.full((size, 1), at, np.int32)
            logits = model.logits(padded[:, at : at + 1], rows_P, position_P1, first_P)
            logits_PV = np.asarray(logits, np.float64)[: len(some)]
            top = logits_PV.max(axis=1)
            total = top + np.log(np.exp(logits_PV - top[:, None]).sum(axis=1))
            nats += float((total - logits_PV[np.arange(len(some)), some[:, at + 1]]).sum())
    return nats / (len(windows_BS) * (length - 1))


def served_loss(url: str, windows_BS: NDArray[np.int32]) -> float:
    """Return a server's mean loss in nats, from the log-probabilities of echoed prompts."""
    nats: list[float] = []
    for window in windows_BS:
        body = {"prompt": window.tolist(), "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = post_completion(url, body)
        nats += [-value for value in answer["choices"][0]["logprobs"]["token_logprobs"][1:]]
    return math.fsum(nats) / (windows_BS.size - len(windows_BS))


def post_completion(
    url: str, body: Mapping[str, object]
) -> dict[str, list[dict[str, dict[str, list[float]]]]]:
    """Post a completion request and return the answer."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as response:
        answer: dict[str, list[dict[str, dict[str, list[float]]]]] = json.load(response)
        return answer


@contextlib.contextmanager
def running_server(
    command: Sequence[object], cwd: Path, processes: int, log: Path
) -> Iterator[str]:
    """Yield the address of a server: several processes with a device each, or one with two.

    command: the server and its options. log: where the first process's output is written.
    """
    env = clean_environment() | {"PYTHONUNBUFFERED": "1"}
    joined: list[list[str]] = [[]]
    if processes > 1:
        address = f"127.0.0.1:{free_port()}"
        join = [
            "--distributed.coordinator-address",
            address,
            "--distributed.num-processes",
            str(processes),
        ]
        joined = [[*join, "--distributed.process-id", str(rank)] for rank in range(processes)]
    else:
        env["JAX_NUM_CPU_DEVICES"] = "2"
    words = [*map(str, command), "--port", "0"]
    with log.open("w") as said:
        logs = [said, *[subprocess.DEVNULL] * (processes - 1)]
        ranks = [
            subprocess.Popen(
                [*words, *more], cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT
            )
            for more, out in zip(joined, logs, strict=True)
        ]
        try:
            yield _wait_for_server_address(ranks[0], log)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _wait_for_server_address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Return the URL that a server prints once it serves; raise RuntimeError if it ends before."""
    begun = time.monotonic()
    while "\nserving " not in (text := log.read_text()):
        if server.poll() is not None or time.monotonic() > begun + START_LIMIT_S:
            raise RuntimeError(f"the server did not start:\n{text[-3000:]}")
        time.sleep(0.2)
    return text.partition("\nserving ")[2].split()[0]


def make_wheel_environment(folder: Path) -> Path:
    """Return the `bin` folder of a new environment with this repository's wheel alone.

    It shares the dependencies of this environment. setuptools is downloaded from the package index.
    """
    source, wheels, bin_ = folder / "source", folder / "wheels", folder / "venv" / "bin"
    if not (bin_ / "jmoe-serve").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        pip = (bin_ / "python", "-m", "pip", "--quiet")
        _run_command(folder, sys.executable, "-m", "venv", folder / "venv")
        _run_command(folder, *pip, "install", "setuptools>=77", "wheel")
        _run_command(
            source, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, "."
        )
        shutil.rmtree(source)
        (wheel,) = wheels.glob("*.whl")
        _run_command(folder, *pip, "install", "--no-deps", wheel)
        site = _run_command(
            folder, bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
        ).strip()
        (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = _run_command(folder, bin_ / "python", "-c", "import jmoe; print(jmoe.__file__)").strip()
    if not Path(found).is_relative_to(folder):
        raise RuntimeError(f"jmoe comes from {found}: must be that of the wheel")
    return bin_


def clean_environment() -> dict[str, str]:
    """Return this process's variables without those that lead to the repository or change XLA."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }


def _run_command(cwd: Path, *words: object) -> str:
    """Return a command's stdout; raise CalledProcessError if it fails."""
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=clean_environment(), check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode()
