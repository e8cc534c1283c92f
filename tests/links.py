"""Links that remember when they carried something, and links that wait for a test."""

import threading
from collections.abc import Callable, Sequence
from itertools import chain

from jmoe.memory.link import Link


class TracedLink(Link):
    """A link of that bandwidth; moments: (start, end) of every transfer, in seconds."""

    def __init__(self, bandwidth_limit_bytes_per_s: float) -> None:
        super().__init__(bandwidth_limit_bytes_per_s)
        self.moments = list[tuple[float, float]]()
        self._tracing = threading.Lock()

    def finish_transfer(self, start_s: float, num_bytes: int) -> None:
        super().finish_transfer(start_s, num_bytes)
        with self._tracing:
            self.moments.append((start_s, self._clock()))


def most_at_once(links: Sequence[Sequence[tuple[float, float]]]) -> int:
    """The largest number of links that carried something at the same moment.

    links: the `moments` of each.
    """
    return max(
        sum(any(start <= now < end for start, end in link) for link in links)
        for now, _ in chain.from_iterable(links)
    )


class WaitingLink(Link):
    """A link whose transfers end once `wait` has returned; num_ended: transfers so far."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait = wait
        self.num_ended = 0

    def finish_transfer(self, start_s: float, num_bytes: int) -> None:
        self._wait()
        self.num_ended += 1
        super().finish_transfer(start_s, num_bytes)
