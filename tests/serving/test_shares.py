"""Who makes room for whom."""

import pytest

from jmoe.serving.shares import Shares, client_of_address


def shares_of(limit: int, **held: int) -> Shares[str]:
    """Shares with one item of 1 for each that a client holds: a0, a1, ... of a."""
    shares: Shares[str] = Shares(limit)
    for client, amount in held.items():
        for number in range(amount):
            shares.add(f"{client}{number}", client, 1)
    return shares


def test_a_client_may_take_all_that_nobody_else_wants() -> None:
    shares = shares_of(10, a=9)
    assert shares.items_to_evict("a", 1, []) == []
    shares.add("a9", "a", 1)
    assert shares.items_to_evict("a", 1, []) is None
    assert shares.items_to_evict("b", 1, []) is None, "nothing may go"
    assert shares.amount_of_client("a") == 10 and shares.amount_of_client("b") == 0


def test_the_client_with_the_most_makes_room() -> None:
    shares = shares_of(10, a=6, b=4)
    assert shares.items_to_evict("c", 2, ["b0", "a3", "a1", "b1"]) == ["a3", "a1"]
    assert shares.items_to_evict("c", 3, ["b0", "a3", "a1", "b1"]) == ["a3", "a1", "b0"]
    assert shares.items_to_evict("c", 4, ["b0", "a3", "a1", "b1"]) is None, (
        "it would hold as much as b"
    )
    assert shares.items_to_evict("b", 1, ["a0", "b0"]) == ["a0"]
    assert shares.items_to_evict("b", 3, ["a0", "a1", "a2"]) is None, "it would hold more than a"
    assert shares.items_to_evict("a", 1, ["b0"]) is None


def test_its_own_items_make_room_where_they_may() -> None:
    shares = shares_of(10, a=6, b=4)
    assert shares.items_to_evict("a", 2, ["b0", "a0", "a1"]) == ["a0", "a1"]
    assert shares.items_to_evict("b", 1, ["b0", "a0"]) == ["a0"]


def test_even_shares() -> None:
    shares = shares_of(2, a=1, b=1)
    assert shares.items_to_evict("c", 1, ["b0", "a0"]) is None
    assert shares.items_to_evict("c", 1, ["b0", "a0"], even=True) == ["b0"]


def test_what_holds_nothing_is_forgotten() -> None:
    shares = shares_of(3, a=2)
    shares.add("a0", "a", 4)
    shares.add("a0", "a", -5)
    shares.remove("a1")
    shares.remove("a1")
    assert shares.amount_of_client("a") == 0 and not shares._items and not shares._held


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("", ""),
    ],
)
def test_clients_by_address(address: str, client: str) -> None:
    assert client_of_address(address) == client
