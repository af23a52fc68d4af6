"""The outgoing half of a link: messages in, bytes out. Pure: it offers memory and is told how much of it went.

The law of this file: **a frame that has begun goes out whole.** Messages take turns frame by frame; those that begin go
before those under way, one for one, so a small message waits for one frame of a large one at the most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringfort.rpc.protocol import CHUNK, FIRST, HEADER, REFERENCE, SIZE, Message

_JOIN = 4096
"""Bytes of a frame up to which one buffer is cheaper than two. A sealed stream makes one record of them."""
_NOTHING = memoryview(b"")


class Outgoing:
    """A message on its way out."""

    def __init__(self, message: Message, *, done: Callable[[], None] | None = None) -> None:
        """`done` is told when the last byte is with the kernel, or the message was withdrawn."""
        self.message = message
        self.done = done
        self.begun = False
        self.withdrawn = False
        self._left: deque[memoryview] = deque(memoryview(data) for data in message.buffers if len(data))

    @property
    def is_over(self) -> bool:
        """Nothing is left to be framed."""
        return self.begun and not self._left

    def next_frame(self) -> tuple[bytes, memoryview]:
        """Header (and, joined to it, what is small) and payload of the next frame."""
        message = self.message
        table, flags = b"", 0
        buffers = references = 0
        if not self.begun:
            self.begun = True
            flags = FIRST
            buffers, references = len(message.buffers), len(message.references)
            table = b"".join(
                [
                    *(SIZE.pack(len(data)) for data in message.buffers),
                    *(REFERENCE.pack(*reference) for reference in message.references),
                ]
            )
        body = self._cut(CHUNK - len(table))
        head = HEADER.pack(message.kind, flags, buffers, references, 0, len(table) + len(body), message.call) + table
        if len(head) + len(body) <= _JOIN:
            return head + body, _NOTHING
        return head, body

    def _cut(self, most: int) -> memoryview:
        """Up to `most` bytes of the next buffer: never of two, so that each can be read into its place."""
        if not self._left or most <= 0:
            return _NOTHING
        data = self._left[0]
        if len(data) <= most:
            return self._left.popleft()
        self._left[0] = data[most:]
        return data[:most]


class Outbound:
    """The outgoing half of a link: messages in, bytes out. It offers memory and is told how much of it went."""

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._fresh: deque[Outgoing] = deque()
        self._going: deque[Outgoing] = deque()
        self._was_fresh = False  # the last frame began a message
        self._of: Outgoing | None = None  # whose frame is being written
        self._head = self._body = _NOTHING

    def post(self, message: Outgoing) -> None:
        """`message` is to go out."""
        self._fresh.append(message)

    def control(self, frame: bytes) -> None:
        """A frame that belongs to no message: goes before all others, in order with its like."""
        self._control.append(frame)

    def withdraw(self, message: Outgoing) -> None:
        """No more of `message` is wanted. A frame that has begun goes out whole."""
        message.withdrawn = True

    @property
    def is_active(self) -> bool:
        """There is something to write."""
        return bool(self._head or self._body or self._control or self._fresh or self._going)

    def pieces(self) -> tuple[memoryview, memoryview]:
        """What to write next."""
        if not self._head and not self._body:
            self._next()
        return self._head, self._body

    def wrote(self, count: int) -> None:
        """`count` bytes of `pieces` are with the kernel."""
        if self._head:
            if count < len(self._head):
                self._head = self._head[count:]
                return
            count -= len(self._head)
            self._head = _NOTHING
        if count:
            self._body = self._body[count:]
        if not self._body:
            self._body = _NOTHING
            self._ended()

    def _next(self) -> None:
        if self._control:
            self._head = memoryview(self._control.popleft())
            return
        while self._fresh or self._going:
            is_fresh = bool(self._fresh) and not (self._was_fresh and self._going)
            message = (self._fresh if is_fresh else self._going).popleft()
            self._was_fresh = is_fresh
            if message.withdrawn:
                _tell(message)
                continue
            self._of = message
            head, self._body = message.next_frame()
            self._head = memoryview(head)
            return

    def _ended(self) -> None:
        message, self._of = self._of, None
        if message is None:
            return
        if message.is_over or message.withdrawn:
            _tell(message)
        else:
            self._going.append(message)

    def drop(self) -> None:
        """Nothing will go out any more."""
        for message in (*self._fresh, *self._going, *((self._of,) if self._of else ())):
            _tell(message)
        self._fresh.clear()
        self._going.clear()
        self._control.clear()
        self._of = None
        self._head = self._body = _NOTHING


def _tell(message: Outgoing) -> None:
    done, message.done = message.done, None  # it knows the message: a cycle would keep both
    if done is not None:
        done()
