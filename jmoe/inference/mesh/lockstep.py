"""Run one engine on several processes: rank 0 decides, and the others repeat its calls.

Rank 0, the leader, has the scheduler, the sampler and the server. The other processes, the
followers, hold their devices' part of the model, and make every call of a `call_on_all_ranks`
method that the leader makes, in the same order and with the same arguments, so that collectives
match. Followers decide nothing, so clocks, random numbers and clients need not agree.
"""

import contextlib
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import jax

from jmoe.cluster import distributed
from jmoe.cluster.channel import Channel
from jmoe.cluster.clocks import RunningClock
from jmoe.cluster.rendezvous import ranks_text
from jmoe.cluster.watchdog import EXIT_CODE
from jmoe.config import DistributedConfig
from jmoe.status import first_error_line

BEATS = 10  # heartbeats within the silence after which a process counts as lost
BEAT_S = 1.0  # longest interval between heartbeats
# An error that another process's end causes may precede the news of that end by this long.
GRACE_S = 1.0
SILENT = "no sign of life, it is stopped or out of reach"
Method = TypeVar("Method", bound=Callable[..., Any])

# Messages to followers: ["call", method, arguments]; ["beat", number of calls sent]; ["lost",
# reason], at which the follower exits with an error; ["end"], at which it returns.
# Messages to the leader: ["beat", number of calls made]; ["error", text], before the follower
# exits; ["stop"], after a signal.


class LockstepError(RuntimeError):
    """Another process of the engine is lost or does not progress, so this process cannot go on."""


def print_and_exit(line: str) -> None:
    """Print a line to stderr and exit at once with status 70, whatever other threads wait for."""
    sys.stdout.flush()
    os.write(2, f"jmoe: {line}\n".encode())
    os._exit(EXIT_CODE)


def call_on_all_ranks(method: Method) -> Method:
    """Decorate a method that followers must call too: each call is first sent to the object's
    `leader`.

    Arguments may be numbers, lists and numpy arrays. Followers discard the result. Without a leader
    the method runs alone.
    """

    @functools.wraps(method)
    def send_and_call(self: Any, *arguments: Any) -> Any:
        if self.leader is not None:
            self.leader.send_call(method.__name__, *arguments)
        return method(self, *arguments)

    send_and_call.is_called_on_all_ranks = True  # type: ignore[attr-defined]
    return send_and_call  # type: ignore[return-value]


def join_lockstep(config: DistributedConfig) -> "Leader | Follower | None":
    """Connect to the other processes and return this rank's side; None if this process is alone."""
    silence_s = config.heartbeat_timeout_s
    connections = distributed.join_and_connect_processes(config, rank_0_outlives=True)
    channels = {rank: Channel(connection, silence_s) for rank, connection in connections.items()}
    if not channels:
        return None
    if jax.process_index() > 0:
        return Follower(channels[0], silence_s=silence_s)
    return Leader(channels, silence_s=silence_s, step_timeout_s=config.step_timeout_s)


class Leader:
    """Rank 0's side: sends calls to all followers, and notices when one is lost.

    on_lost: called once, from another thread, with a line that names the lost rank; by default
        exits.
    on_stop: called from another thread when a follower gets SIGTERM or SIGINT; by default sends
        SIGTERM to this process.
    """

    def __init__(
        self, channels: Mapping[int, Channel], *, silence_s: float, step_timeout_s: float
    ) -> None:
        """Start the threads that listen to followers and send heartbeats.

        channels: connections by rank, whose receive timeout is `silence_s`.
        silence_s: seconds of silence after which a follower counts as lost.
        step_timeout_s: seconds that a step may take.
        """
        self._channels, self._step_timeout_s = dict(channels), step_timeout_s
        self.on_lost: Callable[[str], object] = print_and_exit
        self.on_stop: Callable[[], object] = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
        self.lost: str | None = None
        self._is_lost, self._closing, self._reporting = (
            threading.Event(),
            threading.Event(),
            threading.Lock(),
        )
        self._num_calls, self._calls_of = 0, dict.fromkeys(channels, 0)
        self._step_since_s: float | None = None
        self._clock = RunningClock(_heartbeat_interval_s(silence_s))
        self._listeners = [
            threading.Thread(target=self._handle_messages, args=item, name="lockstep", daemon=True)
            for item in channels.items()
        ]
        for thread in self._listeners:
            thread.start()
        threading.Thread(
            target=self._send_heartbeats,
            args=(_heartbeat_interval_s(silence_s),),
            name="heartbeat",
            daemon=True,
        ).start()

    def send_call(self, name: str, *arguments: object) -> None:
        """Send a call of a `call_on_all_ranks` method to every follower. Raises OSError if one
        is gone.
        """
        self._num_calls += 1
        for channel in self._channels.values():
            channel.send("call", name, arguments)

    @contextlib.contextmanager
    def limit_step_time(self) -> Iterator[None]:
        """Return a context for one step, which must end within `step_timeout_s`.

        Raises LockstepError from an error in the step if another process is lost.
        """
        self._step_since_s = self._clock.now()
        try:
            yield
        except Exception as error:
            if self._is_lost.wait(GRACE_S):
                raise LockstepError(self.lost) from error
            raise
        finally:
            self._step_since_s = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Tell the followers to end, and wait until they have.

        JAX's coordination service runs in this process, so it must end last.
        """
        self._closing.set()
        message = ("end",) if error is None else ("lost", f"rank 0 failed: {_error_text(error)}")
        self._send_to_followers(message)
        for thread in self._listeners:
            thread.join()  # ends at the latest when the channel's receive times out

    def _handle_messages(self, rank: int, channel: Channel) -> None:
        """Handle a follower's messages (beats, stop requests, errors) until its connection ends,
        then report it as lost.
        """
        try:
            while (message := channel.receive()) is not None:
                kind, *rest = message
                if kind == "beat":
                    self._calls_of[rank] = rest[0]
                elif kind == "stop":
                    self.on_stop()
                elif kind == "error":
                    self._is_lost.wait(GRACE_S)  # another rank's end may have caused the error
                    self._report_lost_rank(f"rank {rank} failed: {rest[0]}", rank)
            self._report_lost_rank(f"rank {rank} was lost: its process has ended")
        except TimeoutError:
            self._report_lost_rank(f"rank {rank} was lost: {SILENT}")
        except OSError as error:
            self._report_lost_rank(f"rank {rank} was lost: {first_error_line(error)}")

    def _send_heartbeats(self, every_s: float) -> None:
        """Send heartbeats; report a loss if the running step exceeds `step_timeout_s`."""
        while not self._closing.wait(every_s):
            self._send_to_followers(("beat", self._num_calls))
            since_s, now_s = self._step_since_s, self._clock.skip_suspension()
            if since_s is not None and now_s > since_s + self._step_timeout_s:
                behind = [rank for rank, calls in self._calls_of.items() if calls < self._num_calls]
                which = f"{ranks_text(behind)} behind" if behind else "all ranks have come as far"
                self._report_lost_rank(
                    f"a step has made no progress for {self._step_timeout_s:g} s (step_timeout_s):"
                    f" {which}"
                )

    def _report_lost_rank(self, reason: str, failed: int | None = None) -> None:
        """Report once that a rank is lost: end the followers, and call `on_lost`.

        failed: the rank whose own error is the reason; it reports that itself.
        """
        with self._reporting:
            if self._is_lost.is_set() or self._closing.is_set():
                return
            self.lost = reason
            self._is_lost.set()
        self._send_to_followers(("lost", reason), excluded_rank=failed)
        self.on_lost(reason)

    def _send_to_followers(
        self, message: tuple[object, ...], excluded_rank: int | None = None
    ) -> None:
        """Send a message to every follower but `excluded_rank`; a lost connection is ignored."""
        for rank, channel in self._channels.items():
            if rank != excluded_rank:
                with contextlib.suppress(OSError):  # the rank's listener reports the loss
                    channel.send(*message)


class Follower:
    """The side of every other rank: makes the leader's calls until the leader ends.

    Sends heartbeats from the start. If the leader is lost or gives up, the process exits at once
    with a line on stderr and status 70, whatever its main thread waits for.
    """

    def __init__(self, channel: Channel, *, silence_s: float) -> None:
        self._channel, self._num_calls = channel, 0
        # calls (method, arguments); None after the last one
        self._waiting: queue.SimpleQueue[tuple[str, list[object]] | None] = queue.SimpleQueue()
        self._stop, self._over = threading.Event(), threading.Event()
        for work in (
            self._handle_messages,
            functools.partial(self._send_heartbeats, _heartbeat_interval_s(silence_s)),
        ):
            threading.Thread(target=work, name="lockstep", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Report an error to the leader."""
        if error is not None:
            with contextlib.suppress(OSError):
                self._channel.send("error", _error_text(error))
            # if the leader's end caused the error, `_handle_messages` exits with that reason
            # meanwhile
            time.sleep(GRACE_S)
        self._over.set()

    def run_leader_calls(self, runner: object) -> None:
        """Make the leader's calls on `runner`, in the main thread, until the leader ends.

        SIGTERM and SIGINT only ask the leader to end: it drains its server, which needs this
        process.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        while (call := self._waiting.get()) is not None:
            method = getattr(runner, call[0])
            assert method.is_called_on_all_ranks, call[0]
            method(*call[1])
            self._num_calls += 1

    def _handle_messages(self) -> None:
        """Queue the leader's calls until it ends; exit the process if the leader is lost."""
        try:
            while (message := self._channel.receive()) is not None:
                kind, *rest = message
                if kind == "call":
                    self._waiting.put((rest[0], rest[1]))
                elif kind == "end":
                    self._waiting.put(None)
                    return
                elif kind == "lost":
                    self._print_and_exit_unless_closed(f"ends with rank 0: {rest[0]}")
            self._print_and_exit_unless_closed("ends: rank 0 was lost: its process has ended")
        except TimeoutError:
            self._print_and_exit_unless_closed(f"ends: rank 0 was lost: {SILENT}")
        except OSError as error:
            self._print_and_exit_unless_closed(f"ends: rank 0 was lost: {first_error_line(error)}")

    def _print_and_exit_unless_closed(self, line: str) -> None:
        """Print a line and exit, unless the `with` block of this follower has ended."""
        if not self._over.is_set():
            print_and_exit(line)

    def _send_heartbeats(self, every_s: float) -> None:
        """Send heartbeats with the number of calls made, and report a signal once."""
        told = False
        with contextlib.suppress(OSError):  # `_handle_messages` reports the loss
            while not self._over.wait(every_s):
                self._channel.send("beat", self._num_calls)
                if self._stop.is_set() and not told:
                    self._channel.send("stop")
                    told = True


def _error_text(error: BaseException) -> str:
    """Return an error's class and the first line of its message."""
    return f"{type(error).__name__}: {first_error_line(error)}"


def _heartbeat_interval_s(silence_s: float) -> float:
    """Return the seconds between two heartbeats: several fit in the silence that is allowed."""
    return min(BEAT_S, silence_s / BEATS)
