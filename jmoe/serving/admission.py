"""Which requests are taken in (else: 429 with Retry-After), and which of those that wait runs
next.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Hashable
from dataclasses import dataclass

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

    @property
    def capacity(self) -> int:
        return self.max_batch + self.max_waiting

    def check_count(self, count: int) -> None:
        """Raise `ApiError` 400 for more sequences than there are places."""
        if count > self.capacity:
            raise ApiError(
                400, f"{count} sequences in one request: at most {self.capacity} run and wait here"
            )

    def refusal(self, unfinished: Collection[Sequence], count: int, token_s: float) -> ApiError:
        """Return the error of `count` sequences for which there is no room: 429, which says when to
        try again.

        token_s: between two tokens of a sequence, of late.
        """
        self.metrics.rejected("queue").inc()
        message = f"{len(unfinished)} sequences run and wait, {self.capacity} can: try again later"
        excess = max(1, min(len(unfinished), len(unfinished) + count - self.capacity))
        seconds = math.ceil(self._tokens_until(unfinished, excess) * token_s)
        headers = {"Retry-After": str(max(1, min(MAX_RETRY_AFTER_S, seconds)))}
        return ApiError(429, message, code="queue_full", headers=headers)

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


Key = tuple[Hashable, ...]  # (client,) or (client, request)


class FairQueue:
    """Waiting sequences in the order in which they should run: fair between clients, and between
    one's requests.

    The next one is of the client with the fewest running ones; of several clients of the one that
    has waited longest since its last turn; of its requests the same. A request of 60 sequences
    therefore never holds up another one for longer than a running sequence takes to end, and goes
    on whatever else comes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, deque[Sequence]] = {}  # by request
        self._running: set[Sequence] = set()
        self._num_running: Counter[Key] = Counter()
        self._since: dict[Key, int] = {}  # when a client or request came or last had its turn
        self._clock = itertools.count()

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        client, request = _keys(sequence)
        self._since.setdefault(client, next(self._clock))
        self._since.setdefault(request, next(self._clock))
        self._waiting.setdefault(request, deque()).append(sequence)

    def pop(self) -> Sequence:
        """Return the next sequence, which runs from now on."""

        def rank(key: Key) -> tuple[int, int]:
            return self._num_running[key], self._since[key]

        client = min({request[:1] for request in self._waiting}, key=rank)
        request = min((request for request in self._waiting if request[:1] == client), key=rank)
        sequence = self._waiting[request][0]
        self._take(sequence)
        self._running.add(sequence)
        self._num_running.update((client, request))
        self._since[client] = self._since[request] = next(self._clock)
        return sequence

    def end(self, sequence: Sequence) -> bool:
        """Forget a sequence that waits or runs; return whether it ran."""
        client, request = _keys(sequence)
        ran = sequence in self._running
        if ran:
            self._running.remove(sequence)
            self._num_running.subtract((client, request))
        elif sequence in self._waiting.get(request, ()):
            self._take(sequence)
        else:
            return False
        waiting = {*self._waiting, *(key[:1] for key in self._waiting)}
        for key in (client, request):  # nothing is kept of those of which nothing waits or runs
            if not self._num_running[key] and key not in waiting:
                del self._num_running[key], self._since[key]
        return ran

    def _take(self, sequence: Sequence) -> None:
        _, request = _keys(sequence)
        self._waiting[request].remove(sequence)
        if not self._waiting[request]:
            del self._waiting[request]


class Turns:
    """At most `places` pieces of work at once, of one client one less: what another one asks for
    begins at once.

    The next one is of the client with the fewest at work; of several of the one that has waited
    longest for a turn.
    """

    def __init__(self, places: int) -> None:
        self._places, self._each = places, max(1, places - 1)
        self._working: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for the client's turn, and have it."""
        begins = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(begins)
        self._begin_next()
        try:
            await begins
            yield
        finally:
            if begins.done() and not begins.cancelled():
                self._working[client] -= 1
                self._working += Counter()  # without those of whom nothing is at work
            self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting and self._working.total() < self._places:
            client = min(self._waiting, key=self._working.__getitem__)
            if self._working[client] >= self._each:
                return
            waiting = self._waiting.pop(client)
            begins = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting  # behind the others
            if not begins.cancelled():
                self._working[client] += 1
                begins.set_result(None)


def _keys(sequence: Sequence) -> tuple[Key, Key]:
    """Return what a sequence's client and its request are known by."""
    return (sequence.client,), (sequence.client, sequence.request)
