"""The incoming half of a link: bytes in, messages out. Pure: it says where the next bytes should go.

Large buffers are read straight into the memory that becomes the array. Nothing is taken for what a peer only claims: a
message is first admitted, and then has memory buffer by buffer as its bytes come.
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
"""Bytes read at once while no large buffer is being filled."""
_MESSAGES = frozenset({Kind.REQUEST, Kind.RESPONSE, Kind.ERROR})
_KINDS = {int(kind): kind for kind in Kind}
_NOTHING = memoryview(b"")


class Head(NamedTuple):
    """What the first frame of a message says of it."""

    kind: Kind
    call: int
    size: int
    references: tuple[Reference, ...]


class Cancelled(NamedTuple):
    """A call was given up. Of its request, `dropped` bytes had been admitted that never came whole."""

    call: int
    dropped: int = 0


Event = Message | Count | Cancelled | Kind
"""What comes; of kinds only GOODBYE does."""
Admit = Callable[[Head], bool]
"""Told of every message that begins: whether to take it. What is not taken is read and dropped."""


class _Arriving:
    """A message of which something has come."""

    __slots__ = ("at", "buffers", "filled", "head", "kept", "left", "sizes")

    def __init__(self, head: Head, sizes: Sequence[int], kept: bool) -> None:
        self.head = head
        self.sizes = sizes
        self.kept = kept
        self.buffers: list[memoryview] = []
        self.at: int = 0  # which buffer is being filled
        self.filled: int = 0  # bytes of it
        self.left = head.size

    def place(self, most: int) -> memoryview:
        """Where the next bytes go, at most `most`. Memory is taken buffer by buffer, when its first byte has come."""
        while self.filled == self.sizes[self.at]:
            if len(self.buffers) == self.at:
                self.buffers.append(memoryview(b""))
            self.at, self.filled = self.at + 1, 0
        if len(self.buffers) == self.at:
            # np.empty, for the kernel gives its pages only when they are written.
            self.buffers.append(memoryview(np.empty(self.sizes[self.at], np.uint8)))
        return self.buffers[self.at][self.filled : self.filled + most]

    def took(self, count: int) -> None:
        if self.kept:
            self.filled += count
        self.left -= count

    def finish(self) -> Message:
        rest = len(self.sizes) - len(self.buffers)  # only empty ones can be left
        buffers = (*self.buffers, *([memoryview(b"")] * rest))
        return Message(self.head.kind, self.head.call, buffers, self.head.references)


class Inbound:
    """The incoming half of a link: bytes in, messages out. It says where the next bytes should go."""

    def __init__(self, admit: Admit) -> None:
        self.events: list[Event] = []
        """What has come; whoever takes it empties the list."""
        self._admit = admit
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._start: int = 0  # of what is unread in the scratch
        self._end: int = 0
        self._arriving: dict[tuple[bool, int], _Arriving] = {}
        self._into: _Arriving | None = None  # whose frame is being read
        self._frame_left: int = 0  # bytes of its payload that have not come
        self._place = _NOTHING

    @property
    def arriving(self) -> int:
        """Messages of which a part has come."""
        return len(self._arriving)

    def drop(self) -> int:
        """Nothing more comes: the bytes of requests that had been admitted and never came whole."""
        arriving, self._arriving = self._arriving, {}
        return sum(one.head.size for one in arriving.values() if one.kept and one.head.kind is Kind.REQUEST)

    def want(self) -> memoryview:
        """Where the next bytes should go."""
        if self._frame_left:
            into = self._into
            assert into is not None
            if into.kept:
                self._place = into.place(self._frame_left)
            else:
                self._place = self._scratch[: min(self._frame_left, _SCRATCH)]
            return self._place
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._scratch[self._end :]

    def took(self, count: int) -> None:
        """`count` bytes have come where they were wanted. Raises `ProtocolError` if they are none of ours."""
        if self._frame_left:
            self._advance(count)
            return
        self._end += count
        while self._parse():
            pass

    def _advance(self, count: int) -> None:
        """`count` bytes of the frame have come to their place."""
        into = self._into
        assert into is not None
        into.took(count)
        self._frame_left -= count
        if not into.left:
            del self._arriving[into.head.kind is Kind.REQUEST, into.head.call]
            if into.kept:
                self.events.append(into.finish())
        if not self._frame_left:
            self._into = None

    def _parse(self) -> bool:
        """Reads one frame's header, and what has come of its payload, from the scratch. False if more must come."""
        have = self._end - self._start
        if have < HEADER.size:
            return False
        kind, flags, buffers, references, zero, length, call = HEADER.unpack_from(self._scratch, self._start)
        if kind not in _KINDS or zero or length > CHUNK + HEADER.size:
            raise ProtocolError(f"a frame of kind {kind} with {length} bytes is none of ours")
        kind = _KINDS[kind]
        start = self._start + HEADER.size
        if kind not in _MESSAGES:
            if have < HEADER.size + length:
                if length > COUNT.size:
                    raise ProtocolError(f"a frame of kind {kind.name} claims {length} bytes")
                return False
            self._start = start + length
            self._other(kind, flags, call, self._scratch[start : start + length])
            return True
        if flags & FIRST:
            table = buffers * SIZE.size + references * REFERENCE.size
            if not 0 < buffers <= MAX_BUFFERS or references > MAX_REFERENCES or table > length:
                raise ProtocolError(f"a message of {buffers} buffers and {references} references is none of ours")
            if have < HEADER.size + table:
                if HEADER.size + table > len(self._scratch):
                    return self._grow(HEADER.size + table)
                return False
            into = self._begin(kind, call, self._scratch[start : start + table], buffers, references)
            start += table
            length -= table
        else:
            found = self._arriving.get((kind is Kind.REQUEST, call))
            if found is None or found.head.kind is not kind or not length:
                raise ProtocolError(f"a frame continues call {call}, of which nothing has come")
            into = found
        if length > into.left:
            raise ProtocolError(f"a frame has {length} bytes where its message has {into.left} left")
        self._start = start
        self._into, self._frame_left = into, length
        if not into.left:  # a message without a byte
            self._into, self._frame_left = None, 0
            if into.kept:
                self.events.append(into.finish())
            return True
        self._arriving[kind is Kind.REQUEST, call] = into
        while self._frame_left and self._start < self._end:
            count = min(self._frame_left, self._end - self._start)
            if into.kept:
                place = into.place(count)
                count = len(place)
                place[:] = self._scratch[self._start : self._start + count]
            self._start += count
            self._advance(count)
        return self._frame_left == 0

    def _grow(self, size: int) -> bool:
        """The table of a message with very many buffers: at most CHUNK, as any frame."""
        scratch = memoryview(bytearray(size + _SCRATCH))
        scratch[: self._end] = self._scratch[: self._end]
        self._scratch = scratch
        return False

    def _begin(self, kind: Kind, call: int, table: memoryview, buffers: int, references: int) -> _Arriving:
        if (kind is Kind.REQUEST, call) in self._arriving:
            raise ProtocolError(f"call {call} begins twice")
        sizes: list[int] = [size for (size,) in SIZE.iter_unpack(table[: buffers * SIZE.size])]
        named = REFERENCE.iter_unpack(table[buffers * SIZE.size :])
        head = Head(kind, call, sum(sizes), tuple(Reference(*one) for one in named))
        return _Arriving(head, sizes, self._admit(head))

    def _other(self, kind: Kind, flags: int, call: int, body: memoryview) -> None:
        if kind is Kind.CANCEL:
            of_response = bool(flags & OF_RESPONSE)
            arriving = self._arriving.pop((not of_response, call), None)
            if not of_response:
                self.events.append(Cancelled(call, arriving.head.size if arriving and arriving.kept else 0))
        elif kind is Kind.COUNT:
            self.events.append(unpack_count(body))
        else:
            self.events.append(kind)
