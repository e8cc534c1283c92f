"""One engine on several processes: rank 0 decides, and tells the others what to call, so that
collectives meet.

Rank 0, the leader, has the scheduler, the sampler and the server. The others, the followers, hold
their devices' part of the model and make every call that the leader makes, in its order, with its
arguments. They decide nothing, so that clocks, random numbers and clients need not agree.
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
from jmoe.cluster.rendezvous import named
from jmoe.config import DistributedConfig
from jmoe.status import first_line

BEATS = 10  # in the time after which a silent process is given up
BEAT_S = 1.0  # at least as often
# a process that has ended is heard of so much later than what its end brings about, at most
GRACE_S = 1.0
SILENT = "no sign of life, it is stopped or out of reach"
Method = TypeVar("Method", bound=Callable[..., Any])

# Messages to followers: ["call", name, arguments]; ["beat", calls made]; ["lost", line], which ends
# them; ["end"]. Messages to the leader: ["beat", calls made]; ["error", line], before its end;
# ["stop"]: a signal came.


class LockstepError(RuntimeError):
    """Another process of the engine is gone or does not come on, so that this one cannot either."""


def end_process(line: str) -> None:
    """Say why, and end this process, whatever its other threads wait for."""
    sys.stdout.flush()
    os.write(2, f"jmoe: {line}\n".encode())
    os._exit(distributed.EXIT_CODE)


def led(method: Method) -> Method:
    """Let the followers of an object's `leader`, if it has one, make a call of this method too:
    they begin with it.

    Arguments are numbers, lists and numpy arrays. Followers drop what the method returns.
    """

    @functools.wraps(method)
    def call(self: Any, *arguments: Any) -> Any:
        if self.leader is not None:
            self.leader.tell(method.__name__, *arguments)
        return method(self, *arguments)

    call.is_led = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def join(config: DistributedConfig) -> "Leader | Follower | None":
    """Join the other processes, as `run.distributed.start` does; None if this one is alone."""
    silence_s = config.heartbeat_timeout_s
    connections = distributed.connect(config, rank_0_outlives=True)
    channels = {rank: Channel(connection, silence_s) for rank, connection in connections.items()}
    if not channels:
        return None
    if jax.process_index() > 0:
        return Follower(channels[0], silence_s=silence_s)
    return Leader(channels, silence_s=silence_s, step_timeout_s=config.step_timeout_s)


class Leader:
    """Rank 0's side: tells every follower what to call, and notices when one is lost.

    `on_lost` is called once, from a thread of its own, with a line that names the rank: by default
    it ends the process. `on_stop` is called, likewise, when a follower was asked to end.
    """

    def __init__(
        self, channels: Mapping[int, Channel], *, silence_s: float, step_timeout_s: float
    ) -> None:
        """channels: to every follower by its rank, whose times of silence are `silence_s`."""
        self._channels, self._step_timeout_s = dict(channels), step_timeout_s
        self.on_lost: Callable[[str], object] = end_process
        self.on_stop: Callable[[], object] = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
        self.lost: str | None = None
        self._is_lost, self._closing, self._reporting = (
            threading.Event(),
            threading.Event(),
            threading.Lock(),
        )
        self._num_calls, self._calls_of = 0, dict.fromkeys(channels, 0)
        self._step_since_s: float | None = None
        self._clock = RunningClock(_beat_s(silence_s))
        self._listeners = [
            threading.Thread(target=self._listen, args=item, name="lockstep", daemon=True)
            for item in channels.items()
        ]
        for thread in self._listeners:
            thread.start()
        threading.Thread(
            target=self._beat, args=(_beat_s(silence_s),), name="heartbeat", daemon=True
        ).start()

    def tell(self, name: str, *arguments: Any) -> None:
        """Let every follower call a method that is `led`. `OSError` if one is gone."""
        self._num_calls += 1
        for channel in self._channels.values():
            channel.send("call", name, arguments)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for calls and the use of their results, which must end within
        `step_timeout_s`.

        `LockstepError` where an error has its reason in another process.
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
        """Let the followers end, and wait for it: JAX's coordination service ends with this
        process.
        """
        self._closing.set()
        message = ("end",) if error is None else ("lost", f"rank 0 failed: {_described(error)}")
        self._send_all(message)
        for thread in self._listeners:
            thread.join()  # a channel gives up by itself after its time of silence

    def _listen(self, rank: int, channel: Channel) -> None:
        """Take what a follower sends, until it ends."""
        try:
            while (message := channel.receive()) is not None:
                kind, *rest = message
                if kind == "beat":
                    self._calls_of[rank] = rest[0]
                elif kind == "stop":
                    self.on_stop()
                elif kind == "error":
                    self._is_lost.wait(GRACE_S)  # another rank's end may be its reason
                    self._lose(f"rank {rank} failed: {rest[0]}", rank)
            self._lose(f"rank {rank} was lost: its process has ended")
        except TimeoutError:
            self._lose(f"rank {rank} was lost: {SILENT}")
        except OSError as error:
            self._lose(f"rank {rank} was lost: {first_line(error)}")

    def _beat(self, every_s: float) -> None:
        """Show followers that this process lives, and look whether a step takes too long."""
        while not self._closing.wait(every_s):
            self._send_all(("beat", self._num_calls))
            since_s, now_s = self._step_since_s, self._clock.look()
            if since_s is not None and now_s > since_s + self._step_timeout_s:
                behind = [rank for rank, calls in self._calls_of.items() if calls < self._num_calls]
                which = f"{named(behind)} behind" if behind else "all ranks have come as far"
                self._lose(
                    f"a step has made no progress for {self._step_timeout_s:g} s (step_timeout_s):"
                    f" {which}"
                )

    def _lose(self, reason: str, failed: int | None = None) -> None:
        """End all but the rank that failed, which says more of it."""
        with self._reporting:
            if self._is_lost.is_set() or self._closing.is_set():
                return
            self.lost = reason
            self._is_lost.set()
        self._send_all(("lost", reason), but=failed)
        self.on_lost(reason)

    def _send_all(self, message: tuple[Any, ...], but: int | None = None) -> None:
        for rank, channel in self._channels.items():
            if rank != but:
                with contextlib.suppress(OSError):  # its listener says so
                    channel.send(*message)


class Follower:
    """The side of every other rank: makes the leader's calls until it has done.

    From the start it shows that it lives. A leader that is gone or gives up ends this process at
    once, with a line that says why and status 70, whatever its main thread waits for.
    """

    def __init__(self, channel: Channel, *, silence_s: float) -> None:
        self._channel, self._num_calls = channel, 0
        # None: the end
        self._waiting: queue.SimpleQueue[tuple[str, list[Any]] | None] = queue.SimpleQueue()
        self._stop, self._over = threading.Event(), threading.Event()
        for work in (self._listen, functools.partial(self._beat, _beat_s(silence_s))):
            threading.Thread(target=work, name="lockstep", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Tell the leader of an error."""
        if error is not None:
            with contextlib.suppress(OSError):
                self._channel.send("error", _described(error))
            # if it is the leader's end that brought it about, `_listen` ends this process
            time.sleep(GRACE_S)
        self._over.set()

    def follow(self, runner: Any) -> None:
        """Make the calls on `runner`, from the main thread.

        SIGTERM and SIGINT ask the leader to end: it drains its server, for which it needs this
        process.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        while (call := self._waiting.get()) is not None:
            method = getattr(runner, call[0])
            assert method.is_led, call[0]
            method(*call[1])
            self._num_calls += 1

    def _listen(self) -> None:
        """Take what the leader sends; without a leader end the process."""
        try:
            while (message := self._channel.receive()) is not None:
                kind, *rest = message
                if kind == "call":
                    self._waiting.put((rest[0], rest[1]))
                elif kind == "end":
                    self._waiting.put(None)
                    return
                elif kind == "lost":
                    self._end(f"ends with rank 0: {rest[0]}")
            self._end("ends: rank 0 was lost: its process has ended")
        except TimeoutError:
            self._end(f"ends: rank 0 was lost: {SILENT}")
        except OSError as error:
            self._end(f"ends: rank 0 was lost: {first_line(error)}")

    def _end(self, line: str) -> None:
        if not self._over.is_set():
            end_process(line)

    def _beat(self, every_s: float) -> None:
        """Show the leader that this process lives, how far it is, and whether it was asked to
        end.
        """
        told = False
        with contextlib.suppress(OSError):  # `_listen` says so
            while not self._over.wait(every_s):
                self._channel.send("beat", self._num_calls)
                if self._stop.is_set() and not told:
                    self._channel.send("stop")
                    told = True


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _beat_s(silence_s: float) -> float:
    return min(BEAT_S, silence_s / BEATS)
