"""Signals, sent to any rank, on which all ranks act at the same step: a request (SIGUSR2), and a
stop (SIGTERM, SIGUSR1, SIGHUP or Ctrl-C).
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Any

import jax

from jmoe.cluster.coordinator import key_value_client, read_json_by_rank
from jmoe.cluster.distributed import print_to_stderr

STOPS = "jmoe/stop/"  # + rank: the step at whose end the rank learned that the run is to stop
# + number of earlier requests + / + rank: the step before which the rank saw the request
ASKED = "jmoe/asked/"


class AgreedStep:
    """Agreement of all ranks on one step, soon after at least one rank asked for it.

    A rank that was asked, or sees that another was, publishes the step it has reached. Once every
    rank has published, the agreed step is max(published) + 1 + steps_in_flight. No rank can pass
    that step before it has read all published steps, because a training step needs every rank.

    keys: prefix of the published keys. steps_in_flight: steps that the loop may have dispatched
    beyond the last one whose result it has seen (0: the loop waits for each step). poll_s: seconds
    between two looks at the other ranks.
    """

    def __init__(self, keys: str, *, steps_in_flight: int, poll_s: float) -> None:
        self._keys, self._margin_steps, self._poll_s = keys, 1 + steps_in_flight, poll_s
        self.asked = threading.Event()
        self._published = False
        self._step: int | None = None
        self._client = key_value_client()
        self._closing = threading.Event()

    def start_listening(self) -> None:
        """Start a thread that watches for requests made on other ranks."""
        if self._client is not None:
            threading.Thread(
                target=self._listen_until_asked, name="agreed step", daemon=True
            ).start()

    def close(self) -> None:
        """Stop the thread that `start_listening` started."""
        self._closing.set()

    def is_reached(self, step: int) -> bool:
        """Return True if `step` is the agreed step or a later one. Every rank gets the same answer
        for the same step.
        """
        if not self.asked.is_set():
            return False
        if self._client is None:
            return True
        if not self._published:
            self._client.key_value_set(
                f"{self._keys}{jax.process_index()}", str(step), allow_overwrite=True
            )
            self._published = True
        if self._step is None:
            steps = read_json_by_rank(self._client, self._keys)
            if len(steps) == jax.process_count():
                self._step = max(steps.values()) + self._margin_steps
        return self._step is not None and step >= self._step

    def _listen_until_asked(self) -> None:
        """Run a thread that sets `asked` once another rank has published a step."""
        while not self.asked.is_set() and not self._closing.wait(self._poll_s):
            try:
                if read_json_by_rank(self._client, self._keys):
                    self.asked.set()
            except jax.errors.JaxRuntimeError:
                return  # no coordinator, no run: JAX ends this process


class RequestSignal:
    """Context manager that turns SIGUSR2, sent to any rank, into a request that all ranks see
    before the same step.

    The context serves any number of requests; signals that arrive before the ranks have agreed
    count as one. The handler only sets a flag. After the context, SIGUSR2 is ignored. The loop must
    wait for the result of each step.
    """

    NUMBER = signal.SIGUSR2

    def __init__(self, *, poll_s: float = 0.5) -> None:
        self.times = 0  # number of requests served so far
        self.name = self.NUMBER.name
        self._poll_s = poll_s

    def _begin_agreement(self) -> None:
        """Begin to listen for the next request."""
        self._agreed = AgreedStep(f"{ASKED}{self.times}/", steps_in_flight=0, poll_s=self._poll_s)
        self._agreed.start_listening()

    def __enter__(self) -> RequestSignal:
        self._begin_agreement()
        signal.signal(self.NUMBER, lambda *_: self._agreed.asked.set())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        signal.signal(self.NUMBER, signal.SIG_IGN)
        self._agreed.close()

    def is_due(self, step: int) -> bool:
        """Return True, once per request and on all ranks alike, if the request is due before
        `step`.
        """
        if not self._agreed.is_reached(step):
            return False
        self.times += 1
        self._begin_agreement()
        return True


class PreemptionSignal:
    """Context manager that stops all ranks after the same step on SIGTERM, SIGUSR1 (SLURM before a
    time limit), SIGHUP (the terminal is gone) or Ctrl-C.

    The handlers only set a flag, so a second signal does not disturb the save that follows: leave
    the context once the save is done. After a stop was requested, all but SIGINT stay ignored. A
    second Ctrl-C ends the process at once, without a save. steps_in_flight: see `AgreedStep`.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

    def __init__(self, *, steps_in_flight: int = 1, poll_s: float = 0.5) -> None:
        self._agreed = AgreedStep(STOPS, steps_in_flight=steps_in_flight, poll_s=poll_s)
        self._asked = self._agreed.asked
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PreemptionSignal:
        # Python runs signal handlers only once the main thread returns from XLA, but writes to the
        # wakeup file descriptor at once.
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._previous_fd = signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)
        for number in self.SIGNALS:
            # A shell's background job ignores SIGINT, and nohup SIGHUP: they stay ignored.
            stays = number in (signal.SIGINT, signal.SIGHUP)
            if not stays or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, lambda *_: self._asked.set())
        threading.Thread(target=self._announce_signals, name="signals", daemon=True).start()
        self._agreed.start_listening()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._agreed.close()
        for number, previous in self._previous.items():
            after = signal.SIG_DFL if number is signal.SIGINT else signal.SIG_IGN
            signal.signal(number, after if self._asked.is_set() else previous)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._tell)

    def must_stop_after(self, step: int) -> bool:
        """Return True if the run must stop after `step`, which has just finished. Every rank gets
        the same answer for the same step.
        """
        return self._agreed.is_reached(step)

    def _announce_signals(self) -> None:
        """Print a message for each signal as soon as it arrives, even while the main thread is
        inside XLA.
        """
        told: set[int] = set()
        while numbers := os.read(self._heard, 64):
            for number in numbers:
                if number == signal.SIGINT and number in told:
                    print_to_stderr("a second Ctrl-C: ended at once, nothing is saved")
                    os._exit(128 + number)
                if number in self._previous and number not in told:
                    told.add(number)
                    again = "; Ctrl-C once more ends it at once" if number == signal.SIGINT else ""
                    print_to_stderr(
                        f"{signal.Signals(number).name}: the run finishes this step, saves and"
                        f" stops{again}"
                    )
        os.close(self._heard)
