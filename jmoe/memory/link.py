"""Measures the traffic of a path between two tiers, and can limit its bandwidth."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jmoe.config import check

# A sleep overshoots by about a millisecond. A link may make up for this much lost time, so that a
# stream of small transfers reaches the limit.
SLACK_S = 0.005


@dataclass(frozen=True)
class LinkStats:
    """A link's traffic since the start.

    seconds: time during which at least one transfer was under way; overlapping transfers count
    once.
    """

    transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Link:
    """Counts transfers and, if a limit is set, delays them like a wire of that bandwidth.

    All threads that use a link share its bandwidth. Each transfer occupies the wire for num_bytes /
    limit seconds, one after the other, and ends no earlier than its time on the wire; the time of
    the actual copy counts towards it. So in any t seconds at most limit * (t + SLACK_S) bytes plus
    one transfer pass.

    bandwidth_limit_bytes_per_s: None means no delay. clock, sleep: replaceable for tests, and for a
    sleep that can be interrupted.
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

    def start_transfer(self) -> float:
        """Begin a transfer; return its start time, which `finish_transfer` takes."""
        with self._lock:
            now_s = self._clock()
            if self._under_way == 0:
                self._busy_since_s = now_s
            self._under_way += 1
            return now_s

    def finish_transfer(self, start_s: float, num_bytes: int) -> None:
        """End the transfer that began at `start_s`, after the delay that the limit demands."""
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
            self._end_transfer()

    def run_transfer(self, move: Callable[[], int]) -> int:
        """Run `move` as one transfer; return the number of bytes it returns.

        A transfer that raises counts no bytes and is not delayed.
        """
        start_s = self.start_transfer()
        try:
            num_bytes = move()
        except BaseException:
            with self._lock:
                self._end_transfer()
            raise
        self.finish_transfer(start_s, num_bytes)
        return num_bytes

    def _end_transfer(self) -> None:
        self._under_way -= 1
        if self._under_way == 0:
            self._seconds += self._clock() - self._busy_since_s

    def stats(self) -> LinkStats:
        with self._lock:
            under_way_s = self._clock() - self._busy_since_s if self._under_way else 0.0
            return LinkStats(self._transfers, self._num_bytes, self._seconds + under_way_s)
