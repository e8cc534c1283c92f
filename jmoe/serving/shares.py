"""Fair division of a limited resource among clients: queue places, bytes of request bodies,
connections.

Used by `engine_loop` (sequences and unsent output), `middleware` (request bodies) and `connection`
(open connections).
"""

import ipaddress
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
NETWORK_BITS = 64  # IPv6 prefix of one host's network


class Shares(Generic[Item]):
    """The amount of a limited resource that each item (a request, a body, a connection) and each
    client holds.

    A client may hold everything that nobody else asks for. At the limit, `items_to_evict` chooses
    items of the largest holder for eviction, in favour of a client that holds less.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.total = limit, 0
        self._held: Counter[Hashable] = Counter()  # by client
        self._items: dict[Item, tuple[Hashable, int]] = {}

    def add(self, item: Item, client: Hashable, amount: int) -> None:
        """Add `amount`, which may be negative, to the usage of `item` and of its `client`.

        The limit is not checked: call `items_to_evict` first. An item whose usage reaches 0 is
        removed.
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
        """Set the amount of `item` to 0. An unknown item is ignored."""
        if item in self._items:
            client, amount = self._items[item]
            self.add(item, client, -amount)

    def amount_of_client(self, client: Hashable) -> int:
        """Return the total amount of all items of `client`."""
        return self._held[client]

    def amount_of_item(self, item: Item) -> int:
        """Return the amount that `item` holds, 0 if the item is unknown."""
        return self._items[item][1] if item in self._items else 0

    def items_to_evict(
        self, client: Hashable, amount: int, candidates: Iterable[Item], *, even: bool = False
    ) -> list[Item] | None:
        """Return the items to evict so that `client` can use `amount` more within the limit.

        The list is empty if nothing has to go; None if the limit cannot be kept. Nothing is
        changed: the caller evicts the items and then calls `add`.

        candidates: the items that may be evicted; of one client the earlier ones are evicted first.
        even: also evict items of a client that uses exactly as much as `client` would use
            afterwards; by default another client must use more. If `client` itself would use most,
            its own candidates are evicted.
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


def client_of_address(address: str) -> str:
    """Return the client identity for a request without an API key: the address; for IPv6, its /64
    network.

    A text that is no IP address is returned unchanged.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4 or ip.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((ip, NETWORK_BITS), strict=False))
