"""`Middle`: somebody on the way between two ranks who records all that passes and may change it, record by record."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from ringfort.config import format_address, parse_address
from ringfort.identity.noise import MESSAGE_1_BYTES, MESSAGE_2_BYTES
from ringfort.transport.handshake import PREAMBLE
from ringfort.transport.records import LENGTH, MAX_RECORD

INWARD, OUTWARD = 0, 1
"""From the one who connects to the one who listens, and back."""

_BEFORE_LENGTHS = {INWARD: PREAMBLE.size + MESSAGE_1_BYTES, OUTWARD: PREAMBLE.size + MESSAGE_2_BYTES}
"""Bytes of a direction before what has lengths: message 3 and the records."""

Edit = Callable[[bytes], list[tuple[int, bytes]]]
"""What to send in place of a record: in which direction, and which bytes."""


class Middle:
    """Stands before `target`: who connects to `address` is connected to it. A context manager."""

    def __init__(self, target: str) -> None:
        self._target = parse_address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname()[:2])
        self.heard: dict[int, bytearray] = {INWARD: bytearray(), OUTWARD: bytearray()}
        """All that was sent, as its senders sent it."""
        self.edits: dict[int, list[Edit]] = {INWARD: [], OUTWARD: []}
        """For the next records of a direction, one each."""
        self._sockets: list[socket.socket] = []
        self._locks = {INWARD: threading.Lock(), OUTWARD: threading.Lock()}
        self._threads = [threading.Thread(target=self._serve, name="middle", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Middle:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes an accept on Linux
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def cut(self) -> None:
        """Ends every connection."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        """One connection: a group of two has no more, unless an attempt failed."""
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(outer)
            try:
                inner = socket.create_connection(self._target, timeout=10)
            except OSError:  # nobody listens there yet; the caller tries again
                outer.close()
                continue
            inner.settimeout(None)
            self._sockets.append(inner)
            # To whom the bytes of a direction go.
            ends = {INWARD: inner, OUTWARD: outer}
            for direction, source in ((INWARD, outer), (OUTWARD, inner)):
                thread = threading.Thread(target=self._pump, args=(direction, source, ends), name="middle", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, direction: int, source: socket.socket, ends: dict[int, socket.socket]) -> None:
        # Whatever ends here, by the other side or by us, ends the way for both.
        with suppress(OSError, EOFError):
            start = self._read(source, _BEFORE_LENGTHS[direction], direction)
            self._send(ends, direction, start)
            while True:
                head = self._read(source, LENGTH.size, direction)
                (length,) = LENGTH.unpack(head)
                assert length <= MAX_RECORD, "out of step"
                record = head + self._read(source, length, direction)
                edits = self.edits[direction]
                for where, data in edits.pop(0)(record) if edits else [(direction, record)]:
                    self._send(ends, where, data)
        with suppress(OSError):
            ends[direction].shutdown(socket.SHUT_WR)

    def _read(self, source: socket.socket, count: int, direction: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = source.recv(min(count - len(found), 1 << 18))
            if not piece:
                raise EOFError
            self.heard[direction] += piece
            found += piece
        return bytes(found)

    def _send(self, ends: dict[int, socket.socket], direction: int, data: bytes) -> None:
        with self._locks[direction]:
            ends[direction].sendall(data)


class SlowMiddle(Middle):
    """A long way: each message in which the listening side answers a handshake waits until `hold` returns."""

    def __init__(self, target: str, hold: Callable[[], None]) -> None:
        self._hold = hold
        super().__init__(target)

    def _send(self, ends: dict[int, socket.socket], direction: int, data: bytes) -> None:
        if direction == OUTWARD and len(data) == _BEFORE_LENGTHS[OUTWARD]:
            self._hold()
        super()._send(ends, direction, data)


def flip(direction: int) -> list[Edit]:
    """Changes one bit of the next record."""
    return [lambda record: [(direction, record[:-1] + bytes([record[-1] ^ 1]))]]


def drop(direction: int) -> list[Edit]:
    """Withholds the next record."""
    return [lambda record: []]


def repeat(direction: int) -> list[Edit]:
    """Sends the next record twice."""
    return [lambda record: [(direction, record), (direction, record)]]


def reorder(direction: int) -> list[Edit]:
    """Exchanges the next two records."""
    held: list[bytes] = []

    def hold(record: bytes) -> list[tuple[int, bytes]]:
        held.append(record)
        return []

    return [hold, lambda record: [(direction, record), (direction, held[0])]]


def reflect(direction: int) -> list[Edit]:
    """Sends the next record back to its sender too."""
    return [lambda record: [(1 - direction, record), (direction, record)]]


def cut_short(direction: int) -> list[Edit]:
    """Takes the last byte off the next record and mends its length."""
    return [lambda record: [(direction, LENGTH.pack(len(record) - LENGTH.size - 1) + record[LENGTH.size : -1])]]


ATTACKS = {
    "flip": flip,
    "drop": drop,
    "repeat": repeat,
    "reorder": reorder,
    "reflect": reflect,
    "cut short": cut_short,
}
