"""The sending half of a link: messages in, bytes out. Pure: it offers memory to be written and is told how much went.

The law of this file: **a frame that has begun goes out whole.** A caller that gives up in the middle of one leaves a
copy of its rest behind, so that the next frame starts where the other side expects it. Messages of different keys take
turns frame by frame; messages of one key keep their order.
"""

from __future__ import annotations

from collections import deque

from ringfort.transport.frames import (
    CANCEL,
    CLEAR_TO_SEND,
    DATA,
    FIRST_FRAGMENT,
    HEADER,
    MAX_FRAGMENT,
    NO_CALL,
    RENDEZVOUS,
    WINDOW,
    Key,
    pack,
)
from ringfort.transport.messages import Send, discard

_JOIN = 4096
"""Bytes of payload that are cheaper to copy behind their header than to hand to the kernel as a second buffer."""

_NOTHING = memoryview(b"")


class Outbound:
    """One link's outgoing messages.

    The owner writes what `pieces()` offers and tells `wrote(n)`; `is_active` says whether there is anything to offer.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.messages = 0
        self.bytes = 0
        self._serial = 0
        self._epoch = epoch
        self.owes_clear = False
        """A clear-to-send that the peer waits for has not gone out."""
        self._control: deque[bytes] = deque()
        self._queues: dict[Key, deque[Send]] = {}  # in the order of their turns
        self._send: Send | None = None  # whose frame is being written; None for a control frame or an orphan
        self._head = _NOTHING  # what is left of the frame's header (and, joined to it, of a short payload)
        self._body = _NOTHING  # what is left of its payload

    # --- bytes ----------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """There is something to write now."""
        return bool(self._head) or bool(self._body) or bool(self._control) or self._choose() is not None

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be written, not even for a clear-to-send."""
        return not (self._queues or self._head or self._body or self._control)

    def count(self, size: int) -> None:
        """A whole message was written while this half was idle."""
        self.messages += 1
        self.bytes += size

    def went(self, send: Send, head: bytes, count: int) -> None:
        """Of a message's only frame, which begins with `head`, `count` bytes were written while this half was idle; the
        rest is next."""
        self.count(send.size)
        send.begun, send.sent = True, send.size
        if count == len(head) + send.size:
            send.done = True
            return
        self.post(send)
        self._send, self._head = send, memoryview(head)[count:]
        self._body = send.data[max(0, count - len(head)) :]

    @property
    def is_between(self) -> bool:
        """No frame has begun that is not finished."""
        return not (self._head or self._body)

    @property
    def has_control(self) -> bool:
        """A control frame has not gone out whole."""
        return bool(self._control) or (self._send is None and bool(self._head))

    def pieces(self) -> tuple[memoryview, memoryview]:
        """Return what to write next: a header (or nothing) and the rest of its payload (or nothing)."""
        if not self._head and not self._body:
            self._next_frame()
        return self._head, self._body

    def wrote(self, count: int) -> None:
        """`count` bytes of what `pieces` offered are with the kernel."""
        head = len(self._head)
        if head:
            if count < head:
                self._head = self._head[count:]
                return
            self._head = _NOTHING
            count -= head
        if count:
            self._body = self._body[count:]
        if not self._body:
            self._frame_ended()

    def _next_frame(self) -> None:
        if self._control:
            self._head = memoryview(self._control.popleft())
            return
        send = self._choose()
        if send is None:
            return
        envelope = send.envelope
        length = min(send.ready - send.sent, MAX_FRAGMENT)
        if not send.is_clear:
            length = min(length, WINDOW - send.sent)
        if not send.begun:
            send.begun = True
            self.messages += 1
            self.bytes += send.size
            if send.is_rendezvous and send.size > WINDOW:
                length = min(length, FIRST_FRAGMENT)
        flags = RENDEZVOUS if send.is_rendezvous else 0
        head = HEADER.pack(
            DATA, flags, length, self._epoch, envelope.comm_id, envelope.tag, send.serial, send.size, envelope.call
        )
        body = send.data[send.sent : send.sent + length]
        send.sent += length
        self._send = send
        if length <= _JOIN:
            self._head = memoryview(head + body)
        else:
            self._head, self._body = memoryview(head), body

    def _choose(self) -> Send | None:
        """Return the message whose frame is next: the first in turn that need not wait for its clear-to-send."""
        for queue in self._queues.values():
            if not _waits(queue[0]):
                return queue[0]
        return None

    def _frame_ended(self) -> None:
        send, self._send = self._send, None
        if send is None:
            if not self._control:
                self.owes_clear = False
            return
        if send.sent == send.size and send.is_clear:
            self._finish(send)
        if len(self._queues) > 1 and send.key in self._queues:
            self._queues[send.key] = self._queues.pop(send.key)  # it was this one's turn: now it is the last

    def _finish(self, send: Send) -> None:
        send.done = True
        discard(self._queues, send.key, send)

    # --- the callers' side ----------------------------------------------------------------------------------------

    def post(self, send: Send) -> None:
        """Queue `send`."""
        if send.envelope.call == NO_CALL:
            self._serial += 1
            send.serial = self._serial
        self._queues.setdefault(send.key, deque()).append(send)

    def withdraw(self, send: Send) -> None:
        """Cancel a message whose caller no longer waits and will reuse its memory. The other side drops what it has
        received."""
        if send.done or send not in self._queues.get(send.key, ()):
            return
        if self._send is send:
            self._send = None
            self._body = memoryview(bytes(self._body))
        discard(self._queues, send.key, send)
        if send.begun and send.sent < send.size:
            self.control(pack(CANCEL, epoch=self._epoch, comm_id=send.key[0], tag=send.key[1]))

    def control(self, frame: bytes) -> None:
        """Queue a control frame; it goes out before any further DATA frame."""
        self._control.append(frame)

    def reply_clear(self, key: Key, serial: int) -> None:
        """Tell the other side that its message is being received."""
        self.owes_clear = True
        self.control(pack(CLEAR_TO_SEND, epoch=self._epoch, comm_id=key[0], tag=key[1], operation=serial))

    def cleared(self, key: Key, serial: int) -> None:
        """A clear-to-send came. One for a message that was withdrawn meanwhile is no error: the serial tells them
        apart."""
        queue = self._queues.get(key)
        if queue is None or queue[0].serial != serial or not queue[0].begun:
            return
        send = queue[0]
        send.is_clear = True
        if send.sent == send.size and self._send is not send:
            self._finish(send)


def _waits(send: Send) -> bool:
    if send.source is not None and send.ready == send.sent < send.size:
        return True  # for the bytes that it passes on
    return not send.is_clear and send.begun and (send.sent == send.size or send.sent >= WINDOW)
