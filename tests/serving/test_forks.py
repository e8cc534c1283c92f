"""Work in processes that end at their limits."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Coroutine, Iterator
from typing import Any

import psutil
import pytest

from jmoe.serving.forks import Fork, ForkServer, LimitError, Limits, LostError
from tests.fakes import wait_for

LIMITS = Limits(processor_s=0.3, memory_bytes=64 << 20, answer_bytes=1000)


def start(**setup: Any) -> ForkServer:
    return ForkServer("sums", "tests.serving.evaluating.begin_evaluating", setup, LIMITS)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = start()
    yield server
    server.close()


def ask(server: ForkServer, *questions: bytes) -> list[bytes]:
    async def all_of_them() -> list[bytes]:
        return await asyncio.gather(*(server.ask(question) for question in questions))

    return asyncio.run(all_of_them())


def num_forks(server: ForkServer) -> int:
    parents = [process.info["ppid"] for process in psutil.process_iter(["ppid"])]
    return parents.count(server._process.pid)


def test_answers(server: ForkServer) -> None:
    """Each is of one process at a time; a process that has nothing else to do answers the next
    question.
    """
    first, second = ask(server, b"os.getpid()", b"os.getpid()")
    assert first != second
    assert ask(server, b"os.getpid()")[0] in (first, second)
    assert num_forks(server) == 2


@pytest.mark.parametrize(
    "question",
    [
        b"sum(1 for _ in iter(int, 1))",
        b"10 ** 10 ** 8",
        b"len(bytes(10 ** 9))",
        b"'x' * 1001",
    ],
)
def test_limits(server: ForkServer, question: bytes) -> None:
    """In Python's code and native code; the next question is answered by another process."""
    with pytest.raises(
        LimitError,
        match=r"^sums: needs more than 0.3 s of processor time, 64 MiB of memory or 0 MiB of",
    ):
        ask(server, question)
    assert ask(server, b"1 + 1") == [b"2"]
    wait_for(lambda: num_forks(server) <= 2)


@pytest.mark.parametrize("question", [b"os.abort()", b"[][0]"])
def test_work_that_crashes_its_process(server: ForkServer, question: bytes) -> None:
    """Memory that native code does not get ends in the same signal."""
    with pytest.raises(
        LimitError, match=r"^sums: its process crashed \((SIGABRT|exit code 1)\), or "
    ):
        ask(server, question)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1, signal.SIGRTMIN])
def test_a_fork_killed_from_outside(server: ForkServer, number: int) -> None:
    """The client's words did nothing: it is no `LimitError`, and the message names the signal."""
    name = {signal.SIGKILL: "SIGKILL from outside the server (the system does so when memory is"}
    words = name.get(signal.Signals(number), f"{signal.Signals(number).name} from outside")

    async def ask_and_kill() -> None:
        fork = await server.fork_after_restart_if_killed()
        await fork.ask(b"1")
        asking = asyncio.ensure_future(fork.ask(b"__import__('time').sleep(50)"))
        await asyncio.sleep(0.05)
        os.kill(*fork._number, number)
        await asking

    with pytest.raises(LostError, match=f"^sums: {re.escape(words)}"):
        asyncio.run(ask_and_kill())
    waiting = server.fork_worker()
    waiting.send(b"1")
    assert waiting.receive(60.0) == b"1"
    os.kill(*waiting._number, number)
    with pytest.raises(LostError, match=f"^sums: {re.escape(words)}"):
        waiting.receive(60.0)


def test_a_fork_of_a_killed_server() -> None:
    """Killed together, as a cgroup's limit does, or between two questions."""
    server = start()
    fork = server.fork_worker()
    assert asyncio.run(fork.ask(b"1")) == b"1"
    server._process.kill()
    server._process.wait()
    os.kill(*fork._number, signal.SIGKILL)
    with pytest.raises(LostError, match=r"^sums: the process for it is gone"):
        asyncio.run(fork.ask(b"2"))
    with pytest.raises(LostError, match=r"^sums: the process for it is gone"):
        server.fork_worker()
    server.close()


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of processes: the request may be sent again, and succeeds once there is room."""
    server = start()
    server._process.kill()
    server._process.wait()

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(
            LostError, match=r"^sums: no process for it can be started \(.*temporar"
        ):
            asyncio.run(server.ask(b"1"))
    assert asyncio.run(server.ask(b"1 + 1")) == b"2"
    server.close()


def test_slow_work_lets_others_go_first(server: ForkServer) -> None:
    """A question that is asked afterwards has another process, of ordinary priority."""
    sleep = b"[__import__('time').sleep(0.01), os.nice(0)][1]"
    (slow,) = ask(server, b"[*iter(lambda: " + sleep + b", 19), os.getpid()][-1]")
    for _ in range(20):  # this process may stand still, and take that one for slow too
        process, nice = eval(ask(server, b"os.getpid(), os.nice(0)")[0])
        assert process != int(slow)
        if nice == os.nice(0):
            break
    assert nice == os.nice(0)


def test_a_fork_of_its_own(server: ForkServer) -> None:
    """Answers come in order, when they are asked for; the process ends with the object."""
    before = num_forks(server)
    fork: Fork | None = server.fork_worker()
    assert fork is not None
    for number in range(3):
        fork.send(b"[kept.append(%d), len(kept)][1]" % number)
    answers = []
    while len(answers) < 3:
        if (answer := fork.receive(1.0)) is not None:
            answers.append(answer)
    assert answers == [b"1", b"2", b"3"] and fork.receive(0.0) is None
    fork.send(b"sum(1 for _ in iter(int, 1))")
    with pytest.raises(LimitError):
        fork.receive(60.0)
    fork = server.fork_worker()
    assert asyncio.run(fork.ask(b"2")) == b"2"
    del fork
    wait_for(lambda: num_forks(server) <= before)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.1])
def test_what_is_given_up_ends(server: ForkServer, after_s: float) -> None:
    """At once, also where the process has hardly begun."""
    before = num_forks(server)

    async def give_up() -> None:
        asking = [
            asyncio.create_task(server.fork_worker().ask(b"sum(1 for _ in iter(int, 1))"))
            for _ in range(5)
        ]
        await asyncio.sleep(after_s)
        for task in asking:
            task.cancel()

    asyncio.run(give_up())
    wait_for(lambda: num_forks(server) <= before)


def test_what_cannot_begin() -> None:
    with pytest.raises(ValueError, match=r"^no such sums$"):
        start(refusal="no such sums")


async def ticks_until(answer: Coroutine[Any, Any, bytes]) -> tuple[int, bytes]:
    """How often others had a turn meanwhile, and the answer."""
    asking, ticks = asyncio.ensure_future(answer), 0
    while not asking.done():
        await asyncio.sleep(0.002)
        ticks += 1
    return ticks, asking.result()


def test_a_killed_server_is_replaced() -> None:
    """And ends with its owner; signals to a group of processes, as Ctrl-C, do not end it."""
    server = start()
    process = server._process
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert asyncio.run(server.fork_worker().ask(b"1")) == b"1"
    process.kill()
    process.wait()
    ticks, answered = asyncio.run(ticks_until(server.ask(b"2")))
    assert answered == b"2"
    assert ticks > 10, "the event loop went on while it started"
    again = server._process
    server.close()
    assert again is not process and again.returncode is not None
