"""The order in which waiting sequences run."""

from jmoe.serving.fair_queue import FairQueue


def fill(queue: FairQueue[None], client: str, request: str, count: int) -> None:
    for i in range(count):
        queue.push(f"{client}.{request}.{i}", client, request, None)


def next_of(queue: FairQueue[None], count: int) -> list[str]:
    return [queue.pop()[0] for _ in range(count)]


def test_clients_share_the_places() -> None:
    """The client with the fewest running sequences is next; which came first decides only between equals."""
    queue: FairQueue[None] = FairQueue()
    fill(queue, "a", "1", 60)
    assert next_of(queue, 4) == ["a.1.0", "a.1.1", "a.1.2", "a.1.3"]
    fill(queue, "b", "1", 2)
    assert next_of(queue, 3) == ["b.1.0", "b.1.1", "a.1.4"]
    assert len(queue) == 55 and queue.num_running == 7


def test_requests_of_a_client_share_too() -> None:
    queue: FairQueue[None] = FairQueue()
    fill(queue, "a", "1", 60)
    next_of(queue, 3)
    fill(queue, "a", "2", 1)
    fill(queue, "a", "3", 1)
    assert next_of(queue, 3) == ["a.2.0", "a.3.0", "a.1.3"]


def test_nobody_waits_for_ever() -> None:
    """With one place, a large request and a stream of small ones of other clients take turns."""
    queue: FairQueue[None] = FairQueue()
    fill(queue, "a", "1", 60)
    order = []
    for i in range(6):
        fill(queue, f"b{i}", "1", 1)
        (found,) = next_of(queue, 1)
        order.append(found)
        assert queue.end(found)
    assert [name.startswith("a.") for name in order].count(True) >= 1
    assert order[:2] == ["a.1.0", "b0.1.0"]


def test_what_ended_is_forgotten() -> None:
    queue: FairQueue[None] = FairQueue()
    fill(queue, "a", "1", 3)
    assert next_of(queue, 1) == ["a.1.0"]
    assert not queue.end("a.1.1"), "it waited"
    assert queue.end("a.1.0"), "it ran"
    assert not queue.end("a.1.0") and not queue.end("nothing")
    assert next_of(queue, 1) == ["a.1.2"] and queue.end("a.1.2")
    assert len(queue) == queue.num_running == 0
    assert not any((queue._waiting, queue._entries, queue._clients.since, queue._requests.since))
    assert not queue._clients.running and not queue._requests.running
