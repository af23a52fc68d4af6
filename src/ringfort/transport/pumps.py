"""`Pumps`: a `Stream` over an engine of others whose calls only block. A thread for each direction carries the bytes
between those calls and a stream through memory."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

from ringfort.transport.locks import Event, Thread
from ringfort.transport.memory import MemoryStream, Pipe
from ringfort.transport.messages import CHUNK

_COUNT = Struct("<Q")
PACKET = _COUNT.size + CHUNK
"""Bytes of the largest packet: how many follow, and they. An engine may not tell how long a message was."""


_WATCH = 1.0
"""Seconds that a thread sleeps before it looks again, should an interrupt have lost what was to wake it."""


Carry = Callable[[memoryview], object]
"""Moves a packet to or from one peer; one that comes has at most the size of the memory. Blocks, and raises anything
when the connection is gone."""


class Pumps:
    """Two threads and the stream that they feed. `notify` tells the poller of the stream that it can move."""

    def __init__(self, name: str, send: Carry, recv: Carry, notify: Callable[[], None]) -> None:
        self._carry_out, self._carry_in = send, recv
        self._to_send, self._has_room = Event(), Event()
        self._outgoing = Pipe(wake_reader=self._to_send.set, wake_writer=notify)
        self._incoming = Pipe(wake_reader=notify, wake_writer=self._has_room.set)
        self.stream = MemoryStream(incoming=self._incoming, outgoing=self._outgoing)
        self._threads = [
            Thread(work, name=f"{name}-{what}") for work, what in ((self._send, "out"), (self._receive, "in"))
        ]
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float, *, sent: bool = False) -> bool:
        """Wait for the threads to end, or with `sent` for the one that sends. Return whether they have ended."""
        threads = self._threads[:1] if sent else self._threads
        for thread in threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in threads)

    def _send(self) -> None:
        packet = memoryview(bytearray(PACKET))
        body = packet[_COUNT.size :]
        try:
            while True:
                self._to_send.clear()
                try:
                    count = self._outgoing.read(body)
                except BlockingIOError:
                    self._to_send.wait(_WATCH)
                    continue
                _COUNT.pack_into(packet, 0, count)
                self._carry_out(packet[: _COUNT.size + count])
                if not count:
                    return  # the end, which the other side was just told
        except Exception:
            self._outgoing.abandon()  # the next write finds the connection broken
            self._incoming.end()

    def _receive(self) -> None:
        packet = memoryview(bytearray(PACKET))
        try:
            while True:
                self._carry_in(packet)
                (count,) = _COUNT.unpack_from(packet)
                if not 0 < count <= CHUNK:
                    break
                data = packet[_COUNT.size : _COUNT.size + count]
                while data:
                    self._has_room.clear()
                    try:
                        data = data[self._incoming.write(data) :]
                    except BlockingIOError:
                        self._has_room.wait(_WATCH)
        except Exception:
            pass  # what broke the connection is told as its end
        self._incoming.end()
