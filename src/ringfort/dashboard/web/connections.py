"""`Connections`: how many browsers may be connected, so that those without access keep nobody out who has it.

A connection is unproved until a request on it shows a valid session. Of too many unproved ones the oldest is closed:
who opens connections and says nothing, or says it slowly, or asks for files again and again, closes its own.
Connections count from where they are accepted, and not from the end of the TLS handshake, which some never begin.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS: Final = 128
"""Of all browsers. The next one is told to come later."""
MAX_UNPROVED: Final = 64
"""Connections without access, of all addresses."""
MAX_OF_ADDRESS: Final = 32
"""Connections without access of one other machine. On this machine all users have the same address."""
FIRST_REQUEST: Final = 10.0
"""Seconds within which a connection must have sent its first request."""
LOOPBACK: Final = ("127.0.0.1", "::1")

Client = tuple[str, int]


class Connections:
    """All methods are for one event loop."""

    def __init__(self) -> None:
        self._unproved: OrderedDict[Client, socket.socket] = OrderedDict()

    def __len__(self) -> int:
        """How many are unproved."""
        return len(self._unproved)

    def opened(self, client: Client, connection: socket.socket) -> None:
        """Take a connection that was just accepted, and close the oldest if there are too many."""
        # Of those that end in the middle of a TLS handshake nothing is heard.
        self._unproved = OrderedDict((one, known) for one, known in self._unproved.items() if known.fileno() >= 0)
        self._unproved[client] = connection
        same = [one for one in self._unproved if one[0] == client[0]]
        if client[0] not in LOOPBACK and len(same) > MAX_OF_ADDRESS:
            self._close(same[0])
        while len(self._unproved) > MAX_UNPROVED:
            self._close(next(iter(self._unproved)))

    def _close(self, client: Client) -> None:
        with suppress(OSError):  # it is closed already
            self._unproved.pop(client).shutdown(socket.SHUT_RDWR)  # and asyncio, whose it is, closes it

    def proved(self, client: Client | None) -> None:
        """A request on this connection has shown a valid session; or the connection is closed."""
        if client is not None:
            self._unproved.pop((client[0], client[1]), None)


class Listener(socket.socket):
    """A listening socket that tells `connections` of what it accepts."""

    connections: Connections

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection."""
        connection, address = super().accept()
        self.connections.opened((address[0], address[1]), connection)
        return connection, address


def listener(address: str, port: int, connections: Connections) -> Listener:
    """Return a socket that listens. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as plain:
        made = Listener(family, socket.SOCK_STREAM, fileno=plain.detach())
    made.connections = connections
    return made


def protocol_for(connections: Connections) -> type[H11Protocol]:
    """Return uvicorn's protocol, with these limits."""

    class LimitedProtocol(H11Protocol):
        _first: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            self._first = self.loop.call_later(FIRST_REQUEST, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.proved(self.client)
            if self._first is not None:
                self._first.cancel()
            super().connection_lost(exc)

        def _give_up(self) -> None:
            if self.cycle is None:  # pyright: ignore[reportUnnecessaryComparison]  # until there is a request
                self.transport.abort()

    return LimitedProtocol
