"""Sandboxed worker processes for client-controlled work: rendering chat templates, compiling JSON
schemas.

A `ForkServer` process imports and sets up what the work needs, once, without JAX and without
threads. Each piece of work runs in a fork of that process, created within a millisecond. The kernel
kills a fork that exceeds its limits of CPU time or memory; unlike a thread, a fork can be killed in
Python code and native code alike. A fork is not trusted: the server exchanges length-prefixed bytes
with it over a socket and unpickles nothing. A second pipe per fork reports its exit status.
"""

import asyncio
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from jmoe.types import JsonObject

START_LIMIT_S = 60.0  # CPU time of the server's setup
ANSWER_LIMIT_S = 60.0  # wall clock, generous for a loaded machine
SLOW_S = 0.05
SLOW_NICENESS = 19  # niceness of a fork that has worked longer than SLOW_S
READ_BYTES = 1 << 18
END_LIMIT_MS = 500  # time for the fork server to report an exit status
OUT_OF_MEMORY = 3  # exit code
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)
T = TypeVar("T")
_FORK = b"f"
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")
ROOT = Path(__file__).resolve().parents[2]  # folder that contains the package


@dataclass(frozen=True)
class Limits:
    """Limits on the computation of one answer: CPU seconds, memory and answer size."""

    processor_s: float
    memory_bytes: int  # in addition to the process's size at its start
    answer_bytes: int

    def __str__(self) -> str:
        seconds = f"{self.processor_s:g} s"
        memory = self.memory_bytes >> 20
        answer = self.answer_bytes >> 20
        return f"{seconds} of processor time, {memory} MiB of memory or {answer} MiB of output"


class LimitError(ValueError):
    """The work exceeded its limits or crashed its fork; the same question would fail again."""


class LostError(RuntimeError):
    """A fork is gone for a reason outside the work: the fork was killed from outside or could not
    start; a retry may succeed.
    """


class Fork:
    """A handle of one forked worker process, which is killed when the handle is garbage-collected
    or `end` is called.

    Answers arrive in the order of the questions.
    """

    def __init__(
        self, connection: socket.socket, exit_status: FileIO, what: str, limits: Limits
    ) -> None:
        self._connection, self._what, self._limits = connection, what, limits
        self._exit_status = exit_status
        self._buffer = bytearray()
        self._number: list[int] = []  # the pid, once the fork has sent it
        self.is_slow = False
        connection.setblocking(False)
        # kills the process even if it hangs
        self.end = weakref.finalize(self, _kill_and_close, connection, exit_status, self._number)

    def set_name_in_errors(self, what: str) -> None:
        """Begin the messages of this fork's errors with `what`, a request's field."""
        self._what = what

    async def ask(self, question: bytes) -> bytes:
        """Send `question` and return the answer.

        Lowers the fork's priority after `SLOW_S` seconds. Raises `LimitError` if the work exceeds
        its limits or crashes, and `LostError` if the fork was killed from outside. The fork is
        killed on a timeout, a lost connection or cancellation.
        """
        loop = asyncio.get_running_loop()
        slow = loop.call_later(SLOW_S, self.lower_priority)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await loop.sock_sendall(self._connection, _length_prefixed(question))
                while (answer := self._pop_frame()) is None:
                    await self._wait_until_readable()
                    self._buffer_received_bytes(self._connection.recv(READ_BYTES))
        except TimeoutError as error:
            self.end()
            raise LimitError(f"{self._what}: needs more than {ANSWER_LIMIT_S:g} s") from error
        except OSError as error:
            ended = self._exit_error()
            self.end()
            raise ended from error
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            slow.cancel()
        return answer

    async def _wait_until_readable(self) -> None:
        """Wait until the socket has data, without reading any: a cancelled read would lose data."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection)

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited. Valid only while no answer is outstanding."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def lower_priority(self) -> None:
        """Lower the scheduling priority (raise the niceness) of the forked process."""
        self.is_slow = True
        for number in self._number:
            with contextlib.suppress(OSError):  # the process has ended
                os.setpriority(os.PRIO_PROCESS, number, SLOW_NICENESS)

    def send(self, question: bytes) -> None:
        """Send `question`; get its answer with `receive`.

        The socket is non-blocking, so its buffer must hold all questions that are unanswered.
        Raises LimitError or LostError if the fork has ended.
        """
        try:
            self._connection.sendall(_length_prefixed(question))
        except OSError as error:
            raise self._exit_error() from error

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next answer, or None if no answer arrives within `timeout_s` seconds.

        Raises `LimitError` or `LostError` if the fork has ended.
        """
        while (answer := self._pop_frame()) is None:
            self._connection.settimeout(timeout_s)
            try:
                self._buffer_received_bytes(self._connection.recv(READ_BYTES))
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise self._exit_error() from error
            finally:
                self._connection.setblocking(False)
        return answer

    def _buffer_received_bytes(self, data: bytes) -> None:
        """Buffer bytes from the fork, whose first frame is its pid; b"" raises `_exit_error()`."""
        if not data:
            raise self._exit_error()
        self._buffer += data
        if not self._number and (number := self._pop_frame()) is not None:
            self._number += _LENGTH.unpack(number)
            if self.is_slow:
                self.lower_priority()

    def _pop_frame(self) -> bytes | None:
        """Remove the next frame from the received bytes; return None if it is incomplete.

        Raises LimitError if the frame is longer than `Limits.answer_bytes`.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._limits.answer_bytes:
            raise LimitError(f"{self._what}: needs more than {self._limits}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        answer = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return answer

    def _exit_error(self) -> LimitError | LostError:
        """Return the error that describes why the process ended or never started."""
        poll = select.poll()
        poll.register(self._exit_status, select.POLLIN)
        said = self._exit_status.read(_STATUS.size) if poll.poll(END_LIMIT_MS) else b""
        if not said:
            return LostError(
                f"{self._what}: the process for it is gone, or none could be started: try again"
            )
        (code,) = _STATUS.unpack(said)
        limits = f"needs more than {self._limits}"
        if code in (OUT_OF_MEMORY, -signal.SIGPROF):
            return LimitError(f"{self._what}: {limits}")
        if code >= 0 or code in CRASHES:
            how = f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return LimitError(f"{self._what}: its process crashed ({how}), or {limits}")
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        who = " (the system does so when memory is short)" if -code == signal.SIGKILL else ""
        return LostError(
            f"{self._what}: {name} from outside the server{who} ended its process: try again"
        )


def _kill_and_close(connection: socket.socket, exit_status: FileIO, number: list[int]) -> None:
    """Kill a fork and close its socket and pipe.

    A fork sends its process id first. If the id has not arrived yet, the fork ends itself: sending
    the id over the closed socket fails.
    """
    with contextlib.suppress(OSError):  # no pid has arrived, or the process has ended
        said = b"" if number else connection.recv(2 * _LENGTH.size)
        (process,) = number or _LENGTH.unpack(said[_LENGTH.size :] or bytes(_LENGTH.size))
        if process:
            os.kill(process, signal.SIGKILL)
    connection.close()
    exit_status.close()


class ForkServer:
    """A helper process that forks workers; each worker answers questions with the function that
    `begin(**setup)` returned.

    The helper process ignores SIGINT and SIGTERM, since requests in progress need it during
    shutdown. It exits when the owning process closes its socket or exits.
    """

    def __init__(self, what: str, begin: str, setup: JsonObject, limits: Limits) -> None:
        """Start the helper process and wait until `begin` has returned.

        Raises ValueError with the message of a ValueError that `begin` raised, or if the helper
        exceeds its limits.

        what: names the work in error messages.
        begin: MODULE.NAME of the function. Its module must import neither JAX nor NumPy: their
            threads do not survive a fork.
        setup: keyword arguments of `begin`, JSON values.
        """
        self._what, self._begin, self._setup, self._limits = what, begin, setup, limits
        self._idle: list[Fork] = []
        self._starting = asyncio.Lock()
        self._start_helper()

    async def ask(self, question: bytes) -> bytes:
        """Return the answer of an idle fork, or of a new one if none is idle.

        A fork that was not slow is kept for later questions. Raises `LimitError` or `LostError`.
        """
        self._idle = [fork for fork in self._idle if not fork.has_ended]
        fork = self._idle.pop() if self._idle else await self.fork_after_restart_if_killed()
        answer = await fork.ask(question)
        if not fork.is_slow:
            self._idle.append(fork)
        return answer

    def ask_blocking(self, question: bytes) -> bytes:
        """Return the answer of a new fork, blocking. For use outside an event loop.

        Raises `LimitError` or `LostError`.
        """
        fork = self.fork_worker()
        fork.send(question)
        if (answer := fork.receive(ANSWER_LIMIT_S)) is None:
            raise LimitError(f"{self._what}: needs more than {ANSWER_LIMIT_S:g} s")
        return answer

    async def fork_after_restart_if_killed(self) -> Fork:
        """Return a new fork; first restart the helper process if it was killed.

        The restart runs in a thread, as it may take seconds. Raises `LostError` if no process
        can be started.
        """
        async with self._starting:
            if self._process.poll() is not None:
                self.close()
                await start_process_in_thread(self._start_helper, self._what)
        return self.fork_worker()

    def fork_worker(self) -> Fork:
        """Return a new fork. Raises `LostError` if the helper process is gone."""
        ours, theirs = socket.socketpair()
        exit_status, tell = os.pipe()
        fork = Fork(ours, FileIO(exit_status), self._what, self._limits)
        with theirs, FileIO(tell, "w"):
            try:
                socket.send_fds(self._control, [_FORK], [theirs.fileno(), tell])
            except OSError as error:
                raise LostError(f"{self._what}: the process for it is gone: try again") from error
        return fork

    def close(self) -> None:
        """Kill the helper process. Each fork lives on until its `Fork` is collected."""
        self._idle.clear()
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start_helper(self) -> None:
        """Start the helper process and wait until `begin` has returned; raises as `__init__`."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        setup = {"begin": self._begin, "setup": self._setup, "limits": asdict(self._limits)}
        most = (
            f"{START_LIMIT_S:g} s of processor time or {self._limits.memory_bytes >> 20} MiB of"
            " memory"
        )
        refusal = (
            f"{self._what}: the process for it did not begin: it needs more than {most}, or stderr"
            " says why"
        )
        with contextlib.suppress(OSError):
            self._control.settimeout(2 * START_LIMIT_S)
            self._control.sendall(_length_prefixed(json.dumps(setup).encode()))
            with self._control.makefile("rb") as answers:
                answer = _read_frame(answers)
            refusal = refusal if answer is None else answer.decode()
        if refusal:
            self.close()
            raise ValueError(refusal)


async def start_process_in_thread(start: Callable[[], T], what: str) -> T:
    """Return `start()`, which starts a process, run in a thread. Raises `LostError` if the system
    starts no process or no thread, at a limit of processes or memory.
    """
    try:
        return await asyncio.to_thread(start)
    except (OSError, RuntimeError) as error:
        raise LostError(f"{what}: no process for it can be started ({error}): try again") from error


def _length_prefixed(data: bytes) -> bytes:
    """Return the data with its length in four bytes before it."""
    return _LENGTH.pack(len(data)) + data


def _read_frame(file: BinaryIO) -> bytes | None:
    """Return the next length-prefixed message, or None at the end of the stream."""
    head = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else None


# Code that runs in the helper process and its forks


def _limit_memory(limits: Limits) -> None:
    """Let this process take at most `limits.memory_bytes` beyond what it has now."""
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = size_bytes + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (allowed if most < 0 else min(allowed, most), most))


def _run_with_cpu_limit(work: Callable[[], T], processor_s: float) -> T:
    """Return the result of `work()`.

    The kernel kills the process (SIGPROF) after `processor_s` seconds of CPU time; a `MemoryError`
    exits with status `OUT_OF_MEMORY`.
    """
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    try:
        return work()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer_questions(
    connection: socket.socket, answer: Callable[[bytes], bytes], limits: Limits
) -> None:
    """In a fork: send the pid, then answer questions until the owner closes the socket."""
    _limit_memory(limits)
    connection.sendall(_length_prefixed(_LENGTH.pack(os.getpid())))
    with connection, connection.makefile("rb") as questions:
        while (question := _read_frame(questions)) is not None:
            if select.select([connection], [], [], 0)[0] and not connection.recv(
                1, socket.MSG_PEEK
            ):
                return  # the owner has closed the socket
            begun_s = time.process_time()
            said = _run_with_cpu_limit(partial(answer, question), limits.processor_s)
            if time.process_time() > begun_s + SLOW_S:
                os.setpriority(os.PRIO_PROCESS, 0, SLOW_NICENESS)
            connection.sendall(_length_prefixed(said))


def _serve_fork_requests(
    control: socket.socket, answer: Callable[[bytes], bytes], limits: Limits
) -> None:
    """Fork once for each (socket, status pipe) pair received on `control`, until `control` is
    closed.

    The fork answers on the socket. Its exit status is written to the pipe when the fork ends.
    """
    pipes: dict[int, int] = {}  # pid -> status pipe

    def report_exit_statuses(*_: object) -> None:
        for child, pipe in list(pipes.items()):
            ended, status = 0, 0
            with contextlib.suppress(ChildProcessError):  # already reaped by a nested signal
                ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):  # the owner has closed the pipe
                    os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(pipes.pop(child))

    signal.signal(signal.SIGCHLD, report_exit_statuses)
    while True:
        message, numbers, *_ = socket.recv_fds(control, len(_FORK), 2)
        if not message:
            return
        number, pipe = numbers
        child = -1
        # at the process limit, the owner sees the socket close
        with contextlib.suppress(OSError):
            child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            control.close()
            for other in (pipe, *pipes.values()):
                os.close(other)
            with contextlib.suppress(OSError):  # the owner has closed the socket
                _answer_questions(socket.socket(fileno=number), answer, limits)
            os._exit(0)
        os.close(number)
        if child > 0:
            pipes[child] = pipe
            report_exit_statuses()  # the fork may have ended before its pipe was registered
        else:
            os.close(pipe)


def main() -> None:
    """Run the helper process. `sys.argv[1]` is the file descriptor of the control socket."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as questions:
        told = json.loads(_read_frame(questions) or b"null")
    if told is None:
        return
    limits = Limits(**told["limits"])
    _limit_memory(limits)
    module, _, name = told["begin"].rpartition(".")
    try:
        answer = _run_with_cpu_limit(
            partial(getattr(import_module(module), name), **told["setup"]), START_LIMIT_S
        )
    except ValueError as error:
        control.sendall(_length_prefixed(str(error).encode("utf-8", "replace")))
        return
    gc.freeze()  # a collection in a fork would copy shared pages
    control.sendall(_length_prefixed(b""))
    _serve_fork_requests(control, answer, limits)


if __name__ == "__main__":
    main()
