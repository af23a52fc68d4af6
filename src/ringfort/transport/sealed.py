"""`SealedStream`: a socket whose bytes are records. Sealed from the caller's memory into one reused buffer, and opened
straight into where the engine wants the bytes: nothing is copied beside what the cipher writes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from ringfort.errors import TamperedError
from ringfort.transport.records import LENGTH, MAX_PLAIN, MAX_RECORD, OVERHEAD, Opener, Sealer

_SPLIT = 4096
"""A frame's header gets a record of its own unless all that goes with it is this small: so the payload's records end
where the payload does, and open right into their place."""


class SealedStream:
    """A `Stream` over records.

    `send` seals once and then reports nothing as taken until the whole record is with the kernel; it must be called
    again with the same bytes first. The outbound half does so: a frame that has begun goes out whole.
    """

    def __init__(self, sock: socket.socket, sealer: Sealer, opener: Opener) -> None:
        self._sock = sock
        self._sealer = sealer
        self._opener = opener
        # np.empty takes no memory until it is written to: most links of a large group carry little.
        self._out = memoryview(np.empty(2 * MAX_RECORD, np.uint8))
        self._out_at = self._out_end = 0
        self._out_plain = 0  # bytes of the caller's that the sealed ones stand for
        self._in = memoryview(np.empty(2 * MAX_RECORD, np.uint8))
        self._in_at = self._in_end = 0
        self._spill = memoryview(b"")  # opened, but there was no room for it

    @property
    def has_pending(self) -> bool:
        """A whole record has been read and waits to be opened: the poller knows nothing of it."""
        return bool(self._spill) or self._record_end() is not None

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        if self._out_at == self._out_end:
            self._seal(tuple(buffers))
        self._out_at += self._sock.send(self._out[self._out_at : self._out_end])
        if self._out_at < self._out_end:
            self._out_at += self._sock.send(self._out[self._out_at : self._out_end])  # raises if nothing goes
            if self._out_at < self._out_end:
                raise BlockingIOError
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
            self._spill = self._spill[count:]
            return count
        end = self._record_end()
        if end is None:
            if not self._fill():
                return 0
            end = self._record_end()
            if end is None:
                raise BlockingIOError
        record = self._in[self._in_at : end]
        count = len(record) - OVERHEAD
        if count <= len(buffer):
            self._opener.open(record, buffer[:count])
        else:
            plain = memoryview(bytearray(count))
            self._opener.open(record, plain)
            taken = len(buffer)
            buffer[:] = plain[:taken]
            self._spill, count = plain[taken:], taken
        self._in_at = end
        if self._in_at == self._in_end:
            self._in_at = self._in_end = 0
        if not count:
            raise TamperedError("a record without content")  # nobody sends one; zero would mean the end
        return count

    def _record_end(self) -> int | None:
        """Where the next record ends, if all of it has been read."""
        have = self._in_end - self._in_at
        if have < LENGTH.size:
            return None
        end = self._in_at + LENGTH.size + self._opener.body_length(self._in[self._in_at : self._in_at + LENGTH.size])
        return end if end <= self._in_end else None

    def _fill(self) -> int:
        if self._in_at and len(self._in) - self._in_at < MAX_RECORD:
            # A record that begins this late may not fit: move what there is of it to the front.
            rest = self._in_end - self._in_at
            self._in[:rest] = bytes(self._in[self._in_at : self._in_end])
            self._in_at, self._in_end = 0, rest
        count = self._sock.recv_into(self._in[self._in_end :])
        self._in_end += count
        return count

    def shut_down(self) -> None:
        with suppress(OSError):  # the peer has gone already
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()
