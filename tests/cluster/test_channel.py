"""Messages between two processes."""

import socket
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.cluster.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    a, b = (Channel(connection, silence_s=120) for connection in socket.socketpair())
    yield a, b
    a.close()
    b.close()


def test_a_message_arrives_as_it_was_sent(ends: tuple[Channel, Channel]) -> None:
    """Arrays of every kind and shape; tuples become lists, and a numpy number an array."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 1000, (3, 4), np.int32),
        rng.normal(size=(2, 3, 1)).astype(np.float32).transpose(2, 0, 1),
        np.zeros((0, 5), np.int64),
        np.array(True),
    ]
    sent = (
        "call",
        "forward",
        [(arrays[0], arrays[1]), arrays[2:]],
        {"row": np.int32(7), "words": "日本 \n"},
        None,
        0.5,
    )
    ends[0].send(*sent)
    ends[0].send("beat", 1)
    kind, name, groups, options, nothing, half = ends[1].receive() or []
    assert (kind, name, nothing, half) == ("call", "forward", None, 0.5)
    assert options["row"] == 7 and options["words"] == "日本 \n"
    found = [array for group in groups for array in group]
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert ends[1].receive() == ["beat", 1]


def test_only_data_can_be_sent(ends: tuple[Channel, Channel]) -> None:
    """What lies on a device would be another array in the other process."""
    for value in (jnp.zeros(2), object(), {1, 2}):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            ends[0].send(value)
    ends[0].send("whole")
    assert ends[1].receive() == ["whole"], "nothing of what was refused"


def test_the_end_is_noticed(ends: tuple[Channel, Channel]) -> None:
    """After what was sent before, also in the middle of a message."""
    ends[0].send("last")
    ends[0].close()
    assert ends[1].receive() == ["last"]
    assert ends[1].receive() is None
    raw, other = socket.socketpair()
    cut = Channel(other, silence_s=120)
    raw.sendall(b"\0\0\0\x05\0\0\0\0[1")
    raw.close()
    assert cut.receive() is None
    cut.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        reset = Channel(server.accept()[0], silence_s=120)
    reset.send("not read")
    raw.close()
    assert reset.receive() is None
    reset.close()


def test_silence_is_noticed() -> None:
    raw, other = socket.socketpair()
    channel = Channel(other, silence_s=0.05)
    raw.sendall(b"\0\0")
    with pytest.raises(TimeoutError):
        channel.receive()
    channel.close()
    raw.close()


def test_threads_may_send_at_once(ends: tuple[Channel, Channel]) -> None:
    data = np.arange(5000)

    def send(number: int) -> None:
        for _ in range(20):
            ends[0].send(number, data + number)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(80):
        number, found = ends[1].receive() or []
        np.testing.assert_array_equal(found, data + number)
    for thread in threads:
        thread.join()
