"""Messages between two processes over one connection: JSON with numpy arrays in it, and a sign of
life every second.

Nothing is unpickled: a message can only be data. As in JAX's own coordination service, who reaches
the coordinator's port when a run starts can take part in it.
"""

import contextlib
import json
import math
import select
import socket
import struct
import threading
from typing import Any

import numpy as np

_HEADER = struct.Struct("!II")  # bytes of JSON, bytes of arrays
GRACE_S = 2.0  # in which one that is alive shows it
_ARRAY = "array"  # an array's place in the JSON: {"array": [dtype, shape]}


class Channel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        """silence_s: `receive` gives up when the other end has sent nothing for so long."""
        self._socket, self._lock = connection, threading.Lock()
        connection.settimeout(silence_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *message: Any) -> None:
        """Send values that JSON has, and numpy arrays; tuples arrive as lists. `OSError` if
        nobody takes them.
        """
        data = encode(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> list[Any] | None:
        """Return the next message, or None at the end.

        `TimeoutError` after `silence_s`, `OSError` if the connection broke.
        """
        header = self._read(_HEADER.size)
        if header is None:
            return None
        text_bytes, arrays_bytes = _HEADER.unpack(header)
        data = self._read(text_bytes + arrays_bytes)
        return None if data is None else decode(data, text_bytes)

    def close(self) -> None:
        """End the connection: the other side receives None."""
        with self._lock:
            with contextlib.suppress(OSError):  # the other side was first
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self._receive(num_bytes - len(data))
            except ConnectionResetError:  # its end came before it had read everything
                return None
            if not piece:
                return None
            data += piece
        return data

    def _receive(self, most_bytes: int) -> bytes:
        """Return what has come; after the time of silence again, in case both ends were
        suspended for it.
        """
        try:
            return self._socket.recv(most_bytes)
        except TimeoutError:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * min(GRACE_S, self._socket.gettimeout() or 0.0)):
                raise
            return self._socket.recv(most_bytes)


def encode(message: Any) -> bytes:
    """Return a message as bytes."""
    arrays: list[np.ndarray] = []

    def place(value: Any) -> dict[str, Any]:
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"a {type(value).__name__} cannot be sent to another process")
        arrays.append(np.asarray(value))
        return {_ARRAY: [arrays[-1].dtype.str, arrays[-1].shape]}

    text = json.dumps(message, default=place).encode()
    data = b"".join(array.tobytes() for array in arrays)
    return _HEADER.pack(len(text), len(data)) + text + data


def decode(data: bytes | bytearray, text_bytes: int) -> list[Any]:
    """Return the message of which `encode` made these bytes, without their header."""
    at = text_bytes

    def array(value: dict[str, Any]) -> Any:
        nonlocal at
        if value.keys() != {_ARRAY}:
            return value
        dtype, shape = np.dtype(value[_ARRAY][0]), value[_ARRAY][1]
        begin, at = at, at + math.prod(shape) * dtype.itemsize
        return np.frombuffer(data[begin:at], dtype).reshape(shape)

    message: list[Any] = json.loads(data[:text_bytes], object_hook=array)
    return message
