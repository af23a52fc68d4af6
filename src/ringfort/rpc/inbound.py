"""The incoming half of a link: bytes in, messages out. Pure: it says where the next bytes should go.

Large buffers are read straight into the memory that becomes the array. What a peer claims never sizes an allocation
alone: a message is first admitted, and then gets memory buffer by buffer as its bytes arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ringfort.config import KIB
from ringfort.errors import ProtocolError
from ringfort.rpc.protocol import (
    CHUNK,
    COUNT,
    FIRST,
    HEADER,
    MAX_BUFFERS,
    MAX_REFERENCES,
    OF_RESPONSE,
    REFERENCE,
    SIZE,
    Count,
    Kind,
    Message,
    Reference,
    unpack_count,
)

_SCRATCH = 64 * KIB
"""Bytes to read at once while no large buffer is being filled."""
_MESSAGES = frozenset({Kind.REQUEST, Kind.RESPONSE, Kind.ERROR})
_KINDS = {int(kind): kind for kind in Kind}


class Head(NamedTuple):
    """What the first frame of a message says about it."""

    kind: Kind
    call: int
    size: int
    references: tuple[Reference, ...]


class Cancelled(NamedTuple):
    """The caller gave a call up; no more of its request comes."""

    call: int


Event = Message | Count | Cancelled | Kind
"""What can arrive. Of the kinds only GOODBYE is an event."""
Admit = Callable[[Head], bool]
"""Called once for every message that begins. Returns whether to keep it; otherwise its bytes are read and dropped."""


class _Arriving:
    """A message of which a part has arrived."""

    __slots__ = ("buffers", "filled", "head", "kept", "left", "sizes")

    def __init__(self, head: Head, sizes: Sequence[int], kept: bool) -> None:
        self.head = head
        self.sizes = sizes
        self.kept = kept
        self.buffers: list[memoryview] = []
        self.filled: int = 0  # bytes in the last of `buffers`
        self.left = head.size

    def place(self, most: int) -> memoryview:
        """Where to put the next bytes, at most `most`."""
        buffers = self.buffers
        while not buffers or self.filled == len(buffers[-1]):
            self._add_buffer()
        return buffers[-1][self.filled : self.filled + most]

    def _add_buffer(self) -> None:
        # np.empty, because the kernel provides its pages only when they are written.
        self.buffers.append(memoryview(np.empty(self.sizes[len(self.buffers)], np.uint8)))
        self.filled = 0

    def finish(self) -> Message:
        while len(self.buffers) < len(self.sizes):  # only empty buffers can be left
            self._add_buffer()
        return Message(self.head.kind, self.head.call, self.buffers, self.head.references)


class Inbound:
    """The incoming half of a link."""

    def __init__(self, admit: Admit) -> None:
        self.events: list[Event] = []
        """What has arrived; whoever takes it empties the list."""
        self._admit = admit
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._start: int = 0  # of the bytes in the scratch that have not been parsed
        self._end: int = 0
        self._arriving: dict[tuple[bool, int], _Arriving] = {}
        self._into: _Arriving | None = None  # the message whose frame is being read
        self._frame_left: int = 0  # bytes of that frame's payload that have not arrived

    @property
    def arriving(self) -> int:
        """How many messages have arrived in part."""
        return len(self._arriving)

    def want(self) -> memoryview:
        """Where to put the next bytes."""
        if self._frame_left:
            into = self._into
            assert into is not None
            return into.place(self._frame_left) if into.kept else self._scratch[: self._frame_left]
        if self._start:
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._scratch[self._end :]

    def took(self, count: int) -> None:
        """Report that `count` bytes were put where `want` said. Raises `ProtocolError` if they are invalid."""
        if self._frame_left:
            self._advance(count)
            return
        self._end += count
        while self._parse():
            pass

    def _advance(self, count: int) -> None:
        """`count` bytes of the frame's payload are in their place."""
        into = self._into
        assert into is not None
        into.filled += count
        into.left -= count
        self._frame_left -= count
        if not into.left:
            del self._arriving[into.head.kind is Kind.REQUEST, into.head.call]
            if into.kept:
                self.events.append(into.finish())
        if not self._frame_left:
            self._into = None  # it must not outlive the message

    def _parse(self) -> bool:
        """Parse one frame's header, and what has arrived of its payload. Return False if more bytes must arrive."""
        have = self._end - self._start
        if have < HEADER.size:
            return False
        code, flags, buffers, references, zero, length, call = HEADER.unpack_from(self._scratch, self._start)
        if code not in _KINDS or zero or length > CHUNK + HEADER.size:
            raise ProtocolError(f"Invalid frame header: kind {code}, {length} bytes")
        kind = _KINDS[code]
        start = self._start + HEADER.size
        if kind not in _MESSAGES:
            if length > COUNT.size:
                raise ProtocolError(f"Invalid frame header: kind {kind.name}, {length} bytes")
            if have < HEADER.size + length:
                return False
            self._start = start + length
            self._on_control(kind, flags, call, self._scratch[start : start + length])
            return True
        if flags & FIRST:
            table = buffers * SIZE.size + references * REFERENCE.size
            if not 0 < buffers <= MAX_BUFFERS or references > MAX_REFERENCES or table > length:
                raise ProtocolError(f"Invalid message: {buffers} buffers and {references} references")
            if have < HEADER.size + table:
                self._make_room(HEADER.size + table)
                return False
            into = self._begin(kind, call, self._scratch[start : start + table], buffers)
            start += table
            length -= table
        else:
            into = self._arriving.get((kind is Kind.REQUEST, call))
            if into is None or into.head.kind is not kind or not length:
                raise ProtocolError(f"Invalid frame: it is empty, or continues call {call}, which has not begun")
        if length > into.left:
            raise ProtocolError(f"Invalid frame: it has {length} bytes, but its message has only {into.left} left")
        self._into, self._frame_left = into, length
        while True:
            count = min(self._frame_left, self._end - start)
            if into.kept and count:
                place = into.place(count)
                count = len(place)
                place[:] = self._scratch[start : start + count]
            start += count
            self._advance(count)
            if not self._frame_left or start == self._end:
                self._start = start
                return self._frame_left == 0

    def _make_room(self, size: int) -> None:
        """Make room for the table of a message with very many buffers. It has at most CHUNK bytes, as any frame."""
        if size > len(self._scratch):
            scratch = memoryview(bytearray(size + _SCRATCH))
            scratch[: self._end] = self._scratch[: self._end]
            self._scratch = scratch

    def _begin(self, kind: Kind, call: int, table: memoryview, buffers: int) -> _Arriving:
        key = kind is Kind.REQUEST, call
        if key in self._arriving:
            raise ProtocolError(f"Invalid frame: call {call} begins twice")
        edge = buffers * SIZE.size
        sizes: list[int] = [size for (size,) in SIZE.iter_unpack(table[:edge])]
        references = tuple(Reference(*one) for one in REFERENCE.iter_unpack(table[edge:]))
        head = Head(kind, call, sum(sizes), references)
        arriving = self._arriving[key] = _Arriving(head, sizes, self._admit(head))
        return arriving

    def _on_control(self, kind: Kind, flags: int, call: int, body: memoryview) -> None:
        if kind is Kind.CANCEL:
            of_response = bool(flags & OF_RESPONSE)
            self._arriving.pop((not of_response, call), None)
            if not of_response:
                self.events.append(Cancelled(call))
        elif kind is Kind.COUNT:
            self.events.append(unpack_count(body))
        else:
            self.events.append(kind)
