"""The protocol between agents: messages cut into frames that take turns. Pure: no sockets, threads or clocks.

    frame:  kind · flags · buffers · references · 0 (1, 1, 2, 2, 2 bytes) · length (4) · call (8) · payload
    first frame of a message, before its bytes:  size of each buffer (8 each) · references (16 each)

A message is a few buffers: first its values in msgpack, then one per large array, straight from and into the array's
memory. Frames of different messages alternate, so that a gigabyte delays no other message; frames of one message keep
their order.

References are listed in the first frame, which is always read, even if the message is then refused: see references.py.

`Inbound` reads frames; outbound.py writes them. Large buffers are read straight into the memory that becomes the array.
What a peer claims never sizes an allocation alone: a message is first admitted, and then gets memory buffer by buffer
as its bytes arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np

from ringfort.config import KIB
from ringfort.errors import ProtocolError

HEADER = Struct("<BBHHHIQ")
SIZE = Struct("<Q")
REFERENCE = Struct("<IIQ")

CHUNK = 256 * KIB
"""Bytes of payload per frame: what a small call waits for at most behind a large one, a fraction of a millisecond
within one machine and 2 ms at 1 Gbit/s. One record of a sealed stream (transport/socket_streams.py)."""
MAX_BUFFERS = 16384
MAX_REFERENCES = 4096
"""Per message, so that its first frame is never larger than any other."""

FIRST, OF_RESPONSE = 1, 2
"""Flags: the frame begins a message; a CANCEL is for a response."""


class Kind(IntEnum):
    """What a frame belongs to. The values are those of the wire and never change."""

    REQUEST = 1
    RESPONSE = 2
    ERROR = 3
    CANCEL = 4
    """The caller gave the call up; no more of its request comes. With OF_RESPONSE: no more of the response comes."""
    COUNT = 5
    """A reference has one holder more or less: see `Count`."""
    GOODBYE = 6
    """The sender closes its agent."""
    LOST = 7
    """The sender has lost a rank: see `Lost`."""


class Reference(NamedTuple):
    """The name of a value that `owner` keeps: the `number`-th that `creator` asked any rank to keep."""

    owner: int
    creator: int
    number: int


class Count(NamedTuple):
    """Tells the owner that `user` holds the reference `delta` times more. It was given it by `giver`, or counts it in
    its own name if both are the same rank."""

    reference: Reference
    user: int
    giver: int
    delta: int


class Lost(NamedTuple):
    """The connection of `rank` to the sender, or to the receiver, is lost. What the sender holds of the receiver's
    values and was given by `rank`, it has counted in its own name."""

    rank: int


class Message(NamedTuple):
    """A complete message."""

    kind: Kind
    call: int
    buffers: Sequence[memoryview | bytes]
    references: Sequence[Reference] = ()

    @property
    def size(self) -> int:
        """Bytes in all buffers."""
        return sum(map(len, self.buffers))


COUNT = Struct("<IIQIIi")


def pack_count(count: Count) -> bytes:
    """Return the control frame for `count`."""
    body = COUNT.pack(*count.reference, count.user, count.giver, count.delta)
    return HEADER.pack(Kind.COUNT, 0, 0, 0, 0, len(body), 0) + body


def pack_cancel(call: int, *, of_response: bool = False) -> bytes:
    """Return the control frame that gives a call up, or says that no more of its response comes."""
    return HEADER.pack(Kind.CANCEL, OF_RESPONSE if of_response else 0, 0, 0, 0, 0, call)


def pack_lost(lost: Lost) -> bytes:
    """Return the control frame for `lost`."""
    return HEADER.pack(Kind.LOST, 0, 0, 0, 0, 0, lost.rank)


def pack_goodbye() -> bytes:
    """Return the last frame of an agent that closes."""
    return HEADER.pack(Kind.GOODBYE, 0, 0, 0, 0, 0, 0)


# --- reading ----------------------------------------------------------------------------------------------------------

_AT_ONCE = 64 * KIB
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


Event = Message | Count | Lost | Cancelled | Kind
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
    """The incoming half of a link: bytes in, messages out. It says where the next bytes should go."""

    def __init__(self, admit: Admit) -> None:
        self.events: list[Event] = []
        """What has arrived; whoever takes it empties the list."""
        self._admit = admit
        # Room for the table of a message with very many buffers: it has at most CHUNK bytes, as any frame.
        self._scratch = memoryview(bytearray(CHUNK + _AT_ONCE))
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
        return self._scratch[self._end : self._end + _AT_ONCE]

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
            if len(body) != COUNT.size:
                raise ProtocolError(f"Invalid frame: a count has {len(body)} bytes, not {COUNT.size}")
            *reference, user, giver, delta = COUNT.unpack(body)
            self.events.append(Count(Reference(*reference), user, giver, delta))
        elif kind is Kind.LOST:
            self.events.append(Lost(call))
        else:
            self.events.append(kind)
