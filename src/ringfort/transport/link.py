"""One peer: its stream and both halves of the protocol on it; and `Job`, what a caller waits for on links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ringfort.errors import DistributedError
from ringfort.transport.abort_reasons import AbortReason
from ringfort.transport.inbound import Inbound
from ringfort.transport.locks import Signal
from ringfort.transport.messages import Receive, Scratch, Send
from ringfort.transport.outbound import Outbound
from ringfort.transport.sealed import SealedStream
from ringfort.transport.stream import Stream

MakeError = Callable[[], DistributedError]
"""Makes a new error for each call that it ends: a raised exception keeps its traceback."""


class Link:
    """One peer. Reading and writing are one system call each and say whether bytes moved."""

    __slots__ = ("_sealed", "error", "goodbye", "inbound", "outbound", "peer", "stream", "waits_in", "watch")

    def __init__(self, peer: int, stream: Stream, scratch: Scratch, inbox_bytes: int, epoch: int) -> None:
        self.peer = peer
        self.stream = stream
        # Most tries move only a part of a record: that needs no place for its content.
        self._sealed = stream if isinstance(stream, SealedStream) else None
        self.inbound = Inbound(peer, scratch, inbox_bytes, epoch)
        self.outbound = Outbound(epoch)
        self.error: MakeError | None = None
        """Why the stream cannot be used any more; None while it can."""
        self.goodbye: AbortReason | None = None
        """The peer said goodbye: the abort reason for collectives that still need it."""
        self.waits_in: dict[int, tuple[int, bytes]] = {}
        """By communicator: the collective in which the peer said that it waits for us, as its number and call."""
        self.watch: tuple[bool, bool] = (True, False)
        """What the poller looks for: reading, writing."""

    @property
    def is_open(self) -> bool:
        return self.error is None

    def write(self) -> bool:
        """Write once; whether bytes moved. Raises `OSError` when the connection is gone."""
        try:
            if self._sealed is not None and self._sealed.is_sending:
                count = self._sealed.push()
                if not count:
                    return False
            else:
                head, body = self.outbound.pieces()
                if not body:
                    if not head:
                        return False
                    count = self.stream.send(head)
                elif head:
                    count = self.stream.sendmsg((head, body))
                else:
                    count = self.stream.send(body)
        except BlockingIOError:
            return False
        self.outbound.wrote(count)
        return True

    def read(self) -> bool:
        """Read once; whether bytes moved. Raises `OSError` when the connection is gone, `EOFError` at its end and
        `ProtocolError` if what came is invalid."""
        inbound = self.inbound
        try:
            if self._sealed is not None and not self._sealed.pull():
                return False
            count = self.stream.recv_into(inbound.want())
        except BlockingIOError:
            return False
        if not count:
            raise EOFError
        inbound.took(count)
        return True


@dataclass(eq=False, slots=True)
class Job:
    """What one caller waits for: a message to send, one to receive, or both; and until when."""

    what: str
    timeout: float
    deadline: float
    send: Send | None = None
    send_link: Link | None = None
    receive: Receive | None = None
    receive_link: Link | None = None
    before: tuple[tuple[Send | Receive, Link], ...] = ()
    """Of a pipelined ring: the messages before these two, on the same links, which so are done before them."""
    is_posted: bool = False
    say_at: float | None = None
    """When to tell the peer that we wait for it; never again after that."""
    turn: Signal | None = None
    """Of a caller that sleeps: sent when its job is done, or when the caller should lead."""

    @property
    def is_done(self) -> bool:
        return (self.send is None or self.send.done) and (self.receive is None or self.receive.done)

    def halves(self) -> Iterator[tuple[Send | Receive, Link]]:
        """The messages and their links, in their order."""
        yield from self.before
        if self.send is not None and self.send_link is not None:
            yield self.send, self.send_link
        if self.receive is not None and self.receive_link is not None:
            yield self.receive, self.receive_link

    def waits_on(self, link: Link) -> list[Send | Receive]:
        """The messages on `link` that are not done."""
        return [half for half, other in self.halves() if other is link and not half.done]

    def is_on(self, comm_id: int) -> bool:
        """Whether this is part of a collective on `comm_id`."""
        return any(half.envelope.comm_id == comm_id and half.envelope.members is not None for half, _ in self.halves())

    def fail(self, error: MakeError) -> None:
        """Ends the halves that are not done, and takes them off their links."""
        for half, link in self.halves():
            if not half.done:
                if isinstance(half, Send):
                    link.outbound.withdraw(half)
                else:
                    link.inbound.withdraw(half)
                half.error, half.done = error(), True
