"""How a notebook and its ranks talk: values in frames, over a pair of sockets that the rank inherits.

A frame is a length of 8 bytes and a value in msgpack (collectives/objects.py). Nothing is pickled, and no other process
holds an end: the source that a rank runs can come only from the process that started it.
"""

from __future__ import annotations

import socket
from typing import Any

from ringfort.collectives import objects

LENGTH_BYTES = 8
READ_BYTES = 1 << 20
"""More does not make a large array faster."""


def send(connection: socket.socket, data: bytes) -> None:
    """Send a value that `objects.encode` has made. Raises `OSError`."""
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "little"))
    connection.sendall(data)


class Frames:
    """The frames that arrive at one end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._data = bytearray()

    def read(self) -> Any:
        """Wait for the next value. Raises `EOFError` if the other end is gone."""
        while True:
            for value in self.arrived():
                return value

    def arrived(self) -> list[Any]:
        """Wait for bytes, and return the value that they complete, if any: each side sends one and waits for the other.

        Raises `EOFError` if the other end is gone.
        """
        try:
            data = self.connection.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._data += data
        end = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "little")
        if len(self._data) < max(end, LENGTH_BYTES):
            return []
        value, self._data = objects.decode(memoryview(self._data)[LENGTH_BYTES:end]), self._data[end:]
        return [value]
