"""Work that a client's words make long, in processes of their own that the system ends at their
limits.

A `ForkServer` loads once what all of its work needs, without JAX and without threads. Each piece of
work is a fork of it, there within a millisecond. What goes between is bytes that the server never
unpickles: what runs in a fork is not trusted. Python's and native code are ended alike, which no
thread could be. A pipe for each fork tells its owner how the fork ended.
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
from typing import Any, BinaryIO

START_LIMIT_S = 60.0  # of processor time, until it forks
ANSWER_LIMIT_S = 60.0  # by the clock, of a machine that does much else
SLOW_S = 0.05
SLOW_NICENESS = 19  # of a fork that takes longer than that: others go first
READ_BYTES = 1 << 18
END_LIMIT_MS = 500  # until a fork server has said how a fork ended
OUT_OF_MEMORY = 3  # exit code
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE)
_FORK = b"f"
_LENGTH = struct.Struct("!I")
_STATUS = struct.Struct("!i")
ROOT = Path(__file__).resolve().parents[2]  # that holds the package


@dataclass(frozen=True)
class Limits:
    """Limits on one answer of a fork: processor time, memory and size."""

    processor_s: float
    memory_bytes: int  # beside what the process has at its start
    answer_bytes: int

    def __str__(self) -> str:
        seconds = f"{self.processor_s:g} s"
        memory = self.memory_bytes >> 20
        answer = self.answer_bytes >> 20
        return f"{seconds} of processor time, {memory} MiB of memory or {answer} MiB of output"


class LimitError(ValueError):
    """A fork ended without an answer: at its limits, or because its work crashed it."""


class LostError(RuntimeError):
    """A fork ended without an answer for a reason that is not its work: it was killed, or never
    began.
    """


class Fork:
    """One process of a fork server; it ends with this object. Answers come in the order of the
    questions.
    """

    def __init__(
        self, connection: socket.socket, how_it_ended: FileIO, what: str, limits: Limits
    ) -> None:
        self._connection, self._what, self._limits = connection, what, limits
        self._how_it_ended = how_it_ended
        self._buffer = bytearray()
        self._number: list[int] = []  # of the process, which says it first
        self.is_slow = False
        connection.setblocking(False)
        # ends the process, whatever it does
        self.end = weakref.finalize(self, _end, connection, how_it_ended, self._number)

    async def ask(self, question: bytes) -> bytes:
        """Return the answer; `LimitError` or `LostError` if there is none."""
        loop = asyncio.get_running_loop()
        slow = loop.call_later(SLOW_S, self.let_others_go_first)
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await loop.sock_sendall(self._connection, _framed(question))
                while (answer := self._next()) is None:
                    await self._until_readable()
                    self._take(self._connection.recv(READ_BYTES))
        except TimeoutError as error:
            self.end()
            raise LimitError(f"{self._what}: needs more than {ANSWER_LIMIT_S:g} s") from error
        except OSError as error:
            ended = self._ended()
            self.end()
            raise ended from error
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            slow.cancel()
        return answer

    async def _until_readable(self) -> None:
        """Wait without taking anything: what a cancelled read has taken would be lost."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; asked while no answer is due."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def let_others_go_first(self) -> None:
        """Lower the priority of a process that takes long."""
        self.is_slow = True
        for number in self._number:
            with contextlib.suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, number, SLOW_NICENESS)

    def send(self, question: bytes) -> None:
        """Ask without waiting for the answer. For few and short questions."""
        try:
            self._connection.sendall(_framed(question))
        except OSError as error:
            raise self._ended() from error

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next answer, None if it does not come in time; `LimitError` or `LostError` if
        it never comes.
        """
        while (answer := self._next()) is None:
            self._connection.settimeout(timeout_s)
            try:
                self._take(self._connection.recv(READ_BYTES))
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:
                raise self._ended() from error
            finally:
                self._connection.setblocking(False)
        return answer

    def _take(self, data: bytes) -> None:
        if not data:
            raise self._ended()
        self._buffer += data
        if not self._number and (number := self._next()) is not None:
            self._number += _LENGTH.unpack(number)
            if self.is_slow:
                self.let_others_go_first()

    def _next(self) -> bytes | None:
        """Take the next answer out of what has arrived."""
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

    def _ended(self) -> LimitError | LostError:
        """Return the error of a process that has ended, or never began."""
        poll = select.poll()
        poll.register(self._how_it_ended, select.POLLIN)
        said = self._how_it_ended.read(_STATUS.size) if poll.poll(END_LIMIT_MS) else b""
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


def _end(connection: socket.socket, how_it_ended: FileIO, number: list[int]) -> None:
    """End a fork; one that has not said its number yet cannot say it any more, and ends by
    itself.
    """
    with contextlib.suppress(OSError):  # nothing has arrived, or it has ended
        said = b"" if number else connection.recv(2 * _LENGTH.size)
        (process,) = number or _LENGTH.unpack(said[_LENGTH.size :] or bytes(_LENGTH.size))
        if process:
            os.kill(process, signal.SIGKILL)
    connection.close()
    how_it_ended.close()


class ForkServer:
    """Starts forks of a process that has called `begin(**setup)`; each answers with the function
    that this returns.

    The process ignores signals to end, as requests under way need it, and ends with this one.
    """

    def __init__(self, what: str, begin: str, setup: dict[str, Any], limits: Limits) -> None:
        """Start it; `ValueError` with what `begin` refuses. what: a name of the work, for errors.

        begin: MODULE.NAME of a function that imports neither JAX nor numpy, whose threads a fork
        would lack.
        """
        self._what, self._begin, self._setup, self._limits = what, begin, setup, limits
        self._idle: list[Fork] = []
        self._starting = asyncio.Lock()
        self._start()

    async def ask(self, question: bytes) -> bytes:
        """Let a fork answer that has answered before, or a new one."""
        self._idle = [fork for fork in self._idle if not fork.has_ended]
        fork = self._idle.pop() if self._idle else await self.new_fork()
        answer = await fork.ask(question)
        if not fork.is_slow:
            self._idle.append(fork)
        return answer

    def ask_now(self, question: bytes) -> bytes:
        """Wait for the answer of a new fork, where no event loop runs."""
        fork = self.fork()
        fork.send(question)
        if (answer := fork.receive(ANSWER_LIMIT_S)) is None:
            raise LimitError(f"{self._what}: needs more than {ANSWER_LIMIT_S:g} s")
        return answer

    async def new_fork(self) -> Fork:
        """Return a new fork; a server that was killed is started again.

        A thread does that: it may take seconds.
        """
        async with self._starting:
            if self._process.poll() is not None:
                self.close()
                await asyncio.to_thread(self._start)
        return self.fork()

    def fork(self) -> Fork:
        """Return a new fork of a server that runs; `LostError` if it has just been killed."""
        ours, theirs = socket.socketpair()
        how_it_ended, tell = os.pipe()
        fork = Fork(ours, FileIO(how_it_ended), self._what, self._limits)
        with theirs, FileIO(tell, "w"):
            try:
                socket.send_fds(self._control, [_FORK], [theirs.fileno(), tell])
            except OSError as error:
                raise LostError(f"{self._what}: the process for it is gone: try again") from error
        return fork

    def close(self) -> None:
        """End the process; a fork ends with its `Fork`."""
        self._idle.clear()
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
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
            self._control.sendall(_framed(json.dumps(setup).encode()))
            with self._control.makefile("rb") as answers:
                answer = _read(answers)
            refusal = refusal if answer is None else answer.decode()
        if refusal:
            self.close()
            raise ValueError(refusal)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _read(file: BinaryIO) -> bytes | None:
    """Return the next frame; None at the end."""
    head = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else None


# In the process and its forks


def _limit_memory(limits: Limits) -> None:
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = size_bytes + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (allowed if most < 0 else min(allowed, most), most))


def _limited(work: Callable[[], Any], processor_s: float) -> Any:
    """Return what `work` does; the system ends the process if that takes too much processor
    time.
    """
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    try:
        return work()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(connection: socket.socket, answer: Callable[[bytes], bytes], limits: Limits) -> None:
    """Answer until nobody asks any more."""
    _limit_memory(limits)
    connection.sendall(_framed(_LENGTH.pack(os.getpid())))
    with connection, connection.makefile("rb") as questions:
        while (question := _read(questions)) is not None:
            if select.select([connection], [], [], 0)[0] and not connection.recv(
                1, socket.MSG_PEEK
            ):
                return  # nobody waits for the answer
            begun_s = time.process_time()
            said = _limited(partial(answer, question), limits.processor_s)
            if time.process_time() > begun_s + SLOW_S:
                os.setpriority(os.PRIO_PROCESS, 0, SLOW_NICENESS)
            connection.sendall(_framed(said))


def _start_forks(control: socket.socket, answer: Callable[[bytes], bytes], limits: Limits) -> None:
    """Start a fork for each socket that arrives, until there is nobody to send one; a pipe comes
    with it, for how the fork ended.
    """
    pipes: dict[int, int] = {}  # by process

    def tell_ends(*_: object) -> None:
        for child, pipe in list(pipes.items()):
            ended, status = 0, 0
            with contextlib.suppress(ChildProcessError):  # a signal has come in between
                ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):  # nobody asks
                    os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(pipes.pop(child))

    signal.signal(signal.SIGCHLD, tell_ends)
    while True:
        message, numbers, *_ = socket.recv_fds(control, len(_FORK), 2)
        if not message:
            return
        number, pipe = numbers
        child = -1
        # too many processes: who asks sees the end of the socket
        with contextlib.suppress(OSError):
            child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            control.close()
            for other in (pipe, *pipes.values()):
                os.close(other)
            with contextlib.suppress(OSError):  # nobody waits for the answer
                _serve(socket.socket(fileno=number), answer, limits)
            os._exit(0)
        os.close(number)
        if child > 0:
            pipes[child] = pipe
            tell_ends()  # it may have ended before its pipe was there
        else:
            os.close(pipe)


def main() -> None:
    """Run the process; its argument is the socket of the one that started it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as questions:
        told = json.loads(_read(questions) or b"null")
    if told is None:
        return
    limits = Limits(**told["limits"])
    _limit_memory(limits)
    module, _, name = told["begin"].rpartition(".")
    try:
        answer = _limited(
            partial(getattr(import_module(module), name), **told["setup"]), START_LIMIT_S
        )
    except ValueError as error:
        control.sendall(_framed(str(error).encode("utf-8", "replace")))
        return
    gc.freeze()  # a collection in a fork would copy what it shares
    control.sendall(_framed(b""))
    _start_forks(control, answer, limits)


if __name__ == "__main__":
    main()
