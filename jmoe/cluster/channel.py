"""Messages between two processes over one socket: JSON that may contain numpy arrays.

The serving engine's leader and followers use a `Channel`. Messages are data only: nothing is
unpickled. As in JAX's own coordination service, any client that reaches the coordinator's port
while a run starts can take part in the run.
"""

import contextlib
import json
import math
import select
import socket
import struct
import threading

import numpy as np

from jmoe.types import Json, JsonObject

_HEADER = struct.Struct("!II")  # bytes of JSON, bytes of arrays
GRACE_S = 2.0  # wait after a timeout for a sender that is alive
_ARRAY = "array"  # an array's place in the JSON: {"array": [dtype, shape]}


class Channel:
    """One end of a connection. Any thread may send; only one thread may receive."""

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        """silence_s: seconds without data after which `receive` raises `TimeoutError`."""
        self._socket, self._lock = connection, threading.Lock()
        connection.settimeout(silence_s)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *message: Json) -> None:
        """Send one message of JSON values and numpy arrays; tuples arrive as lists. Raises
        `OSError` if the connection is closed.
        """
        data = encode_message(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> list[Json] | None:
        """Return the next message, or None once the other end has closed the connection.

        Raises `TimeoutError` after `silence_s` seconds without data, and `OSError` if the
        connection broke.
        """
        header = self._read_exactly(_HEADER.size)
        if header is None:
            return None
        json_num_bytes, arrays_bytes = _HEADER.unpack(header)
        data = self._read_exactly(json_num_bytes + arrays_bytes)
        return None if data is None else decode_message(data, json_num_bytes)

    def close(self) -> None:
        """Close the connection; `receive` returns None at the other end."""
        with self._lock:
            with contextlib.suppress(OSError):  # the other end closed first
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _read_exactly(self, num_bytes: int) -> bytearray | None:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self._receive_some(num_bytes - len(data))
            except ConnectionResetError:  # the other end closed before it had read everything
                return None
            if not piece:
                return None
            data += piece
        return data

    def _receive_some(self, most_bytes: int) -> bytes:
        """Return the bytes that have arrived, at most `most_bytes`.

        After a timeout, wait `GRACE_S` once more: both hosts may have been suspended.
        """
        try:
            return self._socket.recv(most_bytes)
        except TimeoutError:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * min(GRACE_S, self._socket.gettimeout() or 0.0)):
                raise
            return self._socket.recv(most_bytes)


def encode_message(message: Json) -> bytes:
    """Return a message as bytes: header, JSON, then the arrays' contents. Raises `TypeError` for a
    value that is neither JSON nor a numpy array.
    """
    arrays: list[np.ndarray] = []

    def set_array_apart(value: object) -> JsonObject:
        if not isinstance(value, np.ndarray | np.generic):
            raise TypeError(f"a {type(value).__name__} cannot be sent to another process")
        arrays.append(np.asarray(value))
        return {_ARRAY: [arrays[-1].dtype.str, arrays[-1].shape]}

    text = json.dumps(message, default=set_array_apart).encode()
    data = b"".join(array.tobytes() for array in arrays)
    return _HEADER.pack(len(text), len(data)) + text + data


def decode_message(data: bytes | bytearray, json_num_bytes: int) -> list[Json]:
    """Return the message that `encode_message` wrote. data: bytes without the header;
    json_num_bytes: length of the JSON.
    """
    at = json_num_bytes

    def restore_array(value: JsonObject) -> Json:
        nonlocal at
        if value.keys() != {_ARRAY}:
            return value
        dtype, shape = np.dtype(value[_ARRAY][0]), value[_ARRAY][1]
        begin, at = at, at + math.prod(shape) * dtype.itemsize
        return np.frombuffer(data[begin:at], dtype).reshape(shape)

    message: list[Json] = json.loads(data[:json_num_bytes], object_hook=restore_array)
    return message
