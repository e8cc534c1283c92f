"""A ragged all-to-all of processes over TCP, for XLA on CPUs, which has none: exactly the rows that
the collective sends cross between the processes, in one message for each pair.

Legend: R ranks, B blocks per rank, N rows to send, M rows of the output, D elements of a row.
"""

import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import jax


class SocketRows:
    """Connections to all other ranks; `ragged_all_to_all` has the signature of
    `lax.ragged_all_to_all`.

    addresses: of each rank's node. Every rank must make one at the same time. One device a rank.
    """

    def __init__(self, rank: int, addresses: Sequence[str]) -> None:
        from jax.experimental import multihost_utils

        self.rank, self.num_ranks = rank, len(addresses)
        listener = socket.create_server((addresses[rank], 0))
        own = np.asarray([listener.getsockname()[1]], np.int32)
        ports = multihost_utils.process_allgather(own).reshape(-1)
        self.peers: dict[int, socket.socket] = {}
        for peer in range(rank):
            connection = socket.create_connection((addresses[peer], int(ports[peer])), timeout=120)
            connection.sendall(rank.to_bytes(4, "little"))
            self.peers[peer] = connection
        for _ in range(rank + 1, self.num_ranks):
            connection, _ = listener.accept()
            self.peers[int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little")] = (
                connection
            )
        for connection in self.peers.values():
            connection.settimeout(300)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ragged_all_to_all(
        self, operand: "jax.Array", output: "jax.Array", *blocks: "jax.Array", axis_name: Any
    ) -> "jax.Array":
        """Return `output` with the rows written that the other ranks send here."""
        import jax

        del axis_name  # all ranks take part
        shape = jax.ShapeDtypeStruct(output.shape, output.dtype)
        moved: jax.Array = jax.pure_callback(self._exchange_rows, shape, operand, output, *blocks)
        return moved

    def _exchange_rows(self, operand: Any, output: Any, *blocks: Any) -> NDArray[Any]:
        rows_ND, out_MD = np.asarray(operand), np.array(output, copy=True)
        starts_RB, sizes_RB, places_RB, taken_RB = (
            np.asarray(x).reshape(self.num_ranks, -1).astype(np.int32) for x in blocks
        )

        def message(peer: int) -> bytes:
            parts = [
                rows_ND[start : start + size]
                for start, size in zip(starts_RB[peer], sizes_RB[peer], strict=True)
            ]
            header = np.stack([sizes_RB[peer], places_RB[peer]]).tobytes()
            return header + np.concatenate(parts).tobytes()

        def write(received: bytes, expected_B: NDArray[np.int32]) -> None:
            num_blocks = expected_B.size
            sizes_B, places_B = np.frombuffer(received, np.int32, 2 * num_blocks).reshape(2, -1)
            if not np.array_equal(sizes_B, expected_B):
                raise ValueError(f"sizes {sizes_B}: must be {expected_B}, as the receiver says")
            rows = np.frombuffer(received, rows_ND.dtype, offset=8 * num_blocks)
            parts = np.split(rows.reshape(-1, rows_ND.shape[1]), np.cumsum(sizes_B)[:-1])
            for place, part in zip(places_B, parts, strict=True):
                out_MD[place : place + len(part)] = part

        senders = [
            threading.Thread(target=connection.sendall, args=(message(peer),))
            for peer, connection in self.peers.items()
        ]
        for sender in senders:
            sender.start()
        write(message(self.rank), taken_RB[self.rank])
        row_bytes = rows_ND.dtype.itemsize * rows_ND.shape[1]
        for peer, connection in self.peers.items():
            length = 8 * taken_RB.shape[1] + int(taken_RB[peer].sum()) * row_bytes
            write(_receive_bytes(connection, length), taken_RB[peer])
        for sender in senders:
            sender.join()
        return out_MD


def _receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Return the next `length` bytes; raise ConnectionError if the connection ends before."""
    received = bytearray(length)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("a rank has closed its connection")
        view = view[count:]
    return bytes(received)
