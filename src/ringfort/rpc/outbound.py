"""The outgoing half of a link: messages in, bytes out. Pure: it offers memory and is told how much of it was written.

The invariant of this file: **a frame that has begun is written whole.** Messages take turns frame by frame. New
messages alternate with those under way, so a small message waits for at most one frame of a large one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringfort.rpc.protocol import CHUNK, FIRST, HEADER, REFERENCE, SIZE, Message

_JOIN = 4096
"""Bytes of a frame up to which one buffer is cheaper than two. A sealed stream makes one record of them."""
_NOTHING = memoryview(b"")


class Outgoing:
    """A message to be sent."""

    def __init__(self, message: Message, *, done: Callable[[], None] | None = None) -> None:
        """`done` is called when the kernel has the last byte, or when the message was withdrawn or dropped."""
        self.message = message
        self.done = done
        self.begun = False
        self.withdrawn = False
        """No more of it should be sent. A frame that has begun is still written whole."""
        self._left: deque[memoryview] = deque(memoryview(data) for data in message.buffers if len(data))

    @property
    def is_over(self) -> bool:
        """Whether no part is left to be put in a frame."""
        return self.begun and not self._left

    def finish(self) -> None:
        """Call `done`, once."""
        done, self.done = self.done, None  # it refers to the message: a cycle would keep both
        if done is not None:
            done()

    def next_frame(self) -> tuple[bytes, memoryview]:
        """Return the header of the next frame, joined with its payload if that is small, and the payload otherwise."""
        message = self.message
        table, flags = b"", 0
        buffers = references = 0
        if not self.begun:
            self.begun = True
            flags = FIRST
            buffers, references = len(message.buffers), len(message.references)
            sizes = b"".join(SIZE.pack(len(data)) for data in message.buffers)
            table = sizes + b"".join(REFERENCE.pack(*reference) for reference in message.references)
        body = self._cut(CHUNK - len(table))
        head = HEADER.pack(message.kind, flags, buffers, references, 0, len(table) + len(body), message.call) + table
        if len(head) + len(body) <= _JOIN:
            return head + body, _NOTHING
        return head, body

    def _cut(self, most: int) -> memoryview:
        """Up to `most` bytes of the next buffer. Never of two, so that each can be read into its own memory."""
        if not self._left or most <= 0:
            return _NOTHING
        data = self._left[0]
        if len(data) <= most:
            return self._left.popleft()
        self._left[0] = data[most:]
        return data[:most]


class Outbound:
    """The outgoing half of a link."""

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._fresh: deque[Outgoing] = deque()  # messages that have not begun
        self._going: deque[Outgoing] = deque()  # messages that have
        self._was_fresh = False  # the last frame began a message
        self._of: Outgoing | None = None  # the message whose frame is being written
        self._head = self._body = _NOTHING

    def post(self, item: Outgoing | bytes) -> None:
        """Queue a message; or a control frame, which goes before all messages. From any thread."""
        if isinstance(item, bytes):
            self._control.append(item)
        else:
            self._fresh.append(item)

    @property
    def is_active(self) -> bool:
        """Whether there is something to write."""
        return bool(self._head or self._body or self._control or self._fresh or self._going)

    def pieces(self) -> tuple[memoryview, memoryview]:
        """What to write next."""
        if not self._head and not self._body:
            self._next()
        return self._head, self._body

    def wrote(self, count: int) -> None:
        """Report that the kernel has taken `count` bytes of `pieces`."""
        of_head = min(count, len(self._head))
        self._head, self._body = self._head[of_head:], self._body[count - of_head :]
        if self._head or self._body:
            return
        message, self._of = self._of, None
        self._head = self._body = _NOTHING  # an empty view would keep the message's memory
        if message is None:
            return
        if message.is_over or message.withdrawn:
            message.finish()
        else:
            self._going.append(message)

    def _next(self) -> None:
        if self._control:
            self._head = memoryview(self._control.popleft())
            return
        while self._fresh or self._going:
            is_fresh = bool(self._fresh) and not (self._was_fresh and self._going)
            message = (self._fresh if is_fresh else self._going).popleft()
            self._was_fresh = is_fresh
            if message.withdrawn:
                message.finish()
                continue
            self._of = message
            head, self._body = message.next_frame()
            self._head = memoryview(head)
            return

    def drop(self) -> None:
        """Give everything up: nothing more can be written."""
        for messages in (self._fresh, self._going):
            while messages:  # other threads may post meanwhile
                messages.popleft().finish()
        if self._of is not None:
            self._of.finish()
        self._control.clear()
        self._of = None
        self._head = self._body = _NOTHING
