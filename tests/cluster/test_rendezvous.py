"""Ranks that were told different things, or strangers at the port, without JAX: threads stand
for processes.
"""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jmoe.cluster.remote_process import reserve_port
from jmoe.cluster.rendezvous import connect_ranks_to_rank_0

LIMIT_S = 300


@pytest.fixture
def address() -> Iterator[str]:
    with reserve_port() as reserved:
        yield f"127.0.0.1:{reserved.getsockname()[1]}"


def close(met: Future[dict[int, socket.socket]]) -> list[int]:
    """The ranks to which this one has a connection, which is closed."""
    lines = met.result(LIMIT_S)
    for line in lines.values():
        line.close()
    return sorted(lines)


def test_ranks_that_were_told_different_numbers_of_processes(address: str) -> None:
    """As where a node of the job has other settings: the run does not begin with too few."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(connect_ranks_to_rank_0, address, count, rank, LIMIT_S)
            for rank, count in ((0, 3), (1, 2))
        ]
        for rank in ranks:
            with pytest.raises(
                ValueError, match="distributed: rank 1 was told num_processes = 2, rank 0 3"
            ):
                rank.result(LIMIT_S)


def test_strangers_at_the_port_are_no_ranks(address: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(connect_ranks_to_rank_0, address, 3, 0, LIMIT_S)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"jmoe one 3\n", b""):
            while True:
                with contextlib.suppress(ConnectionRefusedError):  # rank 0 does not listen yet
                    with socket.create_connection(
                        ("127.0.0.1", int(address.rpartition(":")[2]))
                    ) as line:
                        line.sendall(words)
                    break
        others = [
            pool.submit(connect_ranks_to_rank_0, address, 3, rank, LIMIT_S) for rank in (1, 2)
        ]
        assert [close(met) for met in (first, *others)] == [[1, 2], [0], [0]]
