"""Start and end one process of a run on any host; the process ends when its supervisor ends.

`python -m jmoe.cluster.remote_process` is the launcher that runs on that host. The supervisor talks
to the launcher over its standard streams:

output  one line, `PORT` and a port that the launcher reserves for the run's coordinator; what a
        host's shell prints before that line is skipped
input   one line of JSON, the `LaunchOrder`; then one signal number per line

When the input ends, the launcher kills the process that it started.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from jmoe.memory.host_memory import count_oom_kills

# only the supervisor sends these
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
CLOSE_S = 20.0  # SIGKILL takes that long where a process writes to a slow disk
KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
# exit code: the log cannot be written, so the folder is not writable or not shared (EX_CANTCREAT)
CANNOT_LOG = 73
PORT = b"jmoe-port"  # begins the launcher's line with its port
CANNOT_RUN = 127  # exit code: command not found, as in a shell


@dataclasses.dataclass(frozen=True)
class LaunchOrder:
    """Command to run on a host. environment: variables to add to or change in the host's own; log:
    file to which the command's output is appended.
    """

    command: list[str]
    folder: str
    environment: dict[str, str]
    log: str
    title: str


class RemoteProcess:
    """The supervisor's handle of one process on `host`.

    local_rank: index of the process on its host. prefix: command that reaches the host, such as
    `ssh HOST`. port: port reserved on the host; None until the launcher has answered, or if it
    could not.
    """

    def __init__(self, host: str, local_rank: int, prefix: Sequence[str]) -> None:
        self.host, self.local_rank = host, local_rank
        self.port: int | None = None
        self.has_answered = False
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "jmoe.cluster.remote_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that `fileno` is readable as long as a line is left
            start_new_session=True,
        )

    def read_launcher_line(self) -> None:
        """Read a line of the launcher, the port's or one that the host's shell printed before it.
        Call this once the stream is readable.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        mark, _, words = line.strip().partition(b" ")
        if mark == PORT and words.isdigit():
            self.port = int(words)
        self.has_answered = not line or self.port is not None

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def start(self, order: LaunchOrder) -> None:
        """Send the launcher its order, which starts the process."""
        self._write_line(json.dumps(dataclasses.asdict(order)))

    def send_signal(self, number: int) -> None:
        """Have the launcher send the process a signal."""
        self._write_line(str(int(number)))

    def exit_code(self) -> int | None:
        """Return the exit code of the process, or 128 + the number of the signal that killed it;
        None while it runs.
        """
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def read_launch_error(self) -> str:
        """Return the launcher's message about a process that it could not start, or that SIGKILL
        ended; empty if the launcher was killed too.
        """
        assert self._process.stdout is not None
        return self._process.stdout.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process by closing the launcher's input, without waiting for its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Kill the process if it still runs, and wait up to `CLOSE_S` seconds for its end; do not
        wait for a host that never answered.
        """
        assert self._process.stdout is not None
        self.kill()
        try:
            self._process.wait(0.0 if self.port is None else CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        left = f"{line}\n".encode()
        with contextlib.suppress(OSError):  # the launcher has ended
            while left:  # a signal may cut a write short
                left = left[self._process.stdin.write(left) :]


def wait_for_launchers(remotes: Sequence[RemoteProcess], timeout_s: float) -> list[RemoteProcess]:
    """Return the remote processes whose launcher has answered, waiting at most `timeout_s`
    seconds.
    """
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for remote in remotes:
            if not remote.has_answered:
                selector.register(remote, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                assert isinstance(key.fileobj, RemoteProcess)
                key.fileobj.read_launcher_line()
                if key.fileobj.has_answered:
                    selector.unregister(key.fileobj)
            if time.monotonic() >= deadline:  # also of a host that prints without end
                break
    return [remote for remote in remotes if remote.port is not None]


def reserve_port() -> socket.socket:
    """Return a socket bound to a free port, which the system gives to no other process while the
    socket is open.

    The run's coordinator can still listen on that port: both sockets allow reuse, and this one does
    not listen.
    """
    dual = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", 0))
    return reserved


def run_ordered_command(order: LaunchOrder, signals_fd: int) -> int:
    """Run the ordered command to its end; return its exit code, or 128 + the number of the signal
    that killed it.

    Child processes that the command left behind are killed as well, because they would hold its
    devices and locks. signals_fd: file descriptor with one signal number per line. Returns
    `CANNOT_LOG` or `CANNOT_RUN` if the command could not be started.
    """
    log = Path(order.log)
    before = count_oom_kills()
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
                preexec_fn=_set_child_signals,
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
    threading.Thread(
        target=_send_signals_until_eof, args=(signals_fd, process), daemon=True
    ).start()
    code = process.wait()
    _kill_group(process.pid)
    if code == -signal.SIGKILL:
        print(describe_oom_kill(before, count_oom_kills()), flush=True)
    return code if code >= 0 else 128 - code


def describe_oom_kill(before: Mapping[Path, int], after: Mapping[Path, int]) -> str:
    """Return a clause that says whether the kernel killed the process for lack of memory: yes, no,
    or that it cannot be told.

    before, after: results of `count_oom_kills` at the start of the process and after its end.
    """
    rises = {path: count - before.get(path, count) for path, count in after.items()}
    for path, rise in rises.items():
        if rise > 0 and path.name != "vmstat":
            return (
                f"by the kernel, because the memory of its cgroup ran out (oom_kill of {path} rose"
                f" by {rise}): give the job more memory, or let the run use less (--plan)"
            )
    for path, rise in rises.items():
        if rise > 0:
            return (
                f"perhaps by the kernel for lack of memory (oom_kill of {path} rose by {rise}):"
                " dmesg names what it killed"
            )
    if rises:
        counts = " and ".join(str(path) for path in rises)
        return (
            f"not by the kernel for lack of memory (oom_kill of {counts} did not rise): ask who"
            " else ends processes, such as the job's scheduler or systemd-oomd"
        )
    return "perhaps by the kernel for lack of memory: dmesg or the job's accounting would say so"


def _set_child_signals() -> None:
    """Have the kernel kill this child with its parent, and reset the handlers of
    passed-on signals.
    """
    ctypes.CDLL(None).prctl(KILL_WITH_PARENT, signal.SIGKILL)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)


def _send_signals_until_eof(signals_fd: int, process: subprocess.Popen[bytes]) -> None:
    """Send the process each signal number read from the file descriptor, one a line; kill its
    process group when the input ends.
    """
    with os.fdopen(signals_fd, "rb", closefd=False) as lines:
        for line in lines:
            process.send_signal(int(line))
    _kill_group(process.pid)


def _kill_group(process_group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def main() -> None:
    """Run the launcher: reserve a port, read the `LaunchOrder`, run it, and exit with its exit
    code.
    """
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    with reserve_port() as reserved:
        print(PORT.decode(), reserved.getsockname()[1], flush=True)
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(0, 1)
            if not byte:
                return  # the supervisor does not need this process
            line += byte
        code = run_ordered_command(LaunchOrder(**json.loads(line)), 0)
    sys.stdout.flush()
    os._exit(code)  # a thread may still be reading


if __name__ == "__main__":
    main()
