"""Admission of requests (status 429 with Retry-After when the queue is full) and the order in
which waiting work runs.

`engine_loop` uses `QueueLimit` and `FairQueue` for sequences; `service` uses `FairSemaphore` for
text processing off the event loop.
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
    """The engine's capacity: `max_batch` sequences running and `max_waiting` in the queue."""

    max_batch: int
    max_waiting: int
    metrics: Metrics

    @property
    def capacity(self) -> int:
        """Maximum number of sequences that run or wait."""
        return self.max_batch + self.max_waiting

    def check_sequence_count(self, count: int) -> None:
        """Raise `ApiError` 400 if one request asks for more sequences than the total capacity."""
        if count > self.capacity:
            raise ApiError(
                400, f"{count} sequences in one request: at most {self.capacity} run and wait here"
            )

    def queue_full_error(
        self, unfinished: Collection[Sequence], count: int, token_s: float
    ) -> ApiError:
        """Return the 429 error for a request that the full queue rejects, and count the rejection.

        The error's Retry-After header estimates, in seconds (1 to `MAX_RETRY_AFTER_S`), when
        `count` more sequences will fit.

        unfinished: all running and waiting sequences, oldest first.
        token_s: recent mean time between two tokens of one sequence, in seconds.
        """
        self.metrics.rejected("queue").inc()
        message = f"{len(unfinished)} sequences run and wait, {self.capacity} can: try again later"
        excess = max(1, min(len(unfinished), len(unfinished) + count - self.capacity))
        seconds = math.ceil(self._decode_steps_until_ended(unfinished, excess) * token_s)
        headers = {"Retry-After": str(max(1, min(MAX_RETRY_AFTER_S, seconds)))}
        return ApiError(429, message, code="queue_full", headers=headers)

    def _decode_steps_until_ended(self, unfinished: Collection[Sequence], count: int) -> int:
        """Return how many decode steps it takes until `count` sequences have ended.

        The estimate assumes that every sequence draws its `max_new_tokens`.
        """
        left = [s.sampling.max_new_tokens - s.num_delivered_tokens for s in unfinished]
        ends = sorted(left[: self.max_batch])  # decoding steps from now
        waiting = deque(left[self.max_batch :])
        for _ in range(count - 1):
            end = heapq.heappop(ends)
            if waiting:
                heapq.heappush(ends, end + waiting.popleft())
        return ends[0]


Key = tuple[Hashable, ...]  # (client,) or (client, request)


class FairQueue:
    """Waiting sequences, scheduled by priority, and fairly between clients and between the requests
    of one client.

    `start_next` takes sequences of the lowest `priority` first. Among these it picks the client
    with the fewest running sequences; ties go to the client whose last start is longest ago. Within
    the client, the same rule picks the request; within the request, sequences run in order of
    arrival. A request of 60 sequences therefore delays another request of its priority by at most
    the time until one running sequence ends, and itself never starves.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, deque[Sequence]] = {}  # by request
        self._running: set[Sequence] = set()
        self._num_running: Counter[Key] = Counter()
        self._since: dict[Key, int] = {}  # clock of the key's arrival or last start
        self._clock = itertools.count()

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return sum(map(len, self._waiting.values()))

    @property
    def lowest_waiting_priority(self) -> int:
        """The lowest priority of a waiting sequence. The queue must not be empty."""
        return min(sequences[0].priority for sequences in self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting ones."""
        client, request = _client_and_request_keys(sequence)
        self._since.setdefault(client, next(self._clock))
        self._since.setdefault(request, next(self._clock))
        self._waiting.setdefault(request, deque()).append(sequence)

    def start_next(self) -> Sequence:
        """Take the next sequence out of the waiting ones, count it as running, and return it.

        The queue must not be empty.
        """

        def running_then_oldest(key: Key) -> tuple[int, int]:
            return self._num_running[key], self._since[key]

        first = self.lowest_waiting_priority
        requests = [key for key, queue in self._waiting.items() if queue[0].priority == first]
        client = min({request[:1] for request in requests}, key=running_then_oldest)
        request = min((key for key in requests if key[:1] == client), key=running_then_oldest)
        sequence = self._waiting[request][0]
        self._remove_waiting(sequence)
        self._running.add(sequence)
        self._num_running.update((client, request))
        self._since[client] = self._since[request] = next(self._clock)
        return sequence

    def remove_and_tell_if_running(self, sequence: Sequence) -> bool:
        """Remove a waiting or running sequence; return whether it was running.

        An unknown sequence is ignored.
        """
        client, request = _client_and_request_keys(sequence)
        ran = sequence in self._running
        if ran:
            self._running.remove(sequence)
            self._num_running.subtract((client, request))
        elif sequence in self._waiting.get(request, ()):
            self._remove_waiting(sequence)
        else:
            return False
        waiting = {*self._waiting, *(key[:1] for key in self._waiting)}
        for key in (client, request):  # drop keys without sequences
            if not self._num_running[key] and key not in waiting:
                del self._num_running[key], self._since[key]
        return ran

    def _remove_waiting(self, sequence: Sequence) -> None:
        """Remove a sequence from the waiting ones of its request."""
        _, request = _client_and_request_keys(sequence)
        self._waiting[request].remove(sequence)
        if not self._waiting[request]:
            del self._waiting[request]


class FairSemaphore:
    """An asyncio semaphore with `places` permits that is fair between clients.

    One client holds at most `places - 1` permits (at least 1), so that another client's first
    piece of work usually starts without waiting. A free permit goes to the waiting client that
    holds the fewest permits; ties go to the client whose arrival or last permit is longest ago.
    """

    def __init__(self, places: int) -> None:
        self._places, self._each = places, max(1, places - 1)
        self._working: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def hold_permit(self, client: Hashable) -> AsyncIterator[None]:
        """Hold one permit inside the `async with` block; wait on entry until one is free."""
        begins = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(begins)
        self._grant_permits()
        try:
            await begins
            yield
        finally:
            if begins.done() and not begins.cancelled():
                self._working[client] -= 1
                self._working += Counter()  # drops zero counts
            self._grant_permits()

    def _grant_permits(self) -> None:
        """Give the free permits to waiting clients, those with the fewest permits first."""
        while self._waiting and self._working.total() < self._places:
            client = min(self._waiting, key=self._working.__getitem__)
            if self._working[client] >= self._each:
                return
            waiting = self._waiting.pop(client)
            begins = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting  # moves to the end of the order
            if not begins.cancelled():
                self._working[client] += 1
                begins.set_result(None)


def _client_and_request_keys(sequence: Sequence) -> tuple[Key, Key]:
    """Return the client key and the request key of a sequence."""
    return (sequence.client,), (sequence.client, sequence.request)
