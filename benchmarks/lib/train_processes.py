"""Processes of `train.py` that a benchmark starts, and the times at which lines appear in their
logs.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.002
LIMIT_S = 600.0


def wait_until(ready: Callable[[], object], what: str) -> float:
    """Return the time at which the condition first held."""
    deadline = time.time() + LIMIT_S
    while not ready():
        if time.time() > deadline:
            sys.exit(f"waited {LIMIT_S:g} s for {what}")
        time.sleep(POLL_S)
    return time.time()


def times_of_log_lines(lines: Mapping[str, str], log: Path, position: int = 0) -> dict[str, float]:
    """Return, by name, when each text appeared in what was added to the log since `position`."""

    def has(text: str) -> bool:
        return log.exists() and text in log.read_bytes()[position:].decode(errors="replace")

    return {
        part: wait_until(lambda text=text: has(text), f"{text!r} in {log}")
        for part, text in lines.items()
    }


def one_device_environment(folder: Path) -> dict[str, str]:
    """Return an environment with one device a process and a compile cache in this folder."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    own = {
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONUNBUFFERED": "1",
        "JAX_NUM_CPU_DEVICES": "1",
    }
    return os.environ | cache | own


@contextmanager
def started_processes(
    commands: list[list[str]], logs: list[Path], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return a context with processes that get SIGTERM, and are waited for, at its end."""
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
            processes.append(
                subprocess.Popen(command, env=one_device_environment(folder), **streams)
            )
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(LIMIT_S)
