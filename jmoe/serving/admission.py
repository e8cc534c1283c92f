"""Which requests are taken in, and which of those that wait runs next: 429 with Retry-After, and turns that are fair."""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from jmoe.inference.sequence import Sequence
from jmoe.serving.errors import ApiError
from jmoe.serving.metrics import Metrics

MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class QueueLimit:
    """At most `max_batch` sequences run and `max_waiting` wait."""

    max_batch: int
    max_waiting: int
    metrics: Metrics

    def check_room(self, unfinished: Collection[Sequence], count: int, token_s: float) -> None:
        """Raise `ApiError` 400 or 429 if `count` more sequences are not taken in; 429 says when to try again.

        token_s: between two tokens of a sequence, of late.
        """
        capacity = self.max_batch + self.max_waiting
        if count > capacity:
            raise ApiError(400, f"{count} sequences in one request: at most {capacity} run and wait here")
        excess = len(unfinished) + count - capacity
        if excess > 0:
            self.metrics.rejected("queue").inc()
            message = f"{len(unfinished)} sequences run and wait, {capacity} can: try again later"
            seconds = math.ceil(self._tokens_until(unfinished, excess) * token_s)
            headers = {"Retry-After": str(max(1, min(MAX_RETRY_AFTER_S, seconds)))}
            raise ApiError(429, message, code="queue_full", headers=headers)

    def _tokens_until(self, unfinished: Collection[Sequence], count: int) -> int:
        """Return the tokens until `count` sequences have ended, if each draws all that it may."""
        left = [s.sampling.max_new_tokens - s.num_delivered_tokens for s in unfinished]
        ends = sorted(left[: self.max_batch])  # in tokens from now
        waiting = deque(left[self.max_batch :])
        for _ in range(count - 1):
            end = heapq.heappop(ends)
            if waiting:
                heapq.heappush(ends, end + waiting.popleft())
        return ends[0]


@dataclass
class _Turns:
    """Which of several keys is next: the one with the fewest running sequences, then the longest without a turn."""

    running: Counter[Hashable] = field(default_factory=Counter)
    since: dict[Hashable, int] = field(default_factory=dict)  # when it came or last had its turn

    def next(self, keys: Iterable[Hashable]) -> Hashable:
        return min(keys, key=lambda key: (self.running[key], self.since[key]))

    def forget_idle(self, key: Hashable, waiting: Collection[Hashable]) -> None:
        """Keep nothing of a key of which nothing waits or runs."""
        if not self.running[key] and key not in waiting:
            del self.running[key], self.since[key]


class FairQueue:
    """Waiting sequences in the order in which they should run: fair between clients, and between one's requests.

    The next one is of the client with the fewest running ones; of several clients of the one that has waited longest
    since its last turn; of its requests the same. A request of 60 sequences therefore never holds up another one for
    longer than a running sequence takes to end, and goes on whatever else comes.
    """

    def __init__(self) -> None:
        self._clients, self._requests = _Turns(), _Turns()
        self._waiting: dict[Hashable, dict[Hashable, deque[Sequence]]] = {}
        self._running: set[Sequence] = set()
        self._clock = itertools.count()

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(len(sequences) for requests in self._waiting.values() for sequences in requests.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._clients.since.setdefault(sequence.client, next(self._clock))
        self._requests.since.setdefault(sequence.request, next(self._clock))
        self._waiting.setdefault(sequence.client, {}).setdefault(sequence.request, deque()).append(sequence)

    def pop(self) -> Sequence:
        """Return the next sequence, which runs from now on."""
        client = self._clients.next(self._waiting)
        request = self._requests.next(self._waiting[client])
        sequence = self._waiting[client][request][0]
        self._clients.since[client] = self._requests.since[request] = next(self._clock)
        self._take(sequence)
        self._running.add(sequence)
        self._clients.running[client] += 1
        self._requests.running[request] += 1
        return sequence

    def end(self, sequence: Sequence) -> bool:
        """Forget a sequence that waits or runs; return whether it ran."""
        ran = sequence in self._running
        if ran:
            self._running.remove(sequence)
            self._clients.running[sequence.client] -= 1
            self._requests.running[sequence.request] -= 1
        elif sequence in self._waiting.get(sequence.client, {}).get(sequence.request, ()):
            self._take(sequence)
        else:
            return False
        self._requests.forget_idle(sequence.request, self._waiting.get(sequence.client, ()))
        self._clients.forget_idle(sequence.client, self._waiting)
        return ran

    def _take(self, sequence: Sequence) -> None:
        requests = self._waiting[sequence.client]
        requests[sequence.request].remove(sequence)
        if not requests[sequence.request]:
            del requests[sequence.request]
        if not requests:
            del self._waiting[sequence.client]
