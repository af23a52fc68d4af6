"""`Link`: the connection between two agents. Whoever has something to say writes it; the agent's thread reads."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ringfort.errors import DistributedError
from ringfort.rpc.inbound import Admit, Event, Head, Inbound
from ringfort.rpc.outbound import Outbound, Outgoing
from ringfort.rpc.protocol import Kind, Message
from ringfort.transport import tcp
from ringfort.transport.stream import Stream

_READS = 16
"""System calls to read with before another link has its turn: 4 MiB at most."""
_SMALL = 16 * 1024
"""Bytes up to which what was read is no part of something large."""


class Line(Protocol):
    """A way to an agent: a `Link`, or for this rank's own a `Loop`."""

    peer: int
    broken: str | None

    @property
    def is_open(self) -> bool: ...
    def post(self, outgoing: Outgoing) -> None:
        """Sends a message, or begins to: returns at once. On a line that is closed it only tells `outgoing.done`."""
        ...

    def control(self, frame: bytes) -> None:
        """Sends a frame that belongs to no message."""
        ...


class Link:
    """One connection.

    Any thread may `post`. If nobody is writing it writes, until all is out or the kernel takes no more: then the
    agent's thread goes on when it does. So a small call costs no hand-over. The order matters: who posts first queues
    and then tries to write; who writes first stops and then looks at the queue: so one of the two always sees the
    other.
    """

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        stream: Stream,
        admit: Admit,
        on_stuck: Callable[[Link], None],
        pause: Callable[[], None],
    ) -> None:
        """`on_stuck` is told when `write` must be called once the socket takes more, or when the link has broken.
        `pause` is called between the frames of large messages: others may want the interpreter."""
        self.peer = peer
        self.fd = sock.fileno()
        self.reading = threading.RLock()
        """Held by the one who reads: the agent's thread, or a caller that waits for its answer."""
        self.is_led = False
        """A caller reads."""
        self.broken: str | None = None
        """Why nothing can be sent any more."""
        self.is_closed = False
        self.inbound = Inbound(admit)
        self.is_stuck = False
        self._sock = sock
        self._stream = stream
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._on_stuck = on_stuck
        self._pause = pause
        self._outbound = Outbound()
        self._posted: deque[Outgoing | bytes] = deque()
        self._writing = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether messages still have a chance."""
        return self.broken is None and not self.is_closed

    # --- out ------------------------------------------------------------------------------------------------------

    def post(self, outgoing: Outgoing) -> None:
        self._posted.append(outgoing)
        self._flush()

    def control(self, frame: bytes) -> None:
        self._posted.append(frame)
        self._flush()

    def _flush(self) -> None:
        # By `with` and a look, not by trying the lock: an interrupt must not leave it taken (transport/locks.py). A
        # thread that is overtaken between the look and the `with` waits until the other has written.
        while self._posted and not self.is_stuck and not self._writing.locked():
            with self._writing:
                self._write_or_break()

    def write(self) -> None:
        """The socket takes more. For the agent's thread."""
        with self._writing:
            self.is_stuck = False
            self._write_or_break()
        self._flush()

    def _write_or_break(self) -> None:
        try:
            self._write()
        except BaseException:  # Ctrl-C: what has left may not be accounted for
            self.broken = self.broken or "this rank was interrupted while it wrote"
            self._on_stuck(self)
            raise

    def _write(self) -> None:
        outbound, stream, posted = self._outbound, self._stream, self._posted
        if not self.is_open:
            self._drop()
            return
        while True:
            while posted:
                item = posted.popleft()
                outbound.control(item) if isinstance(item, bytes) else outbound.post(item)
            head, body = outbound.pieces()
            try:
                if body:
                    outbound.wrote(stream.sendmsg((head, body)) if head else stream.send(body))
                    self._pause()
                elif head:
                    outbound.wrote(stream.send(head))
                else:
                    return
            except BlockingIOError:
                self.is_stuck = True
                self._on_stuck(self)
                return
            except OSError as exc:
                self.broken = self.broken or exc.strerror or str(exc)
                self._drop()
                self._on_stuck(self)
                return

    def _drop(self) -> None:
        while self._posted:
            item = self._posted.popleft()
            if isinstance(item, Outgoing):
                self._outbound.post(item)
        self._outbound.drop()

    @property
    def is_flushed(self) -> bool:
        """Everything has been handed to the kernel."""
        return not self._posted and not self._outbound.is_active

    # --- in, for the one who reads --------------------------------------------------------------------------------

    def wait_readable(self, timeout: float) -> bool:
        """Waits until there is something to read, or to learn that there never will be. False if time is up."""
        return self._stream.has_pending or (timeout > 0 and bool(self._readable.poll(timeout * 1000)))

    @property
    def is_readable(self) -> bool:
        """Whether there is something to read now."""
        return self._stream.has_pending or bool(self._readable.poll(0))

    @property
    def has_pending(self) -> bool:
        """Something can be read that the selector knows nothing of."""
        return self._stream.has_pending

    def read(self, handle: Callable[[Event], None]) -> None:
        """Reads what is there, up to a bound. Sets `broken` at the end of the connection."""
        inbound = self.inbound
        try:
            for _ in range(_READS):
                count = self._stream.recv_into(inbound.want())
                if not count:
                    self.broken = self.broken or "its connection ended"
                    return
                inbound.took(count)
                if count > _SMALL:
                    self._pause()
                if inbound.events:
                    events, inbound.events = inbound.events, []
                    for event in events:
                        handle(event)
                    if not self._stream.has_pending:
                        return  # most often there is no more; if there is, the selector says so
        except BlockingIOError:
            return
        except (DistributedError, OSError) as exc:  # ours: a record or a frame that cannot be
            self.broken = self.broken or getattr(exc, "strerror", None) or str(exc)

    def finish(self) -> None:
        """Nothing more will be sent; what comes is still read."""
        with self._writing:
            if self.is_open:
                self._stream.shut_down()

    def silence(self) -> float:
        """Seconds for which the other machine has answered nothing; see `tcp.silence`."""
        return tcp.silence(self._sock)

    def hang_up(self) -> None:
        """Ends the connection, which wakes who waits for it. What has come can still be read."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and drops what has not gone out."""
        self.is_closed = True
        with self._writing:
            self._drop()
        self.hang_up()
        with self.reading, self._writing:
            self._stream.close()


class Loop:
    """A rank's line to itself: what is sent is copied, as if it had gone over a wire, and has arrived."""

    is_open = True
    broken: str | None = None

    def __init__(self, rank: int, admit: Admit, handle: Callable[[Event], None]) -> None:
        self.peer = rank
        self._admit = admit
        self._handle = handle

    def post(self, outgoing: Outgoing) -> None:
        outgoing.begun = True
        kind, call, buffers, references = outgoing.message
        is_taken = self._admit(Head(kind, call, outgoing.message.size, tuple(references)))
        copies = [memoryview(bytearray(data)) for data in buffers] if is_taken else []
        done, outgoing.done = outgoing.done, None
        if done is not None:
            done()
        if is_taken:
            self._handle(Message(kind, call, copies, references))

    def control(self, frame: bytes) -> None:
        inbound = Inbound(lambda _: True)
        inbound.want()[: len(frame)] = frame
        inbound.took(len(frame))
        for event in inbound.events:
            if event is not Kind.GOODBYE:
                self._handle(event)
