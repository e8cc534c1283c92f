"""The order in which waiting sequences run."""

from jmoe.inference.sequence import Sequence
from jmoe.serving.admission import FairQueue


def fill(
    queue: FairQueue, client: str, request: str, count: int, priority: int = 0
) -> list[Sequence]:
    name = f"{client}.{request}"
    sequences = [
        Sequence([1], client=client, request=name, index=i, priority=priority) for i in range(count)
    ]
    for sequence in sequences:
        queue.push(sequence)
    return sequences


def next_of(queue: FairQueue, count: int) -> list[str]:
    return [f"{s.request}.{s.index}" for s in (queue.start_next() for _ in range(count))]


def test_clients_share_the_places() -> None:
    """The client with the fewest running sequences is next; which came first decides only
    between equals.
    """
    queue: FairQueue = FairQueue()
    fill(queue, "a", "1", 60)
    assert next_of(queue, 4) == ["a.1.0", "a.1.1", "a.1.2", "a.1.3"]
    fill(queue, "b", "1", 2)
    assert next_of(queue, 3) == ["b.1.0", "b.1.1", "a.1.4"]
    assert len(queue) == 55 and len(queue._running) == 7


def test_requests_of_a_client_share_too() -> None:
    queue: FairQueue = FairQueue()
    fill(queue, "a", "1", 60)
    next_of(queue, 3)
    fill(queue, "a", "2", 1)
    fill(queue, "a", "3", 1)
    assert next_of(queue, 3) == ["a.2.0", "a.3.0", "a.1.3"]


def test_lower_priorities_come_first() -> None:
    """Clients, and a client's requests, take turns among equals."""
    queue: FairQueue = FairQueue()
    fill(queue, "a", "1", 3)
    assert next_of(queue, 2) == ["a.1.0", "a.1.1"]
    fill(queue, "b", "1", 1, priority=5)
    fill(queue, "a", "2", 2, priority=-1)
    fill(queue, "b", "2", 2, priority=-1)
    assert next_of(queue, 4) == ["b.2.0", "b.2.1", "a.2.0", "a.2.1"]
    assert next_of(queue, 2) == ["a.1.2", "b.1.0"]


def test_nobody_waits_for_ever() -> None:
    """With one place, a large request and a stream of small ones of other clients take turns."""
    queue: FairQueue = FairQueue()
    fill(queue, "a", "1", 60)
    order = []
    for i in range(6):
        fill(queue, f"b{i}", "1", 1)
        sequence = queue.start_next()
        order.append(sequence.request)
        assert queue.remove_and_tell_if_running(sequence)
    assert [name == "a.1" for name in order].count(True) >= 1
    assert order[:2] == ["a.1", "b0.1"]


def test_what_ended_is_forgotten() -> None:
    queue: FairQueue = FairQueue()
    first, second, third = fill(queue, "a", "1", 3)
    assert queue.start_next() is first
    assert not queue.remove_and_tell_if_running(second), "it waited"
    assert queue.remove_and_tell_if_running(first), "it ran"
    assert not queue.remove_and_tell_if_running(first) and not queue.remove_and_tell_if_running(
        Sequence([1])
    )
    assert queue.start_next() is third and queue.remove_and_tell_if_running(third)
    assert len(queue) == len(queue._running) == 0
    assert not any((queue._waiting, queue._running, queue._since, queue._num_running))
