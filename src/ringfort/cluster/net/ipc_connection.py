"""`IpcConnection`: one end of the socket between a node and its control service."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from ringfort.cluster.net import ipc
from ringfort.transport.handshake import RecordReader, sealed

_log = logging.getLogger(__name__)

_READ: Final = 1 << 16
_MAX_DESCRIPTORS: Final = 64
"""Limit for one read. A message carries at most one, and on Linux a read stops after it; elsewhere it may not."""
_CLOEXEC: Final[int] = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

M = TypeVar("M")


@dataclass(eq=False)
class IpcConnection(Generic[M]):
    """Sends and receives messages in an asyncio loop. A message may be sent together with open sockets."""

    sock: socket.socket
    decode: Callable[[bytes], M]
    on_message: Callable[[M], None]
    on_end: Callable[[], None]
    """Called once, when the other side has closed its end or has sent something malformed."""
    unsent_bytes: int = 0
    """Bytes that the kernel has not taken yet, because the other side does not read."""
    _reader: RecordReader = field(default_factory=lambda: RecordReader(None, ipc.MAX_MESSAGE))
    _descriptors: deque[int] = field(default_factory=deque[int])
    _unsent: deque[tuple[memoryview, Sequence[socket.socket]]] = field(
        default_factory=deque["tuple[memoryview, Sequence[socket.socket]]"]
    )
    """What the kernel has not taken yet, each with the sockets that travel with its first byte."""
    _is_closed: bool = False

    def start(self) -> None:
        """Begin to read, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self.sock.setblocking(False)
        self._loop.add_reader(self.sock, self._read)

    def send(self, message: ipc.ToNode | ipc.ToService, sockets: Sequence[socket.socket] = ()) -> None:
        """Queue a message. `sockets` travel with it and are closed here."""
        if self._is_closed:
            _close(sockets)
            return
        data = sealed(None, ipc.encode(message))
        self._unsent.append((memoryview(data), sockets))
        self.unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self._write()

    def take_socket(self) -> socket.socket:
        """Return the socket that came with the message that was just received."""
        return socket.socket(fileno=self._descriptors.popleft())

    def close(self) -> None:
        """Close the socket and drop what was not sent or taken. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        self._drop_unsent()
        self.sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, _READ, _MAX_DESCRIPTORS, _CLOEXEC)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                self._descriptors.append(descriptor)
            self._reader.feed(data)
            while (body := self._reader.next()) is not None:
                self.on_message(self.decode(body))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        except Exception:
            _log.exception("Malformed message between a node and its control service")
            data = b""
        if not data:
            self._loop.remove_reader(self.sock)
            self.on_end()

    def _write(self) -> None:
        while self._unsent:
            data, sockets = self._unsent[0]
            try:
                if sockets:
                    count = socket.send_fds(self.sock, [data], [sock.fileno() for sock in sockets])
                else:
                    count = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self.sock, self._write)
                return
            except OSError:  # the other side has ended; what it sent before is still read
                self._drop_unsent()
                break
            _close(sockets)
            self.unsent_bytes -= count
            if count < len(data):
                self._unsent[0] = (data[count:], ())
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self.sock)

    def _drop_unsent(self) -> None:
        for _, sockets in self._unsent:
            _close(sockets)
        self._unsent.clear()


def _close(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
