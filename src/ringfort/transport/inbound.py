"""The receiving half of a link: bytes in, messages matched to receives. Pure: it is told where bytes were put.

The law of this file: **every header that arrives finds a place for its payload**, whatever the callers do meanwhile, so
that the stream never gets out of step. The place is the receive that waits for it, the inbox, or nowhere (`Discard`);
it may be replaced by another between two reads, but is never missing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from ringfort.config import KIB
from ringfort.errors import ProtocolError, SizeMismatchError
from ringfort.transport.frames import (
    CANCEL,
    CLEAR_TO_SEND,
    DATA,
    HEADER_BYTES,
    MAX_CONTROL,
    NO_CALL,
    RENDEZVOUS,
    Header,
    Key,
    parse,
)
from ringfort.transport.messages import Discard, Envelope, Receive, Scratch, Sink, Stored, discard, take_first

_READ_AHEAD = 2 * (HEADER_BYTES + MAX_CONTROL)
"""Bytes asked for while a header is expected: a small message comes with its header in one system call."""
_BUFFER = max(_READ_AHEAD, 64 * KIB + HEADER_BYTES)
"""Bytes of the buffer itself: a message of the fast path fits with its header."""


_NOTHING = memoryview(b"")


class Disagreement(NamedTuple):
    """A message came that is not of the collective that this rank is in."""

    ours: Envelope
    operation: int
    call: bytes


class Control(NamedTuple):
    """An ABORT, GOODBYE, WAITING or WAKE_UP frame."""

    header: Header
    payload: bytes


class Reply(NamedTuple):
    """A message is being received that must be answered with a clear-to-send."""

    key: Key
    serial: int


class Cleared(NamedTuple):
    """A clear-to-send came for the message with this serial."""

    key: Key
    serial: int


class Cancelled(NamedTuple):
    """The sender of what `receive` was reducing took it back. An event, and no error at once: the frame that tells the
    reason is handled before it."""

    receive: Receive


Event = Disagreement | Control | Reply | Cleared | Cancelled


class Inbound:
    """One link's incoming messages.

    The owner asks `want()` for memory, reads into it and tells `took(n)`. Afterwards it carries out the `events`.
    """

    def __init__(self, peer: int, scratch: Scratch, limit: int, epoch: int = 0) -> None:
        self.peer = peer
        self.events: deque[Event] = deque()
        self.stored_bytes = 0
        self.messages = 0
        self.bytes = 0
        self._scratch = scratch
        self._limit = limit
        self._epoch = epoch
        # np.empty takes no memory until it is written to: most links of a large group carry little.
        self.buffer = memoryview(np.empty(_BUFFER, np.uint8))
        self._fill = 0
        self._sink: Sink | None = None  # where the payload of the frame being read goes
        self._left = 0  # bytes of that payload still to come
        self._key: Key = (0, 0)
        self._open: dict[Key, Sink] = {}  # messages of which some frames have come and some have not
        self._posted: dict[Key, deque[Receive]] = {}
        self._inbox: dict[Key, deque[Stored]] = {}

    # --- bytes ----------------------------------------------------------------------------------------------------

    def want(self) -> memoryview:
        """Where the next bytes from the stream should be put."""
        if self._sink is None:
            return self.buffer[self._fill : _READ_AHEAD]
        return self._sink.space(self._left, self._scratch)

    def took(self, count: int) -> None:
        """`count` bytes were put into what `want` gave. Raises `ProtocolError` when they are invalid."""
        sink = self._sink
        if sink is None:
            self._fill += count
            self._parse()
            return
        if type(sink) is Stored:
            self.stored_bytes += count
        sink.filled(count, self._scratch)
        self._left -= count
        if not self._left:
            self._sink = None
            self._frame_ended(sink)

    def _parse(self) -> None:
        buffer, at = self.buffer, 0
        while self._fill - at >= HEADER_BYTES:
            header = parse(buffer, at)
            body = at + HEADER_BYTES
            have = min(header.length, self._fill - body)
            if header.kind != DATA:
                if have < header.length:
                    break  # wait for all of it: a control frame fits the buffer
                self._control(header, bytes(buffer[body : body + have]))
            else:
                sink = self._place(header)
                if type(sink) is Stored:
                    self.stored_bytes += have
                sink.absorb(buffer[body : body + have], self._scratch)
                if have < header.length:
                    self._sink, self._left = sink, header.length - have
                    self._fill = 0
                    return
                self._frame_ended(sink)
            at = body + have
        rest = self._fill - at
        if at and rest:
            buffer[:rest] = bytes(buffer[at : self._fill])
        self._fill = rest

    def _control(self, header: Header, payload: bytes) -> None:
        key = (header.comm_id, header.tag)
        if header.kind == CLEAR_TO_SEND:
            self.events.append(Cleared(key, header.operation))
        elif header.kind == CANCEL:
            self._cancelled(key)
        else:
            self.events.append(Control(header, payload))

    def is_idle_for(self, key: Key) -> bool:
        """Nothing has been read of any frame that is not finished, and no message of `key` is here or awaited."""
        return not (self._fill or self._sink or key in self._inbox or key in self._posted or key in self._open)

    def count(self, size: int) -> None:
        """The fast path has read a whole message."""
        self.messages += 1
        self.bytes += size

    def leave(self, count: int, beyond: memoryview = _NOTHING) -> None:
        """The fast path has read `count` bytes into the buffer, and behind them those of `beyond`; the ordinary path
        continues. Raises as `took` does."""
        self._fill = count
        self._parse()
        while beyond:
            space = self.want()
            moved = min(len(space), len(beyond))
            space[:moved] = beyond[:moved]
            self.took(moved)
            beyond = beyond[moved:]

    # --- matching -------------------------------------------------------------------------------------------------

    def _place(self, header: Header) -> Sink:
        """Return the sink for the payload behind `header`."""
        if header.epoch != self._epoch:
            raise ProtocolError(f"Invalid frame: epoch {header.epoch}, not {self._epoch}", peer=self.peer)
        key = self._key = (header.comm_id, header.tag)
        sink = self._open.get(key)
        if sink is not None:
            if header.total != sink.total or not 0 < header.length <= sink.total - sink.seen:
                raise ProtocolError(f"Invalid frame: {header.length} bytes do not continue a message", peer=self.peer)
            return sink
        self.messages += 1
        self.bytes += header.total
        receive = take_first(self._posted, key)
        if receive is None:
            sink = Stored(header)
            self._inbox.setdefault(key, deque()).append(sink)
        else:
            sink = self._match(receive, header)
        if header.length < header.total:
            self._open[key] = sink
        return sink

    def _match(self, receive: Receive, header: Header) -> Sink:
        """`receive` itself if the message is for it, else a sink that drops the message, with the reason told."""
        envelope, operation, call, total = receive.envelope, header.operation, header.call, header.total
        if call != envelope.call or (operation != envelope.operation and call != NO_CALL):
            self.events.append(Disagreement(envelope, operation, call))
            return Discard(total)
        if header.flags & RENDEZVOUS:
            self.events.append(Reply(receive.key, operation))
        if total != receive.total:
            return Discard(total, refused=receive)
        return receive

    def _frame_ended(self, sink: Sink) -> None:
        if sink.seen < sink.total:
            return
        if self._open:
            self._open.pop(self._key, None)
        self._message_ended(sink)

    def _message_ended(self, sink: Sink) -> None:
        if isinstance(sink, Receive):
            sink.done = True
        elif isinstance(sink, Discard) and sink.refused is not None:
            sink.refused.error = SizeMismatchError(sink.refused.total, sink.total, peer=self.peer)
            sink.refused.done = True

    def _cancelled(self, key: Key) -> None:
        sink = self._open.pop(key, None)
        if isinstance(sink, Stored):
            discard(self._inbox, key, sink)
            self.stored_bytes -= len(sink.data)
        elif isinstance(sink, Discard) and sink.refused is not None:
            self._posted.setdefault(key, deque()).appendleft(sink.refused)
        elif isinstance(sink, Receive):
            if sink.reducer is None:
                sink.seen = 0  # only a reduction cannot be undone
                self._posted.setdefault(key, deque()).appendleft(sink)
            else:
                self.events.append(Cancelled(sink))

    # --- the callers' side ----------------------------------------------------------------------------------------

    def post(self, receive: Receive) -> None:
        """Add a caller that waits for the next message of `receive.key`. It may be done on return."""
        key = receive.key
        stored = take_first(self._inbox, key) if self._inbox else None
        if stored is None:
            self._posted.setdefault(key, deque()).append(receive)
            return
        self.stored_bytes -= len(stored.data)
        sink = self._match(receive, stored.header)
        sink.absorb(memoryview(stored.data), self._scratch)
        if stored.seen == stored.total:
            self._message_ended(sink)
            return
        self._open[key] = sink
        if self._sink is stored:
            self._sink = sink

    def withdraw(self, receive: Receive) -> None:
        """Remove a caller that no longer waits. A message that has begun to arrive is read to its end and dropped."""
        if receive in self._posted.get(receive.key, ()):
            discard(self._posted, receive.key, receive)
            return
        for sink in (self._open.get(receive.key), self._sink):
            if isinstance(sink, Discard) and sink.refused is receive:
                sink.refused = None
            elif sink is receive:
                nowhere = Discard(receive.total, receive.seen)
                if receive.key in self._open:
                    self._open[receive.key] = nowhere
                if self._sink is receive:
                    self._sink = nowhere
                return

    def holds(self, key: Key) -> bool:
        """Whether a message of `key` that nobody has asked for is here, or has begun to come."""
        return key in self._inbox

    def holds_whole(self, key: Key) -> bool:
        """Whether a whole message of `key` waits in the inbox."""
        queue = self._inbox.get(key)
        return queue is not None and queue[0].seen == queue[0].total

    def early(self, comm_id: int) -> list[tuple[int, bytes]]:
        """Operation and call of the stored messages of collectives on `comm_id`: what the peer is doing while we wait
        for something else."""
        inbox = [stored.header for key, queue in self._inbox.items() if key[0] == comm_id for stored in queue]
        return [(header.operation, header.call) for header in inbox if header.call != NO_CALL]

    @property
    def is_full(self) -> bool:
        """The peer has sent all that may wait here; nothing more is read until some of it is received."""
        return self.stored_bytes >= self._limit
