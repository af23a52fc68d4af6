"""The protocol between agents: messages cut into frames that take turns. Pure: no sockets, threads or clocks.

    frame:  kind · flags · buffers · references · 0 (1, 1, 2, 2, 2 bytes) · length (4) · call (8) · payload
    first frame of a message, before its bytes:  size of each buffer (8 each) · references (16 each)

A message is a few buffers: first its values in msgpack, then one per large array, straight from and into the array's
memory. Frames of different messages alternate, so that a gigabyte delays no other message; frames of one message keep
their order.

References are listed in the first frame, which is always read, even if the message is then refused: see references.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from ringfort.config import KIB
from ringfort.errors import ProtocolError

HEADER = Struct("<BBHHHIQ")
SIZE = Struct("<Q")
REFERENCE = Struct("<IIQ")

CHUNK = 256 * KIB
"""Bytes of payload per frame: what a small call waits for at most behind a large one, a fraction of a millisecond
within one machine and 2 ms at 1 Gbit/s. One record of a sealed stream (transport/sealed.py)."""
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


class Reference(NamedTuple):
    """The name of a value that `owner` keeps: the `number`-th that `creator` asked any rank to keep."""

    owner: int
    creator: int
    number: int


class Count(NamedTuple):
    """Tells the owner that `user` holds the reference `delta` times more."""

    reference: Reference
    user: int
    delta: int


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


COUNT = Struct("<IIQIi")


def pack_count(count: Count) -> bytes:
    """Return the control frame for `count`."""
    body = COUNT.pack(*count.reference, count.user, count.delta)
    return HEADER.pack(Kind.COUNT, 0, 0, 0, 0, len(body), 0) + body


def pack_cancel(call: int, *, of_response: bool = False) -> bytes:
    """Return the control frame that gives a call up, or says that no more of its response comes."""
    return HEADER.pack(Kind.CANCEL, OF_RESPONSE if of_response else 0, 0, 0, 0, 0, call)


def pack_goodbye() -> bytes:
    """Return the last frame of an agent that closes."""
    return HEADER.pack(Kind.GOODBYE, 0, 0, 0, 0, 0, 0)


def unpack_count(body: memoryview) -> Count:
    """Read the body of a count frame. Raises `ProtocolError`."""
    if len(body) != COUNT.size:
        raise ProtocolError(f"Invalid count frame: {len(body)} bytes, not {COUNT.size}")
    owner, creator, number, user, delta = COUNT.unpack(body)
    return Count(Reference(owner, creator, number), user, delta)
