"""`IpcConnection`: the control service's end of the socket to its node. Sends messages, with open sockets if need
be."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from ringfort.cluster.net import ipc

_READ: Final = 1 << 16


class IpcConnection:
    """Lives in the control loop. `start` it there."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[ipc.ToService], None], on_end: Callable[[], None]
    ) -> None:
        """`on_end` is called when the node has closed its end."""
        self.unsent_bytes = 0
        """Bytes that the node has not read yet."""
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._frames = ipc.Frames()
        self._unsent: deque[tuple[memoryview, Sequence[socket.socket]]] = deque()
        """What the kernel has not taken yet, each with the sockets that travel with its first byte."""
        self._is_closed = False

    def start(self) -> None:
        """Begin to read."""
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._read)

    def send(self, message: ipc.ToNode, sockets: Sequence[socket.socket] = ()) -> None:
        """Queue a message. `sockets` travel with it and are closed here."""
        if self._is_closed:
            _close(sockets)
            return
        data = ipc.frame(message)
        self._unsent.append((memoryview(data), sockets))
        self.unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._write()

    def close(self) -> None:
        """Close the socket and drop what was not sent."""
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._drop_unsent()
        self._sock.close()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock)
            self._on_end()
        for body in self._frames.feed(data):
            self._on_message(ipc.decode_for_service(body))

    def _write(self) -> None:
        while self._unsent:
            data, sockets = self._unsent[0]
            try:
                if sockets:
                    count = socket.send_fds(self._sock, [data], [sock.fileno() for sock in sockets])
                else:
                    count = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._write)
                return
            except OSError:  # the node does not read any more; the reader will notice
                self._drop_unsent()
                break
            _close(sockets)
            self.unsent_bytes -= count
            if count < len(data):
                self._unsent[0] = (data[count:], ())
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _drop_unsent(self) -> None:
        for _, sockets in self._unsent:
            _close(sockets)
        self._unsent.clear()


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
