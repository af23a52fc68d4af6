"""Streams over sockets, plain and sealed, and pollers that sleep on them."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from ringfort.config import DEFAULT_PATIENCE, MIB
from ringfort.errors import TamperedError
from ringfort.transport.forks import keep_from_children
from ringfort.transport.frames import HEADER_BYTES
from ringfort.transport.records import LENGTH, MAX_OVERHEAD, MAX_PLAIN, MAX_RECORD, Opener, Sealer
from ringfort.transport.stream import Ready
from ringfort.transport.tcp import HANG_UP, LONGEST_SLEEP, LOOKS, keep_alive, silence

_READABLE = select.POLLIN | select.POLLERR | select.POLLHUP | HANG_UP
"""An error or a hang-up shows when it is read: that is where it gets its name."""
_SPLIT = 4096
"""A frame's header gets a record of its own unless all that goes with it is this small: so the payload's records end
where the payload does, and open right into their place."""
_PEEK = HEADER_BYTES + MAX_OVERHEAD + LENGTH.size
"""Bytes read beyond a record: the next frame's header and the length of what follows it, to save a system call."""


class SocketEnd:
    """How a `Stream` over a socket ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def shut_down(self) -> None:
        with suppress(OSError):  # the peer has gone already
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()


class SocketStream(SocketEnd):
    """A socket as a `Stream`."""

    has_pending = False
    chunk = MIB
    """As much as a record of an encrypted one. Every read costs its call and the Python around it: with 256 KiB, which
    would stay in a smaller cache, 16 and 64 MiB of 2 ranks took 1.5 and 1.4 times as long (1 MiB of L2 a core)."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.recv_into = sock.recv_into
        self.send = sock.send

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        return self._sock.sendmsg(buffers)


class SealedStream(SocketEnd):
    """A `Stream` over records.

    `send` seals once and then reports nothing as taken until the whole record is with the kernel; it must be called
    again with the same bytes first. The outbound half does so: a frame that has begun goes out whole.
    """

    chunk = MAX_PLAIN

    def __init__(self, sock: socket.socket, sealer: Sealer, opener: Opener) -> None:
        super().__init__(sock)
        self._sealer = sealer
        self._opener = opener
        # np.empty takes no memory until it is written to: most links of a large group carry little.
        self._out = memoryview(np.empty(MAX_RECORD + _SPLIT, np.uint8))
        self._out_at: int = 0
        self._out_end: int = 0
        self._out_plain: int = 0  # bytes of the caller's that the sealed ones stand for
        self._in = memoryview(np.empty(MAX_RECORD + 2 * _SPLIT, np.uint8))
        self._in_at: int = 0
        self._in_end: int = 0
        self._record_end: int = 0  # where the record at _in_at ends, if all of it has been read; else 0
        self._lacks: int = 0  # bytes that the record at _in_at lacks, if its length is known; else 0
        self._spill = memoryview(b"")  # opened, but there was no room for it
        self.has_pending = False
        """A whole record has been read and waits to be opened: the poller does not know of it."""
        self.is_sending = False
        """A record has been sealed and is not with the kernel yet, or not all of it."""

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        if not self.is_sending:
            self._seal(tuple(buffers))
            self.is_sending = True
        count = self.push()
        if not count:
            raise BlockingIOError
        return count

    def push(self) -> int:
        """Continue to send the current record. Return what `sendmsg` returns once the kernel has all of it, and 0
        before."""
        self._out_at += self._sock.send(self._out[self._out_at : self._out_end])
        if self._out_at < self._out_end:
            return 0
        self.is_sending = False
        return self._out_plain

    def _seal(self, buffers: tuple[memoryview, ...]) -> None:
        self._out_at = self._out_end = self._out_plain = 0
        if sum(map(len, buffers)) <= _SPLIT:
            buffers = (memoryview(b"".join(buffers)),)
        for data in buffers:
            piece = data[:MAX_PLAIN]
            self._out_end += self._sealer.seal(piece, self._out[self._out_end :])
            self._out_plain += len(piece)

    def recv_into(self, buffer: memoryview, /) -> int:
        if self._spill:
            count = min(len(buffer), len(self._spill))
            buffer[:count] = self._spill[:count]
            self._spill = self._spill[count:] or memoryview(b"")  # the last of it is not kept for long
            self.has_pending = bool(self._spill) or self._record_end > 0
            return count
        if not self.pull():
            raise BlockingIOError
        end = self._record_end
        if not end:
            return 0
        record = self._in[self._in_at : end]
        count = len(record) - self._opener.overhead
        if count <= len(buffer):
            self._opener.open(record, buffer[:count])
        else:
            plain = memoryview(bytearray(count))
            self._opener.open(record, plain)
            taken = len(buffer)
            buffer[:] = plain[:taken]
            self._spill, count = plain[taken:], taken
        self._in_at = end
        self._look()
        if not count:
            raise TamperedError("a record is empty")  # nobody sends one; zero would mean the end
        return count

    def _look(self) -> None:
        """Find out whether a whole record is there."""
        at, have = self._in_at, self._in_end - self._in_at
        self._record_end = self._lacks = 0
        if have >= LENGTH.size:
            end = at + LENGTH.size + self._opener.body_length(self._in, at)
            if end <= self._in_end:
                self._record_end = end
            else:
                self._lacks = end - self._in_end
        elif not have:
            self._in_at = self._in_end = 0
        self.has_pending = self._record_end > 0 or bool(self._spill)

    def pull(self) -> bool:
        """Read what the kernel has. Return whether there is something to receive then: a whole record, or the end.
        Raises as `recv_into`."""
        if self.has_pending:
            return True
        if len(self._in) - self._in_at < MAX_RECORD + _PEEK:
            # A record that begins this late may not fit: move what there is of it to the front. It is never much.
            rest = self._in_end - self._in_at
            self._in[:rest] = self._in[self._in_at : self._in_end]
            self._in_at, self._in_end = 0, rest
        end, lacks = self._in_end, self._lacks
        # To the end of a record that has begun, and a little of what follows.
        count = self._sock.recv_into(self._in[end : end + (lacks + _PEEK if lacks else _SPLIT)])
        if not count:
            return True
        self._in_end = end + count
        if count < lacks:
            self._lacks = lacks - count
            return False
        self._look()
        return self.has_pending


class FilePoller:
    """Sleeps on files with poll(2)."""

    now = staticmethod(time.monotonic)

    def __init__(self, files: Mapping[int, tuple[int, int]]) -> None:
        """`files` has for each peer the descriptors to read from and to write to, which may be the same."""
        self._files = files
        self._peers = {fd: peer for peer, fds in files.items() for fd in fds}
        self._poll = select.poll()
        self._wake_in, self._wake_out = socket.socketpair()
        for sock in (self._wake_in, self._wake_out):
            keep_from_children(sock).setblocking(False)
        self._wake_fd = self._wake_out.fileno()
        self._poll.register(self._wake_fd, select.POLLIN)

    def watch(self, peer: int, *, read: bool, write: bool) -> None:
        reader, writer = self._files[peer]
        wanted = select.POLLOUT if write else 0
        if reader != writer:
            self._poll.register(writer, wanted)
            wanted = 0
        self._poll.register(reader, (select.POLLIN if read else 0) | wanted | HANG_UP)

    def forget(self, peer: int) -> None:
        for fd in set(self._files[peer]):
            with suppress(KeyError):  # it was never watched
                self._poll.unregister(fd)

    def silent(self) -> list[tuple[int, float]]:
        return []

    def wait(self, deadline: float) -> list[Ready]:
        left = max(0.0, min(deadline - time.monotonic(), LONGEST_SLEEP))
        found: list[Ready] = []
        for fd, event in self._poll.poll(left * 1000):
            if fd == self._wake_fd:
                self._drain()
            else:
                found.append(Ready(self._peers[fd], bool(event & _READABLE), bool(event & select.POLLOUT)))
        return found

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def wake(self) -> None:
        with suppress(OSError):  # full: a wake-up is on its way already; or closed: nobody sleeps
            self._wake_in.send(b"\0")

    def close(self) -> None:
        self._wake_in.close()
        self._wake_out.close()


class SocketPoller(FilePoller):
    """Sleeps on sockets, and notices machines that have gone silent."""

    def __init__(self, sockets: dict[int, socket.socket], patience: float = DEFAULT_PATIENCE) -> None:
        """`patience` is how many seconds a machine may leave what it was sent unanswered."""
        super().__init__({peer: (sock.fileno(), sock.fileno()) for peer, sock in sockets.items()})
        self._sockets = sockets
        self._patience = patience
        self._look_at = time.monotonic()
        for sock in sockets.values():
            keep_alive(sock, patience)

    def wait(self, deadline: float) -> list[Ready]:
        return super().wait(min(deadline, time.monotonic() + self._patience / LOOKS))

    def silent(self) -> list[tuple[int, float]]:
        now = time.monotonic()
        if now < self._look_at:
            return []
        self._look_at = now + self._patience / LOOKS
        found = [(peer, silence(sock)) for peer, sock in self._sockets.items()]
        return [(peer, seconds) for peer, seconds in found if seconds >= self._patience]
