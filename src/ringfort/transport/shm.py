"""`ShmStream`: a `Stream` through memory that two processes share; `LocalPoller`: sleeps on such and on sockets.

Each direction is a ring of bytes with one writer and one reader: the writer counts what it has **written**, the reader
what it has **read**, each on a cache line of its own. The socket over which the two met stays: its end says that the
peer is gone, and a byte on it wakes a peer that has set a flag in the memory to say that it sleeps.

That works where one processor sees the writes of another in their order, as on x86. Elsewhere the counters always go
over the socket, because the kernel orders memory between a send and its receive. Then each side has counters of its
own, and nobody looks at those in the memory.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from ringfort.config import DEFAULT_PATIENCE, KIB
from ringfort.transport.messages import CHUNK
from ringfort.transport.segment import Segment
from ringfort.transport.socket_streams import SocketEnd, SocketPoller
from ringfort.transport.stream import Ready, ready_streams

RING = 1024 * KIB
"""Bytes a direction, a power of two: four reads' worth, so that writer and reader seldom wait for each other."""
_MASK = RING - 1
_WORDS = 16
"""8-byte words between what different sides write: two cache lines, for processors fetch them in pairs."""
_WRITTEN, _READ, _READER_SLEEPS, _WRITER_SLEEPS = (line * _WORDS for line in range(4))
_HEAD = 4 * _WORDS * 8

_TELL = Struct("<Q")
_TELL_READ = 1 << 63
"""Marks a counter told over the socket as one of bytes read."""
STREAM_BYTES = 2 * (_HEAD + RING)
"""Bytes of a segment for the two rings of a stream."""


class _Ring(NamedTuple):
    """One direction."""

    words: memoryview
    data: memoryview


class ShmStream(SocketEnd):
    """A `Stream` to a process of this machine. Data stay inside the machine, in memory that only this user can open:
    they are not sealed."""

    has_pending = False
    chunk = CHUNK

    def __init__(self, sock: socket.socket, segment: Segment, *, is_first: bool, is_ordered: bool) -> None:
        """`is_first` at one side and not at the other; `is_ordered` the same at both."""
        halves = segment.memory[: STREAM_BYTES // 2], segment.memory[STREAM_BYTES // 2 : STREAM_BYTES]
        heads = [half[:_HEAD] if is_ordered else memoryview(bytearray(_HEAD)) for half in halves]
        rings = [_Ring(head.cast("Q"), half[_HEAD:]) for head, half in zip(heads, halves, strict=True)]
        super().__init__(sock)
        self._segment = segment
        self._out, self._in = rings if is_first else reversed(rings)
        self._is_told = not is_ordered
        self._fence = threading.Lock()
        self._sent = 0  # bytes written to the ring, ever
        self._taken = 0  # bytes read from the other, ever
        self._heard = b""  # the beginning of a counter that has not come whole
        self.owed = b""  # counters that the socket would not take yet
        self.is_over = False
        """The peer has ended its side; what is in the ring can still be read."""

    # --- moving ---------------------------------------------------------------------------------------------------

    def recv_into(self, buffer: memoryview, /) -> int:
        have = self._in.words[_WRITTEN] - self._taken
        if not have:
            if self._is_told:
                self.listen()
                have = self._in.words[_WRITTEN] - self._taken
            if not have:
                if self.is_over:
                    return 0
                raise BlockingIOError
        at = self._taken & _MASK
        count = min(have, len(buffer), RING - at)
        buffer[:count] = self._in.data[at : at + count]
        self._taken += count
        self._publish(self._in, _READ, self._taken, _WRITER_SLEEPS)
        return count

    def send(self, data: memoryview, /) -> int:
        return self.sendmsg((data,))

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        if self.is_over:
            raise BrokenPipeError(32, "the peer has closed")
        room = RING - (self._sent - self._out.words[_READ])
        if not room and self._is_told:
            self.listen()
            room = RING - (self._sent - self._out.words[_READ])
        if not room:
            raise BlockingIOError
        total = 0
        for data in buffers:
            done = 0
            while room and done < len(data):
                at = self._sent & _MASK
                count = min(room, len(data) - done, RING - at)
                self._out.data[at : at + count] = data[done : done + count]
                done += count
                room -= count
                self._sent += count
            total += done
            if not room:
                break
        self._publish(self._out, _WRITTEN, self._sent, _READER_SLEEPS)
        return total

    def close(self) -> None:
        super().close()
        self.is_over = True
        for ring in (self._in, self._out):
            ring.words.release()
            ring.data.release()
        self._segment.close()

    # --- counters -------------------------------------------------------------------------------------------------

    def _publish(self, ring: _Ring, counter: int, value: int, sleeper: int) -> None:
        if self._is_told:
            self.owed += _TELL.pack(value | (_TELL_READ if counter == _READ else 0))
            self.flush()
            return
        ring.words[counter] = value
        # A full barrier, as a lock's instructions are: a peer that falls asleep sees the counter, or we see its flag.
        with self._fence:
            pass
        if ring.words[sleeper]:
            with suppress(OSError):  # full: enough wake-ups are on their way; gone: the poller finds out
                self._sock.send(b"\0")

    def flush(self) -> None:
        """Send what the socket would not take before."""
        if self.owed:
            with suppress(OSError):
                self.owed = self.owed[self._sock.send(self.owed) :]

    def listen(self) -> None:
        """Take what has come over the socket: wake-ups, counters, the end."""
        while not self.is_over:
            try:
                data = self._sock.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.is_over = True
            elif self._is_told:
                self._hear(self._heard + data)
            if len(data) < 4096:
                return

    def _hear(self, said: bytes) -> None:
        whole = len(said) - len(said) % _TELL.size
        for (value,) in _TELL.iter_unpack(said[:whole]):
            if value & _TELL_READ:
                self._out.words[_READ] = value ^ _TELL_READ
            else:
                self._in.words[_WRITTEN] = value
        self._heard = said[whole:]

    # --- sleeping -------------------------------------------------------------------------------------------------

    def sleep(self, *, read: bool, write: bool) -> None:
        """Ask the peer for a wake-up when there is something to read, or room to write."""
        if not self._is_told:
            self._in.words[_READER_SLEEPS] = read
            self._out.words[_WRITER_SLEEPS] = write
            with self._fence:
                pass

    @property
    def is_readable(self) -> bool:
        return self.is_over or self._in.words[_WRITTEN] > self._taken

    @property
    def is_writable(self) -> bool:
        return self.is_over or self._sent - self._out.words[_READ] < RING


class LocalPoller(SocketPoller):
    """Sleeps on sockets, some of which only carry wake-ups for streams through memory."""

    def __init__(
        self, sockets: dict[int, socket.socket], local: dict[int, ShmStream], patience: float = DEFAULT_PATIENCE
    ) -> None:
        super().__init__(sockets, patience)
        self._local = local
        self._wants: dict[int, tuple[bool, bool]] = {}

    def watch(self, peer: int, *, read: bool, write: bool) -> None:
        if peer in self._local:
            self._wants[peer] = (read, write)
        else:
            super().watch(peer, read=read, write=write)

    def forget(self, peer: int) -> None:
        self._wants.pop(peer, None)
        super().forget(peer)

    def wait(self, deadline: float) -> list[Ready]:
        for peer, (read, write) in self._wants.items():
            stream = self._local[peer]
            stream.flush()
            stream.sleep(read=read, write=write)
            if stream.is_over:
                super().forget(peer)  # its end would be told for ever
            else:
                self._poll.register(self._files[peer][0], select.POLLIN | (select.POLLOUT if stream.owed else 0))
        found = super().wait(0.0 if self._ready() else deadline)
        for ready in found:
            if ready.peer in self._local:
                self._local[ready.peer].listen()
        for peer in self._wants:
            self._local[peer].sleep(read=False, write=False)
        return [ready for ready in found if ready.peer not in self._local] + self._ready()

    def _ready(self) -> list[Ready]:
        # An end is told even to those who do not want to read.
        wants = {peer: (read or self._local[peer].is_over, write) for peer, (read, write) in self._wants.items()}
        return ready_streams(wants, self._local)
