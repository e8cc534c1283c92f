"""Which of the waiting sequences runs next: fair between clients, and between the requests of one client."""

import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from jmoe.inference.sequence import Sequence


@dataclass
class _Turns:
    """The keys that have something waiting, each with when it came or last had its turn."""

    running: Counter[Hashable] = field(default_factory=Counter)
    since: dict[Hashable, int] = field(default_factory=dict)

    def next(self, keys: Iterable[Hashable]) -> Hashable:
        return min(keys, key=lambda key: (self.running[key], self.since[key]))


class FairQueue:
    """Waiting sequences in the order in which they should run.

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
        self._forget(sequence.client, sequence.request)
        return ran

    def _take(self, sequence: Sequence) -> None:
        requests = self._waiting[sequence.client]
        requests[sequence.request].remove(sequence)
        if not requests[sequence.request]:
            del requests[sequence.request]
        if not requests:
            del self._waiting[sequence.client]

    def _forget(self, client: Hashable, request: Hashable) -> None:
        """Keep nothing of clients and requests of which nothing waits or runs."""
        if not self._clients.running[client] and client not in self._waiting:
            del self._clients.running[client], self._clients.since[client]
        if not self._requests.running[request] and request not in self._waiting.get(client, {}):
            del self._requests.running[request], self._requests.since[request]
