"""`PeerStreams`: connections between the programs of two peers, outside any epoch, made by their control services.

opener's control service                     receiver's control service
handshake with `OpenStream`           ->     checks who it is, passes the connection to its program
                                      <-     `Ready` or `Refused`, from the receiver's program
passes the connection to its program
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ringfort.bootstrap.connection import Connection, closed_on_error
from ringfort.cluster.core.contacts import Contacts
from ringfort.cluster.net.connector import PeerConnector
from ringfort.cluster.net.control_link import CONNECT_TIMEOUT, connect
from ringfort.cluster.net.host import clock
from ringfort.cluster.net.setup import Setup
from ringfort.cluster.net.waiting import run, within
from ringfort.config import parse_address
from ringfort.errors import (
    DistributedError,
    HandshakeError,
    NoConnectionError,
    OperationTimeoutError,
    ProtocolError,
    RefusedError,
)
from ringfort.transport.hello import OpenStream, Ready

MAX_STREAM_PURPOSE: Final = 64
"""Characters of a purpose."""
MAX_PENDING: Final = 16
"""Streams that may wait for this peer's program. A joiner opens one to each member, and few peers join at once."""
_PAUSE: Final = 0.1
"""Seconds before a peer that could not be reached is tried again."""


class PeerStreams:
    """Lives in the control service's loop."""

    def __init__(
        self,
        setup: Setup,
        connector: PeerConnector,
        contacts: Contacts,
        on_stream: Callable[[str, str, Connection], None],
    ) -> None:
        """`on_stream` passes a stream, with the peer that opened it and its purpose, to this peer's program. Call
        `taken` when the program has it."""
        self._setup = setup
        self._connector = connector
        self._contacts = contacts
        self._on_stream = on_stream
        self._pending = 0

    # --- accepting ------------------------------------------------------------------------------------------------

    def accepted(self, connection: Connection, said: OpenStream) -> None:
        """Take over an incoming connection: pass it on, or tell the peer why not."""
        why = self._why_not(connection, said)
        if why:
            connection.refuse("stream", why)
            self._connector.refused(connection.address, why)
            return
        self._pending += 1
        self._on_stream(said.sender, said.purpose, connection)

    def taken(self) -> None:
        """The program has taken a stream."""
        self._pending = max(0, self._pending - 1)

    def _why_not(self, connection: Connection, said: OpenStream) -> str:
        if said.receiver != self._setup.peer:
            return f"this is {self._setup.peer}, not {said.receiver[:64]}"
        contact = self._contacts.get(said.sender)
        if contact is None or contact.hello is None:
            return "a stream needs a control link between the two peers, and there is none"
        if contact.hello.run != self._setup.config.run:
            return "the two peers are of different runs"
        if not 0 < len(said.purpose) <= MAX_STREAM_PURPOSE:
            return f"the purpose of a stream has 1 to {MAX_STREAM_PURPOSE} characters"
        if self._pending >= MAX_PENDING:
            return f"{MAX_PENDING} streams wait for its program already"
        return self._setup.other_identity(connection.identity, said.sender)

    # --- opening --------------------------------------------------------------------------------------------------

    async def open(self, peer: str, purpose: str, timeout: float) -> Connection:
        """Return a connection that the program of `peer` has taken. Unreachable addresses are tried again.

        Raises `NoConnectionError` if `peer` is of another run or not connected, `RefusedError` if it does not take the
        stream, `HandshakeError` if another machine answers, `OperationTimeoutError` after `timeout` seconds.
        """
        deadline = clock() + timeout
        why = "it was not reached"
        while True:
            contact = self._contacts.get(peer)
            if contact is None or contact.hello is None:
                raise NoConnectionError(f"No stream to {peer}: this peer has no control link with it", peer=peer)
            if contact.hello.run != self._setup.config.run:
                raise NoConnectionError(f"No stream to {peer}: it is of another run", peer=peer)
            addresses = list[str]()
            with suppress(TimeoutError):
                ways = self._connector.ways_to(peer, contact.hello.member.addresses)
                addresses = await within(max(0.0, deadline - clock()), ways)
            for address in addresses:
                if clock() >= deadline:
                    break
                try:
                    return await self._open(peer, purpose, address, deadline)
                except (RefusedError, HandshakeError):
                    raise
                except DistributedError as exc:
                    why = f"{address}: {exc}"
            left = deadline - clock()
            if left <= 0:
                raise OperationTimeoutError(f"opening a stream to {peer}", timeout, peer=peer, state=why)
            await asyncio.sleep(min(_PAUSE, left))

    async def _open(self, peer: str, purpose: str, address: str, deadline: float) -> Connection:
        said = OpenStream(self._setup.peer, peer, purpose)
        left = min(CONNECT_TIMEOUT, max(0.01, deadline - clock()))
        connection = await connect(*parse_address(address), self._setup.wall, said, left)
        with closed_on_error({peer: connection}):
            why = self._setup.other_identity(connection.identity, peer)
            if why:
                raise HandshakeError(f"No stream to {peer}: at {address}, {why}", peer=peer)
            answer = await run(connection.hearing(peer), max(0.01, deadline - clock()))
            if not isinstance(answer, Ready):
                raise ProtocolError(f"{peer} answered a hello with something else", peer=peer)
        return connection
