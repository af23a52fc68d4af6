"""Connections of the control service: `connect` opens one, `ControlLink` carries messages over one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import open_connection
from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES
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


async def connect(host: str, port: int, credentials: Credentials | None, purpose: Hello) -> Connection:
    """Connect to `host`, an address and not a name. Raises `NoConnectionError`, or what the other side refuses with,
    within `CONNECT_TIMEOUT`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except OSError as exc:
        raise NoConnectionError(f"{host} is not an address ({exc.strerror or exc})") from exc
    return await run(open_connection(found[0], found[4], credentials, purpose), CONNECT_TIMEOUT)


class ControlLink(asyncio.Protocol):
    """Messages over a connection. `on_message` gets each one's bytes; `on_end` is called once, with the reason, unless
    `close` was called before."""

    def __init__(
        self, connection: Connection, on_message: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self._reader = RecordReader(connection.opener, MAX_MESSAGE_BYTES)
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._is_over = False
        self.ended = asyncio.Event()
        """Set when the socket is closed."""

    async def attach(self) -> None:
        """Begin. From now on the link owns the socket."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, self._connection.sock)
        except BaseException:
            self.ended.set()
            self._connection.close()
            raise

    def send(self, body: bytes) -> None:
        """Queue a message."""
        if self._transport is None or self._is_over or self._transport.is_closing():
            return
        self._transport.write(sealed(self._connection.sealer, body))
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
        asyncio.get_running_loop().call_later(CLOSE_WITHIN, transport.abort)
        with suppress(OSError, RuntimeError):
            transport.write_eof()

    def abort(self) -> None:
        """End the link at once; one that is just being attached, then."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

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
                self._on_message(body)
        except DistributedError as exc:
            self._end(str(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        if self._is_over:
            return
        self._is_over = True
        # Either proves nothing about its process: anyone on the path can reset a connection.
        self._on_end("the other side closed the link" if exc is None else f"the link broke ({exc})")

    def _end(self, why: str) -> None:
        if not self._is_over:
            self.abort()
            # Soon and not now: the caller may be in the middle of carrying out the core's instructions.
            asyncio.get_running_loop().call_soon(self._on_end, why)
