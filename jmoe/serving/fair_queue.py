"""Which of the waiting sequences runs next: fair between clients, and between the requests of one client."""

import itertools
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    id: str
    client: Hashable
    request: Hashable
    item: T


@dataclass
class _Turns:
    """The keys that have something waiting, each with when it came or last had its turn."""

    running: Counter[Hashable] = field(default_factory=Counter)
    since: dict[Hashable, int] = field(default_factory=dict)

    def next(self, keys: Iterable[Hashable]) -> Hashable:
        return min(keys, key=lambda key: (self.running[key], self.since[key]))


class FairQueue(Generic[T]):
    """Waiting items in the order in which they should run.

    The next one is of the client with the fewest running items; of several clients of the one that has waited longest
    since its last turn; of its requests the same. A request of 60 sequences therefore never holds up another one for
    longer than a running sequence takes to end, and goes on whatever else comes.
    """

    def __init__(self) -> None:
        self._clients, self._requests = _Turns(), _Turns()
        self._waiting: dict[Hashable, dict[Hashable, deque[str]]] = {}
        self._entries: dict[str, _Entry[T]] = {}  # waiting
        self._running: dict[str, _Entry[T]] = {}
        self._clock = itertools.count()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._entries)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def push(self, id_: str, client: Hashable, request: Hashable, item: T) -> None:
        """Let an item wait. client, request: whose it is."""
        requests = self._waiting.setdefault(client, {})
        self._clients.since.setdefault(client, next(self._clock))
        self._requests.since.setdefault(request, next(self._clock))
        requests.setdefault(request, deque()).append(id_)
        self._entries[id_] = _Entry(id_, client, request, item)

    def pop(self) -> tuple[str, T]:
        """The next item, which runs from now on."""
        client = self._clients.next(self._waiting)
        request = self._requests.next(self._waiting[client])
        entry = self._entries[self._waiting[client][request][0]]
        self._clients.since[client] = self._requests.since[request] = next(self._clock)
        self._take(entry)
        self._running[entry.id] = entry
        self._clients.running[client] += 1
        self._requests.running[request] += 1
        return entry.id, entry.item

    def end(self, id_: str) -> bool:
        """Forget an item that waits or runs; whether it ran."""
        if (entry := self._entries.get(id_)) is not None:
            self._take(entry)
            self._forget(entry)
            return False
        if (entry := self._running.pop(id_, None)) is None:
            return False
        self._clients.running[entry.client] -= 1
        self._requests.running[entry.request] -= 1
        self._forget(entry)
        return True

    def _take(self, entry: _Entry[T]) -> None:
        del self._entries[entry.id]
        requests = self._waiting[entry.client]
        requests[entry.request].remove(entry.id)
        if not requests[entry.request]:
            del requests[entry.request]
        if not requests:
            del self._waiting[entry.client]

    def _forget(self, entry: _Entry[T]) -> None:
        """Keep nothing of clients and requests of which nothing waits or runs."""
        if not self._clients.running[entry.client] and entry.client not in self._waiting:
            del self._clients.running[entry.client], self._clients.since[entry.client]
        if not self._requests.running[entry.request] and entry.request not in self._waiting.get(entry.client, {}):
            del self._requests.running[entry.request], self._requests.since[entry.request]
