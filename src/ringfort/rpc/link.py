"""`Link`: the connection between two agents. Any thread writes; the agent's thread, or a caller that waits, reads."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ringfort.errors import DistributedError
from ringfort.rpc.outbound import Outbound, Outgoing
from ringfort.rpc.protocol import Event, Head, Inbound, Message
from ringfort.transport.stream import Stream

_READS = 16
"""System calls to read with before another link gets its turn: 4 MiB at most."""
_SMALL = 16 * 1024
"""Bytes up to which a read is not part of something large."""


@dataclass(eq=False)
class Link:
    """One connection.

    Any thread may `post`. If no other thread is writing, it writes until everything is out or the kernel takes no
    more; in the second case the agent's thread continues when the kernel does. So a small call costs no hand-over
    between threads. The order matters: a poster first queues and then tries to write; a writer first stops and then
    looks at the queue. So one of the two always sees the other.
    """

    peer: int
    sock: socket.socket
    stream: Stream
    admit: Callable[[PeerLink, Head], bool]
    on_stuck: Callable[[Link], None]
    """Called when `write` must be called once the socket takes more, or when the link has broken."""
    pause: Callable[[], None]
    """Called between the frames of large messages: other threads may want the interpreter."""
    broken: str | None = None
    """Why nothing can be sent any more."""
    is_led: bool = False
    """Whether a caller reads."""
    is_stuck: bool = False

    def __post_init__(self) -> None:
        self.fd = self.sock.fileno()
        self.reading = threading.RLock()
        """Held by the thread that reads: the agent's, or that of a caller that waits for its response."""
        self.inbound = Inbound(partial(self.admit, self))
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self._outbound = Outbound()
        self._writing = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return self.broken is None

    def mark_broken(self, reason: str) -> None:
        """Use the link no more. The first reason counts."""
        self.broken = self.broken or reason

    # --- writing --------------------------------------------------------------------------------------------------

    def post(self, item: Outgoing | bytes) -> None:
        """Send a message or a control frame, or begin to; return at once. On a closed link, only finish `item`."""
        self._outbound.post(item)
        self._flush()

    def _flush(self) -> None:
        # By `with` and a look, not by trying the lock: an interrupt must not leave it taken (transport/locks.py). A
        # thread that is overtaken between the look and the `with` waits until the other has written.
        while self._outbound.is_active and not self.is_stuck and not self._writing.locked():
            with self._writing:
                self._write_or_break()

    def write(self) -> None:
        """Continue to write. For the agent's thread, when the socket takes more."""
        with self._writing:
            self.is_stuck = False
            self._write_or_break()
        self._flush()

    def _write_or_break(self) -> None:
        try:
            self._write()
        except BaseException:  # Ctrl-C: the kernel may have taken bytes that `Outbound` was not told of
            self.mark_broken("this rank was interrupted while writing")
            self.on_stuck(self)
            raise

    def _write(self) -> None:
        outbound, stream = self._outbound, self.stream
        if not self.is_open:
            outbound.drop()
            return
        while True:
            head, body = outbound.pieces()
            try:
                if body:
                    outbound.wrote(stream.sendmsg((head, body)) if head else stream.send(body))
                    self.pause()
                elif head:
                    outbound.wrote(stream.send(head))
                else:
                    return
            except BlockingIOError:
                self.is_stuck = True
                self.on_stuck(self)
                return
            except OSError as exc:
                self.mark_broken(exc.strerror or str(exc))
                outbound.drop()
                self.on_stuck(self)
                return

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has everything."""
        return not self._outbound.is_active

    # --- reading, by the thread that holds `reading` --------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether there is something to read that poll does not know about."""
        return self.stream.has_pending

    def is_readable(self, timeout: float = 0.0) -> bool:
        """Wait until there is something to read, or the end of the connection. Return False if time is up."""
        return self.stream.has_pending or bool(self._readable.poll(timeout * 1000 if timeout > 0 else 0))

    def read(self, handle: Callable[[Event], None]) -> None:
        """Read what is there, up to a bound. Sets `broken` at the end of the connection."""
        inbound = self.inbound
        try:
            for _ in range(_READS):
                count = self.stream.recv_into(inbound.want())
                if not count:
                    self.mark_broken("its connection ended")
                    return
                inbound.took(count)
                if count > _SMALL:
                    self.pause()
                if inbound.events:
                    events, inbound.events = inbound.events, []
                    for event in events:
                        handle(event)
                    if not self.stream.has_pending:
                        return  # usually there is no more; if there is, poll says so
        except BlockingIOError:
            return
        except (DistributedError, OSError) as exc:  # ours: an invalid record or frame
            self.mark_broken(getattr(exc, "strerror", None) or str(exc))

    # --- ending ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Send no more; what arrives is still read."""
        with self._writing:
            if self.is_open:
                self.stream.shut_down()

    def hang_up(self) -> None:
        """End the connection, which wakes the thread that reads. What has arrived can still be read."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and drop what has not been sent."""
        self.mark_broken("this rank has closed it")
        with self._writing:
            self._outbound.drop()
        self.hang_up()
        with self.reading, self._writing:
            self.stream.close()


@dataclass(eq=False)
class LoopbackLink:
    """The link of a rank to itself. Messages are copied as if they had been sent over a network."""

    peer: int
    admit: Callable[[PeerLink, Head], bool]
    handle: Callable[[PeerLink, Event], None]
    is_open: ClassVar = True
    broken: ClassVar = None

    def mark_broken(self, reason: str) -> None:
        raise AssertionError(f"The loopback link cannot break: {reason}")

    def post(self, item: Outgoing | bytes) -> None:
        if isinstance(item, bytes):
            inbound = Inbound(lambda _: True)
            inbound.want()[: len(item)] = item
            inbound.took(len(item))
            for event in inbound.events:
                self.handle(self, event)
            return
        item.begun = True
        kind, call, buffers, references = item.message
        is_admitted = self.admit(self, Head(kind, call, item.message.size, tuple(references)))
        copies = [memoryview(bytearray(data)) for data in buffers] if is_admitted else []
        item.finish()
        if is_admitted:
            self.handle(self, Message(kind, call, copies, references))


PeerLink = Link | LoopbackLink
"""The link to an agent, of another rank or of this one."""
