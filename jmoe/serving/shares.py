"""Who holds how much of what all clients have together: places in the queue, bytes of bodies,
connections.
"""

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
NETWORK_BITS = 64  # of an IPv6 address: one host has all the others to itself


class Shares(Generic[Item]):
    """Amounts that clients hold by items, up to a limit for all together.

    A client may take all that nobody else wants. Once the limit is reached, the client that holds
    the most gives up items for one that holds less.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: Counter[Hashable] = Counter()  # by client
        self._items: dict[Item, tuple[Hashable, int]] = {}

    def add(self, item: Item, client: Hashable, amount: int) -> None:
        """Let an item of a client hold so much more, or less; one that holds nothing is
        forgotten.
        """
        _, before = self._items.get(item, (client, 0))
        self._items[item] = client, before + amount
        self._held[client] += amount
        self.total += amount
        if not self._items[item][1]:
            del self._items[item]
        if not self._held[client]:
            del self._held[client]

    def remove(self, item: Item) -> None:
        """Let an item hold nothing."""
        if item in self._items:
            client, amount = self._items[item]
            self.add(item, client, -amount)

    def held(self, client: Hashable) -> int:
        """Return how much a client holds."""
        return self._held[client]

    def amount(self, item: Item) -> int:
        """Return how much an item holds."""
        return self._items[item][1] if item in self._items else 0

    def make_room(
        self, client: Hashable, amount: int, candidates: Iterable[Item], *, even: bool = False
    ) -> list[Item] | None:
        """Return the items that have to go so that a client may hold so much more; None if it may
        not.

        candidates: items that may go, the first ones first. Those of other clients go while they
        hold more than this one would, or as much if `even`. Its own go too, where it is the one
        that holds the most.
        """
        held = self._held.copy()
        held[client] += amount
        by_client: dict[Hashable, list[Item]] = {}
        for item in candidates:
            by_client.setdefault(self._items[item][0], []).append(item)
        going: list[Item] = []
        while held.total() > self.limit:
            largest = max(
                (c for c in by_client if by_client[c]), key=held.__getitem__, default=client
            )
            if not by_client.get(largest) or held[largest] < held[client] + (
                largest != client and not even
            ):
                return None
            going.append(item := by_client[largest].pop(0))
            held[largest] -= self._items[item][1]
        return going


def client_at(address: str) -> str:
    """Return what a client without a key is known by: its address, or the network of an IPv6
    address.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((ip, NETWORK_BITS), strict=False))
