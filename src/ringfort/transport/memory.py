"""Streams inside one process: bounded pipes of bytes that can fail as sockets do, and a poller with any clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ringfort.config import KIB
from ringfort.transport.locks import Condition
from ringfort.transport.messages import CHUNK
from ringfort.transport.stream import Ready, WatchedPoller, ready_streams

_CAPACITY = 512 * KIB
"""Bytes a pipe holds: like a socket's buffer, small enough that back-pressure is met in tests."""


class Clock(Protocol):
    """Time as a memory poller sees it."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...

    def wait(self, condition: threading.Condition, deadline: float) -> None:
        """Sleep on `condition`, which is held, until it is notified or `now()` reaches `deadline`."""
        ...


class RealClock:
    """The computer's clock."""

    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, deadline: float) -> None:
        condition.wait(max(0.0, min(deadline - time.monotonic(), 3600.0)))  # a lock cannot wait for months


class Pipe:
    """One direction. `wake_reader` and `wake_writer` wake the two ends."""

    def __init__(self, wake_reader: Callable[[], None], wake_writer: Callable[[], None]) -> None:
        self._lock = threading.RLock()  # a finaliser may end the pipe in a thread that is moving bytes
        self._data = bytearray()
        self._is_ended = False
        self._is_cut = False
        self._wake_reader = wake_reader
        self._wake_writer = wake_writer

    def write(self, *buffers: memoryview) -> int:
        """Take what fits. Raises as a socket does."""
        with self._lock:
            if self._is_ended:
                raise BrokenPipeError("the other end is closed")
            before = len(self._data)
            if before == _CAPACITY:
                raise BlockingIOError
            for data in buffers:
                self._data += data[: _CAPACITY - len(self._data)]
            count = len(self._data) - before
        self._wake_reader()
        return count

    def read(self, buffer: memoryview) -> int:
        """Give what is there. Raises as a socket does."""
        with self._lock:
            if not self.is_readable:
                raise BlockingIOError
            count = min(len(self._data), len(buffer))
            with memoryview(self._data) as data:
                buffer[:count] = data[:count]
            del self._data[:count]
        self._wake_writer()
        return count

    def end(self) -> None:
        """End the pipe: no more bytes will come."""
        with self._lock:
            self._is_ended = True
        self._wake_reader()
        self._wake_writer()

    def abandon(self) -> None:
        """Drop what is in the pipe and make writing fail: nobody reads any more."""
        with self._lock:
            self._is_ended = True
            self._data.clear()
        self.end()

    def cut(self, *, is_cut: bool = True) -> None:
        """Hold back the bytes without telling anybody, as a cable does that was pulled; or let them pass again."""
        with self._lock:
            self._is_cut = is_cut
        self._wake_reader()

    @property
    def is_readable(self) -> bool:
        with self._lock:
            return not self._is_cut and (bool(self._data) or self._is_ended)

    @property
    def is_writable(self) -> bool:
        with self._lock:
            return self._is_ended or len(self._data) < _CAPACITY


class MemoryStream:
    """Two pipes, seen from one end: a `Stream`."""

    has_pending = False
    chunk = CHUNK

    def __init__(self, incoming: Pipe, outgoing: Pipe) -> None:
        self.incoming = incoming
        self.outgoing = outgoing

    def recv_into(self, buffer: memoryview, /) -> int:
        return self.incoming.read(buffer)

    def send(self, data: memoryview, /) -> int:
        return self.outgoing.write(data)

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        return self.outgoing.write(*buffers)

    @property
    def is_readable(self) -> bool:
        return self.incoming.is_readable

    @property
    def is_writable(self) -> bool:
        return self.outgoing.is_writable

    def shut_down(self) -> None:
        self.outgoing.end()

    def close(self) -> None:
        self.outgoing.end()
        self.incoming.abandon()


class MemoryPoller(WatchedPoller):
    """Sleeps on memory streams."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._condition = Condition()
        self._has_moved = False
        self._woken = False
        self.streams: dict[int, MemoryStream] = {}
        self.now = clock.now

    def notify(self) -> None:
        """Wake the waiter: a pipe has moved."""
        with self._condition:
            self._has_moved = True
            self._condition.notify_all()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self.notify()

    close = wake

    def wait(self, deadline: float) -> list[Ready]:
        while True:
            with self._condition:
                woken, self._woken, self._has_moved = self._woken, False, False
            ready = ready_streams(self._watched, self.streams)
            if ready or woken or self._clock.now() >= deadline:
                return ready
            with self._condition:
                if not self._has_moved:  # else a pipe moved after it was looked at
                    self._clock.wait(self._condition, deadline)
