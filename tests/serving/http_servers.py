"""serve.py as a process, and what a client does with it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.processes import python_command

ROOT = Path(__file__).resolve().parent.parent.parent
START_LIMIT_S, LIMIT_S = 240.0, 60.0
SIZES = ("--max-batch", "4", "--max-seq-len", "256", "--prefill-chunk-tokens", "32")


@dataclass
class HttpProcess:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LIMIT_S)

    def until(self, path: str, condition: Callable[[httpx.Response], bool]) -> httpx.Response:
        """GET until the condition holds."""
        begun = time.monotonic()
        while not condition(found := self.get(path)):
            assert time.monotonic() < begun + LIMIT_S, found.text
            time.sleep(0.02)
        return found

    def until_said(self, words: str) -> None:
        """Wait for words in the log."""
        begun = time.monotonic()
        while words not in self.log.read_text():
            assert self.process.poll() is None and time.monotonic() < begun + LIMIT_S, self.log.read_text()
            time.sleep(0.02)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LIMIT_S)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment(compile_cache: Path) -> dict[str, str]:
    """One device, as a user would run it, with a compile cache."""
    dropped = {"JMOE_RUNTIME", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}
    return {name: value for name, value in os.environ.items() if name not in dropped} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compile_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONUNBUFFERED": "1",
    }


def start_server(folder: Path, log: Path, compile_cache: Path, *options: object) -> HttpProcess:
    """serve.py on a free port, once it has said its address. Later options take precedence."""
    command = python_command(["serve.py", folder, "--port", "0", *SIZES, *map(str, options)])
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(compile_cache),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    begun = time.monotonic()
    while True:
        found = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("serving ")]
        if found:
            return HttpProcess(process, found[0], log)
        if process.poll() is not None or time.monotonic() > begun + START_LIMIT_S:
            HttpProcess(process, "", log).kill()
            raise RuntimeError(f"serve.py did not start:\n{log.read_text()}")
        time.sleep(0.05)


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The data of server-sent events: parsed, `[DONE]` as it is."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
