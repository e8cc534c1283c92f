"""Leader and followers over real connections: calls in order, and every way in which one of them
is lost.
"""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jmoe.cluster.channel import Channel
from jmoe.cluster.watchdog import EXIT_CODE
from jmoe.inference.mesh import lockstep
from jmoe.inference.mesh.lockstep import Follower, Leader, LockstepError, call_on_all_ranks
from tests.fakes import wait_for
from tests.processes import Child
from tests.train_runs import Start, free_port

LONG_S = 600.0
Pair = Callable[..., tuple[Channel, Channel]]
Lead = Callable[..., tuple[Leader, "Lost"]]


class Lost(list[str]):
    """Lines with which `on_lost` or `print_and_exit` was called."""

    def wait(self) -> str:
        wait_for(lambda: bool(self), "nobody was lost")
        return self[0]


@pytest.fixture
def channels() -> Iterator[Pair]:
    """`channels(silence_s=...)`: both ends of a connection; silence_s: after which the first one
    gives up.
    """
    made: list[Channel] = []

    def pair(silence_s: float = LONG_S) -> tuple[Channel, Channel]:
        here, there = socket.socketpair()
        made.extend((Channel(here, silence_s), Channel(there, LONG_S)))
        return made[-2], made[-1]

    yield pair
    for channel in made:
        channel.close()


@pytest.fixture
def leader(channels: Pair) -> Iterator[Lead]:
    """`leader({rank: channel})`: a leader and the lines that it would have ended with."""
    made: list[Leader] = []

    def lead(channels: dict[int, Channel], **options: float) -> tuple[Leader, Lost]:
        lost = Lost()
        # its threads may lose one before it is returned
        with mock.patch.object(lockstep, "print_and_exit", lost.append):
            made.append(
                Leader(channels, **{"silence_s": LONG_S, "step_timeout_s": LONG_S, **options})
            )
        return made[-1], lost

    yield lead
    for one in made:
        for channel in one._channels.values():
            channel.close()
        one.__exit__(None, None, None)


def follow(channel: Channel, runner: Any, *, silence_s: float = LONG_S) -> None:
    """Be a follower to the end. It sets handlers of signals, as for a process that is its alone."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Follower(channel, silence_s=silence_s) as follower:
            follower.run_leader_calls(runner)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def received(channel: Channel, kind: str) -> list[Any]:
    """The next message of a kind."""
    while (message := channel.receive()) is not None:
        if message[0] == kind:
            return message[1:]
    pytest.fail(f"the channel ended before a message {kind!r}")


class Adder:
    """Stands for a runner: notes what it was called with. broken: its calls fail."""

    def __init__(
        self, leader: Leader | None = None, during: Callable[[], object] = lambda: None
    ) -> None:
        self.leader, self.during, self.made = leader, during, list[Any]()

    @call_on_all_ranks
    def add(self, x: np.ndarray, y: int) -> np.ndarray:
        self.during()
        self.made.append((np.asarray(x).tolist(), y))
        return x + y

    def quiet(self) -> None:
        self.made.append("quiet")


def test_followers_make_the_leaders_calls(channels: Pair, leader: Lead) -> None:
    """In its order, with its arguments, of `call_on_all_ranks` methods alone; the leader's result is
    returned.
    """
    here, there = channels()
    first, lost = leader({1: here})
    leading, following = Adder(first), Adder()

    def decide() -> None:
        for number in range(20):
            assert leading.add(np.full(3, number), 1).tolist() == [number + 1] * 3
            leading.quiet()
        first.__exit__(None, None, None)

    thread = threading.Thread(target=decide)
    thread.start()
    follow(there, following)
    there.close()  # as the end of its process does
    thread.join()
    assert following.made == [([number] * 3, 1) for number in range(20)] and not lost
    assert leading.made == [call for made in following.made for call in (made, "quiet")]


def test_a_follower_that_ends_is_named(channels: Pair, leader: Lead) -> None:
    """To the others as well; a step that fails for it says so."""
    pairs = {rank: channels() for rank in (1, 2)}
    first, lost = leader({rank: here for rank, (here, _) in pairs.items()})

    def step() -> None:
        with first.limit_step_time():
            pairs[2][1].close()
            raise ValueError("Gloo all-reduce failed: Connection reset by peer")

    with pytest.raises(LockstepError, match="rank 2 was lost: its process has ended"):
        step()
    assert lost.wait() == first.lost == "rank 2 was lost: its process has ended"
    assert received(pairs[1][1], "lost") == ["rank 2 was lost: its process has ended"]


def test_the_reason_is_the_rank_that_ended_not_the_ones_that_failed_for_it(
    channels: Pair, leader: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "GRACE_S", LONG_S)
    pairs = {rank: channels() for rank in (1, 2)}
    _, lost = leader({rank: here for rank, (here, _) in pairs.items()})
    pairs[1][1].send("error", "ValueError: Gloo all-reduce failed")
    pairs[2][1].close()
    assert lost.wait() == "rank 2 was lost: its process has ended"


def test_an_error_of_a_follower_is_told(channels: Pair, leader: Lead) -> None:
    here, there = channels()
    first, lost = leader({1: here})

    def fail() -> None:
        raise MemoryError("no room for 3 experts\nmore")

    first.send_call("add", 1, 1)
    with pytest.raises(MemoryError):
        follow(there, Adder(during=fail), silence_s=LONG_S)
    assert lost.wait() == "rank 1 failed: MemoryError: no room for 3 experts"


def test_an_error_of_the_leader_is_its_own(
    channels: Pair, leader: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "GRACE_S", 0.01)
    first, lost = leader({1: channels()[0]})
    with pytest.raises(KeyError), first.limit_step_time():
        raise KeyError("mine")
    assert not lost


def test_a_silent_follower_is_given_up(channels: Pair, leader: Lead) -> None:
    _, lost = leader({1: channels(silence_s=0.2)[0]}, silence_s=0.2)
    assert lost.wait() == "rank 1 was lost: no sign of life, it is stopped or out of reach"


def test_a_step_without_progress_names_who_is_behind(channels: Pair, leader: Lead) -> None:
    """Rank 2 lives, and does not come on."""
    pairs = {rank: channels() for rank in (1, 2)}
    first, lost = leader(
        {rank: here for rank, (here, _) in pairs.items()}, silence_s=1, step_timeout_s=2
    )
    pairs[1][1].send("beat", 1)
    wait_for(lambda: first._calls_of[1] == 1)
    with first.limit_step_time():
        first.send_call("add", 1, 1)
        pairs[2][1].send("beat", 0)
        assert lost.wait() == "a step has made no progress for 2 s (step_timeout_s): rank 2 behind"


@pytest.mark.parametrize(
    ("end", "line", "silence_s"),
    [
        (lambda channel: channel.close(), "ends: rank 0 was lost: its process has ended", LONG_S),
        (
            lambda channel: channel.send("lost", "rank 2 was lost"),
            "ends with rank 0: rank 2 was lost",
            LONG_S,
        ),
        (
            lambda channel: None,
            "ends: rank 0 was lost: no sign of life, it is stopped or out of reach",
            0.5,
        ),
    ],
    ids=["closed", "gives up", "silent"],
)
def test_a_follower_without_leader_ends(
    end: Callable[[Channel], None],
    line: str,
    silence_s: float,
    channels: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its main thread waits for a collective."""
    there, here = channels(silence_s)
    lost, ended = Lost(), threading.Event()

    def print_and_exit(reason: str) -> None:
        lost.append(reason)
        ended.set()

    monkeypatch.setattr(lockstep, "print_and_exit", print_and_exit)

    def collective() -> None:
        end(here)
        assert ended.wait(LONG_S)
        raise KeyboardInterrupt  # a process that has ended does nothing more

    here.send("call", "add", [1, 1])
    with pytest.raises(KeyboardInterrupt):
        follow(there, Adder(during=collective), silence_s=LONG_S)
    assert lost[0] == line


def test_a_signal_to_a_follower_is_the_leaders(channels: Pair, leader: Lead) -> None:
    """Which drains first, with the followers' help."""
    here, there = channels()
    first, lost = leader({1: here})
    # in the first call
    following = Adder(during=lambda: following.made or os.kill(os.getpid(), signal.SIGTERM))

    def drain() -> None:
        for number in range(3):
            first.send_call("add", number, 1)
        first.__exit__(None, None, None)

    thread = threading.Thread(target=drain)
    first.on_stop = thread.start
    first.send_call("add", 7, 1)
    follow(there, following, silence_s=1.0)
    there.close()
    thread.join()
    assert [x for x, _ in following.made] == [7, 0, 1, 2] and not lost


# A run in small: RANK PROCESSES PORT CALLS, a sum over the processes in every call.
WORKER = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jmoe.config import DistributedConfig
from jmoe.inference.mesh.lockstep import Follower, Leader, call_on_all_ranks
from jmoe.cluster.distributed import join_and_connect_processes
from jmoe.cluster.channel import Channel

rank, processes, port = map(int, sys.argv[1:4])
config = DistributedConfig(coordinator_address=f"127.0.0.1:{port}", num_processes=processes, process_id=rank,
    heartbeat_timeout_s=240)
channels = {rank: Channel(connection, 240) for rank, connection in join_and_connect_processes(config, rank_0_outlives=True).items()}
sharding = NamedSharding(jax.make_mesh((processes,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))
total = jax.jit(lambda x: x.sum(axis=0), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))

class Runner:
    leader = None if rank else Leader(channels, silence_s=240, step_timeout_s=240)

    @call_on_all_ranks
    def add(self, x):
        own = x[None] * (rank + 1)
        return np.asarray(total(jax.make_array_from_process_local_data(sharding, own)).addressable_data(0))

runner = Runner()
print("computes", flush=True)
if rank > 0:
    Follower(channels[0], silence_s=240).run_leader_calls(runner)
else:
    for number in range(int(sys.argv[4])):
        with runner.leader.limit_step_time():
            found = runner.add(np.full(3, number, np.float32))
        assert found.tolist() == [number * processes * (processes + 1) / 2] * 3
    runner.leader.__exit__(None, None, None)
print("end", flush=True)
"""


@pytest.fixture
def start_ranks(start_python: Start, tmp_path: Path) -> Callable[[int], list[Child]]:
    """`start_ranks(calls)` starts a leader of so many calls and two followers."""

    def start(calls: int) -> list[Child]:
        port, environment = free_port(), {"JAX_NUM_CPU_DEVICES": "1", "NPROC": None}
        return [
            start_python(
                ["-c", WORKER, *map(str, (rank, 3, port, calls))], tmp_path / str(rank), environment
            )
            for rank in range(3)
        ]

    return start


def test_processes_that_compute_together(start_ranks: Callable[[int], list[Child]]) -> None:
    """Collectives meet, and all end in order."""
    for rank in start_ranks(50):
        assert rank.end(LONG_S).splitlines()[-1] == "end"


@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_process_ends_the_others(
    start_ranks: Callable[[int], list[Child]], killed: int
) -> None:
    """Which wait for it in a collective. Without the leader JAX ends them too, if it is quicker."""
    ranks = start_ranks(10**9)
    for rank in ranks:
        rank.wait_until(lambda rank=rank: "computes" in rank.screen)
    ranks.pop(killed).kill_now()
    for rank in ranks:
        assert rank.wait(LONG_S) in (EXIT_CODE, -signal.SIGABRT), rank.screen
        assert re.search(
            rf"rank {killed}.* was lost: its process has ended|leader task was preempted",
            rank.screen,
        )
