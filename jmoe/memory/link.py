"""A path that bytes take from one tier to the next: counted, and slowed down where a limit is
set.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jmoe.config import check

# A sleep ends late by up to a millisecond or so. This much lost time may be made up for, so that a
# stream of small transfers still runs at the limit and not below it.
SLACK_S = 0.005


@dataclass(frozen=True)
class LinkStats:
    """The traffic of a link so far; seconds: in which at least one transfer was under way
    (overlapping ones once).
    """

    transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Link:
    """Counts transfers and, with a limit, makes them take as long as a wire of that bandwidth
    would.

    All threads that use a link share its bandwidth: the wire is busy for num_bytes / limit seconds
    per transfer, one after the other, and a transfer ends no earlier than its turn on the wire
    does; the time that the move itself took counts towards it. Over any t seconds at most limit ·
    (t + SLACK_S) bytes plus one transfer pass. `clock` and `sleep` are for tests and for a sleep
    that can be cut short.
    """

    def __init__(
        self,
        bandwidth_limit_bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        limit = bandwidth_limit_bytes_per_s
        check(
            limit is None or limit > 0,
            "bandwidth_limit_bytes_per_s",
            limit,
            "must be greater than 0, or None",
        )
        self._limit_bytes_per_s = limit
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._wire_free_s = float("-inf")
        self._under_way = 0
        self._busy_since_s = 0.0
        self._transfers, self._num_bytes, self._seconds = 0, 0, 0.0

    def start(self) -> float:
        """Begin a transfer; give the time that comes back to `finish`."""
        with self._lock:
            now_s = self._clock()
            if self._under_way == 0:
                self._busy_since_s = now_s
            self._under_way += 1
            return now_s

    def finish(self, start_s: float, num_bytes: int) -> None:
        """End the transfer begun at `start_s`, after the wait that the limit asks for."""
        if self._limit_bytes_per_s is not None:
            with self._lock:
                begin_s = max(self._wire_free_s, start_s - SLACK_S)
                self._wire_free_s = end_s = begin_s + num_bytes / self._limit_bytes_per_s
            wait_s = end_s - self._clock()
            if wait_s > 0:
                self._sleep(wait_s)
        with self._lock:
            self._transfers += 1
            self._num_bytes += num_bytes
            self._end()

    def transfer(self, move: Callable[[], int]) -> int:
        """Run `move`, which moves bytes and returns how many, as one transfer; returns the same
        number.

        One that fails counts no bytes and does not wait.
        """
        start_s = self.start()
        try:
            num_bytes = move()
        except BaseException:
            with self._lock:
                self._end()
            raise
        self.finish(start_s, num_bytes)
        return num_bytes

    def _end(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._seconds += self._clock() - self._busy_since_s

    def stats(self) -> LinkStats:
        with self._lock:
            under_way_s = self._clock() - self._busy_since_s if self._under_way else 0.0
            return LinkStats(self._transfers, self._num_bytes, self._seconds + under_way_s)
