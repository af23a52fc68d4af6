"""`SealedStream`: a socket whose bytes are records. Sealed from the caller's memory into one reused buffer, and opened
straight into where the engine wants the bytes: nothing is copied beside what the cipher writes."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import numpy as np

from ringfort.errors import TamperedError
from ringfort.transport.frames import HEADER_BYTES
from ringfort.transport.records import LENGTH, MAX_OVERHEAD, MAX_PLAIN, MAX_RECORD, Opener, Sealer
from ringfort.transport.tcp import SocketEnd

_SPLIT = 4096
"""A frame's header gets a record of its own unless all that goes with it is this small: so the payload's records end
where the payload does, and open right into their place."""
_PEEK = HEADER_BYTES + MAX_OVERHEAD + LENGTH.size
"""Bytes read beyond a record: the next frame's header and the length of what follows it, to save a system call."""


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
