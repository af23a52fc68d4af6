"""Connections of the control service: `connect` opens one, `ControlLink` carries messages over one, and `ControlLinks`
has all control links of this peer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import open_connection
from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.gossip import Gossip, encode
from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES, AnyMessage
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.waiting import run
from ringfort.errors import DistributedError, NoConnectionError
from ringfort.identity.credentials import Credentials
from ringfort.transport.handshake import RecordReader, sealed
from ringfort.transport.hello import Hello

CONNECT_TIMEOUT: Final = 2.0
"""Seconds for one address to answer and prove itself: a local network needs milliseconds, a busy laptop tenths."""
MAX_UNSENT: Final = 4 * 1024 * 1024
"""Bytes that may wait on a control link. A peer that lets more pile up does not read."""
CLOSE_WITHIN: Final = 1.0
"""Seconds that the last messages of a link have to leave."""
GOSSIP_RATE: Final = 20.0
"""Gossip messages per second that a peer may send for long."""
GOSSIP_BURST: Final = 400.0
"""Gossip messages that a peer may send at once: the last output of a failing program, from every rank."""


async def connect(
    host: str, port: int, credentials: Credentials | None, purpose: Hello, timeout: float = CONNECT_TIMEOUT
) -> Connection:
    """Connect to `host`, an address and not a name. Raises `NoConnectionError`, or what the other side refuses with,
    within `timeout` seconds."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except OSError as exc:
        raise NoConnectionError(f"{host} is not an address ({exc.strerror or exc})") from exc
    return await run(open_connection(found[0], found[4], credentials, purpose), timeout)


@dataclass(eq=False)
class ControlLink(asyncio.Protocol):
    """Messages over a connection, and what this peer knows about its other end."""

    connection: Connection
    on_message: Callable[[bytes], None]
    on_end: Callable[[str], None]
    """Called once, with the reason, unless `close` was called before."""
    dialled: str = ""
    """The address that this side dialled; empty for an incoming link."""
    peer: str = ""
    """The peer at the other end; empty until its hello."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the socket is closed."""
    _transport: asyncio.Transport | None = None
    _is_over: bool = False
    _credit: float = GOSSIP_BURST
    _credit_at: float = field(default_factory=clock)

    def __post_init__(self) -> None:
        self._reader = RecordReader(self.connection.opener, MAX_MESSAGE_BYTES)

    @property
    def remote(self) -> str:
        """The other end, as `host:port`."""
        return self.dialled or self.connection.address

    def is_flooding(self, now: float) -> bool:
        """Count one gossip message. Return True if there are too many."""
        self._credit = min(GOSSIP_BURST, self._credit + GOSSIP_RATE * (now - self._credit_at)) - 1
        self._credit_at = now
        return self._credit < 0

    async def attach(self) -> None:
        """Begin. From now on the link owns the socket."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self.connection.sock)
        except BaseException:
            self.ended.set()
            self.connection.close()
            raise

    def send(self, body: bytes) -> None:
        """Queue a message."""
        if self._transport is None or self._is_over or self._transport.is_closing():
            return
        self._transport.write(sealed(self.connection.sealer, body))
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._end("it does not read what it is sent")

    def close(self) -> None:
        """End the link when what was queued has left. What still arrives is read and dropped: closing a socket with
        unread bytes resets the connection, and the last messages could be lost."""
        if self._is_over:
            return
        self._is_over = True
        transport = self._transport
        if transport is None:  # `connection_made` ends it
            return
        asyncio.get_running_loop().call_later(CLOSE_WITHIN, self._abort_late)
        with suppress(OSError, RuntimeError):
            transport.write_eof()

    def abort(self) -> None:
        """End the link at once; one that is just being attached, then."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def _abort_late(self) -> None:
        if not self.ended.is_set():  # else asyncio fails, if the last bytes left after the other side had closed
            self.abort()

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._is_over:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._reader.feed(data)
        try:
            while not self._is_over and (body := self._reader.next()) is not None:
                self.on_message(body)
        except DistributedError as exc:
            self._end(str(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        if self._is_over:
            return
        self._is_over = True
        # Either proves nothing about its process: anyone on the path can reset a connection.
        self.on_end("the other side closed the link" if exc is None else f"the link broke ({exc})")

    def _end(self, why: str) -> None:
        if not self._is_over:
            self.abort()
            # Soon and not now: the caller may be in the middle of carrying out the core's instructions.
            asyncio.get_running_loop().call_soon(self.on_end, why)


class ControlLinks:
    """Numbers links, sends on them, and follows those that were closed until their last messages have left."""

    def __init__(self) -> None:
        self.open: dict[int, ControlLink] = {}
        """The links that have not ended, by number."""
        self._numbers = count(1)
        self._closing: list[ControlLink] = []

    def add(self, link: ControlLink) -> int:
        """Return the number of a new link, which no other has had."""
        number = next(self._numbers)
        self.open[number] = link
        return number

    def __iter__(self) -> Iterator[ControlLink]:
        """All links that may still be in use, including those that are closing."""
        return iter([*self._closing, *self.open.values()])

    def send(self, number: int, message: AnyMessage | Gossip) -> None:
        """Send on one link; do nothing if it has ended."""
        if number in self.open:
            self.open[number].send(encode(message))

    def broadcast(self, contacts: Iterable[Contact], message: AnyMessage | Gossip) -> None:
        """Send on the links of `contacts`."""
        data = encode(message)
        for contact in contacts:
            self.open[contact.link].send(data)

    def close(self, number: int) -> ControlLink | None:
        """Close a link after what was queued on it has been sent. Return it if it was open."""
        link = self.open.pop(number, None)
        if link is not None:
            link.close()
            self._closing = [one for one in (*self._closing, link) if not one.ended.is_set()]
        return link
