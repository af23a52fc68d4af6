"""The frame: a fixed 64-byte header and its payload. Pure; knows bytes and nothing else.

A message goes out as one or more DATA frames. The other kinds steer:

| kind | says | payload |
| --- | --- | --- |
| DATA | a piece of a message | the piece |
| CLEAR_TO_SEND | the receiver is there: send the rest of the message that asked for it | none |
| CANCEL | the sender gave up in the middle of a message; drop what came of it | none |
| ABORT | a communicator failed, and why | an abort reason, see abort_reasons.py |
| GOODBYE | this side closes on purpose, or its program ends without having closed; nothing follows | none |
| WAITING | this side has waited for a message of this collective for a while | none |
| WAKE_UP | look at the shared memory: what you sleep for is there | none |
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

from ringfort.config import KIB, MIB
from ringfort.errors import ProtocolError

PROTOCOL_VERSION = 3

DATA, CLEAR_TO_SEND, CANCEL, ABORT, GOODBYE, WAITING, WAKE_UP = range(1, 8)

RENDEZVOUS = 1
"""Flag of a DATA frame: the sender waits for clear-to-send before it sends more than the window, and before it is
done."""

HAS_ENDED = 2
"""Flag of a GOODBYE: the program has ended without closing. Peers that still need it raise `PeerLostError`; the others
continue."""

HEADER = Struct("<BB2xIIxxxxQQQQ16s")
"""kind, flags, payload length, epoch, communicator, tag, operation number, whole message's length, call."""

HEADER_BYTES = HEADER.size
assert HEADER_BYTES == 64, "keeps payloads aligned for arithmetic behind a header in one buffer"

MAX_FRAGMENT = MIB
"""Bytes of payload in one DATA frame. Between two frames another message of the link may take its turn."""
FIRST_FRAGMENT = 64 * KIB
"""Bytes in the first frame of a message that wants a clear-to-send: short, so that the clear-to-send for the other
direction, which can only go out between two frames, is on its way before the other side has filled its window."""
WINDOW = MIB
"""Bytes of a message that may be sent before its receiver is known to be there: what a receiver may have to store."""
MAX_CONTROL = 4 * KIB
"""Bytes of payload in a frame that is not DATA: an abort reason in words fits."""
MAX_MESSAGE = 1 << 48
"""Bytes in one message. Only a check that the length is not noise: no memory is taken for it."""

NO_CALL = bytes(16)
"""The call of a message that belongs to no collective."""

Key = tuple[int, int]
"""Communicator id and tag: what keeps conversations apart on one link."""


class Header(NamedTuple):
    """What a header says."""

    kind: int
    flags: int = 0
    length: int = 0
    epoch: int = 0
    comm_id: int = 0
    tag: int = 0
    operation: int = 0
    total: int = 0
    call: bytes = NO_CALL


def pack(kind: int, **fields: Any) -> bytes:
    """Return the bytes of a header; `fields` are those of `Header`."""
    return HEADER.pack(*Header(kind, **fields))


def parse(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Return the header at `offset`. Raises `ProtocolError` for anything a well-behaved peer never sends."""
    header = Header._make(HEADER.unpack_from(buffer, offset))
    if header.kind == DATA:
        if header.length > MAX_FRAGMENT or header.length > header.total or header.total > MAX_MESSAGE:
            raise ProtocolError(
                f"Invalid frame: {header.length} bytes of a message of {header.total} bytes; "
                f"the limits are {MAX_FRAGMENT} and {MAX_MESSAGE}"
            )
    elif not CLEAR_TO_SEND <= header.kind <= WAKE_UP:
        raise ProtocolError(f"Unknown kind of frame {header.kind}: the other side may not be Ringfort")
    elif header.length > MAX_CONTROL:
        raise ProtocolError(f"Invalid control frame: {header.length} bytes; the limit is {MAX_CONTROL}")
    return header
