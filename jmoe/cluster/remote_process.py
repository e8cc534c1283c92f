"""Start and end one process of a run on any host, and end it when its supervisor ends.

`python -m jmoe.cluster.remote_process` is the program on that host; the supervisor talks to it over
its standard streams. Its output: one line with a port that it reserves for the run's coordinator.
Its input: one line of JSON, the `Order`; then the number of a signal on each line. When its input
ends, it kills the process that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # by the supervisor, and by nobody else
CLOSE_S = 20.0  # SIGKILL takes that long where a process writes to a slow disk
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
# exit code: the log cannot be written, so the folder is not writable or not shared (EX_CANTCREAT)
CANNOT_LOG = 73
CANNOT_RUN = 127  # exit code: the command is not there, as of a shell


@dataclasses.dataclass(frozen=True)
class Order:
    """A command to run. environment: changes to that of this host; log: the file that its output
    is appended to.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    log: str
    title: str


class RemoteProcess:
    """A supervisor's handle of one process.

    port: reserved on the process's host; None until the host has answered, and if it could not.
    """

    def __init__(self, host: str, local_rank: int, prefix: Sequence[str]) -> None:
        self.host, self.local_rank = host, local_rank
        self.port: int | None = None
        self.heard = False
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "jmoe.cluster.remote_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def hear(self) -> None:
        """Read the far end's answer, which is there, or its end."""
        self.heard = True
        assert self._process.stdout is not None
        words = self._process.stdout.readline().strip()
        self.port = int(words) if words.isdigit() else None

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, order: Order) -> None:
        self._write(json.dumps(dataclasses.asdict(order)))

    def send_signal(self, number: int) -> None:
        self._write(str(int(number)))

    def code(self) -> int | None:
        """Return the exit code of the process, 128 + the number of the signal that killed it;
        None while it runs.
        """
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def last_words(self) -> str:
        """Return what the far end has said of a process that it could not start."""
        assert self._process.stdout is not None
        return self._process.stdout.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process, if it has not ended, and wait for that; a host that does not answer
        is not waited for.
        """
        assert self._process.stdout is not None
        self.kill()
        try:
            self._process.wait(0.0 if self.port is None else CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


def answered(remotes: Sequence[RemoteProcess], timeout_s: float) -> list[RemoteProcess]:
    """Return those whose far end is there within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            if not remote.heard:
                selector.register(remote, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                assert isinstance(key.fileobj, RemoteProcess)
                key.fileobj.hear()
                selector.unregister(key.fileobj)
            if not ready and time.monotonic() >= deadline:
                break
    return [remote for remote in remotes if remote.port is not None]


def reserve_port() -> socket.socket:
    """Return a socket bound to a port that the system gives to no other process while it is open.

    A process that is told the port can listen on it: both allow its reuse, and this socket does not
    listen.
    """
    dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    return reserved


def run(order: Order, commands: int) -> int:
    """Run the process to its end, and return its exit code, 128 + the number of a signal that
    killed it.

    What it has started and left behind ends with it: it would hold its devices and locks.
    """
    log = Path(order.log)
    try:
        with log.open("a") as output:
            output.write(
                f"=== {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}"
                f" {order.title}\n"
            )
            output.flush()
            process = subprocess.Popen(
                order.command,
                cwd=order.folder,
                env=os.environ | order.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C on a terminal comes from the supervisor alone
                preexec_fn=_in_the_process,
            )
    except OSError as error:
        there = log.parent.is_dir()
        print(
            (
                error
                if there
                else f"{log.parent} is not there: it must be on a disk that all hosts share"
            ),
            flush=True,
        )
        return CANNOT_RUN if there and error.filename != order.log else CANNOT_LOG
    threading.Thread(target=_obey, args=(commands, process), daemon=True).start()
    code = process.wait()
    _kill_group(process.pid)
    return code if code >= 0 else 128 - code


def _in_the_process() -> None:
    ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)


def _obey(commands: int, process: subprocess.Popen[bytes]) -> None:
    with os.fdopen(commands, "rb", closefd=False) as lines:
        for line in lines:
            process.send_signal(int(line))
    _kill_group(process.pid)


def _kill_group(number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def main() -> None:
    """Reserve a port, wait for the order, run it."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    with reserve_port() as reserved:
        print(reserved.getsockname()[1], flush=True)
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                return  # not needed
            line += byte
        code = run(Order(**json.loads(line)), 0)
    sys.stdout.flush()
    os._exit(code)  # a thread may read on


if __name__ == "__main__":
    main()
