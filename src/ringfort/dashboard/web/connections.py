"""`Connections`: how many browsers may be connected, so that those without access keep nobody out who has it.

A connection is unproved until a request on it shows a valid session. Of too many unproved ones the oldest is closed:
who opens connections and says nothing, or says it slowly, or asks for files again and again, closes its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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
        self._unproved: OrderedDict[Client, asyncio.Transport] = OrderedDict()

    def __len__(self) -> int:
        """How many are unproved."""
        return len(self._unproved)

    def opened(self, client: Client, transport: asyncio.Transport) -> None:
        """Take a connection that was just made, and close the oldest if there are too many."""
        self._unproved[client] = transport
        same = [one for one in self._unproved if one[0] == client[0]]
        if client[0] not in LOOPBACK and len(same) > MAX_OF_ADDRESS:
            self._unproved.pop(same[0]).abort()
        while len(self._unproved) > MAX_UNPROVED:
            self._unproved.popitem(last=False)[1].abort()

    def proved(self, client: Client | None) -> None:
        """A request on this connection has shown a valid session; or the connection is closed."""
        if client is not None:
            self._unproved.pop((client[0], client[1]), None)


def protocol_for(connections: Connections) -> type[H11Protocol]:
    """Return uvicorn's protocol, with these limits."""

    class LimitedProtocol(H11Protocol):
        _first: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
            super().connection_made(transport)
            if self.client is not None:
                connections.opened(self.client, transport)
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
