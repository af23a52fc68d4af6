"""Connections of the control service: how they are opened, and `ControlLink`, the one that messages go over. All I/O is
asyncio's; the protocol is the same `Handshake` and the same records as everywhere else."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ringfort.cluster.core.peer_messages import MAX_MESSAGE_BYTES
from ringfort.cluster.net.waiting import within
from ringfort.errors import DistributedError, NoConnectionError, ProtocolError
from ringfort.identity.credentials import Credentials
from ringfort.transport import hello
from ringfort.transport.forks import keep_from_children
from ringfort.transport.handshake import Handshake, sealed
from ringfort.transport.hello import Hello, Refused
from ringfort.transport.records import LENGTH, MAX_OVERHEAD

DIAL_TIMEOUT: Final = 2.0
"""Seconds for one address to answer and prove itself: a local network needs milliseconds, a busy laptop tenths."""
MAX_UNSENT: Final = 4 * 1024 * 1024
"""Bytes that may wait on a control link. A peer that lets more pile up does not read."""
CLOSE_WITHIN: Final = 1.0
"""Seconds that the last words of a link have to leave."""
_REST: Final = 4096
"""Bytes: more than a handshake has left when it is broken off."""


async def dial(
    host: str, port: int, credentials: Credentials | None, purpose: Hello
) -> tuple[socket.socket, Handshake]:
    """A connection that is open. Raises `NoConnectionError`, or what the other side refuses with, within
    `DIAL_TIMEOUT`. `host` is an address, not a name."""
    loop = asyncio.get_running_loop()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
        sock = keep_from_children(socket.socket(found[0], socket.SOCK_STREAM))
    except OSError as exc:
        raise NoConnectionError(f"{host} is no address ({exc.strerror or exc})") from exc
    handshake = Handshake(credentials, purpose)

    async def connect() -> None:
        await loop.sock_connect(sock, found[4])
        if sock.getsockname() == sock.getpeername():  # TCP's simultaneous open with itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await open_over(sock, handshake)

    try:
        sock.setblocking(False)
        await within(DIAL_TIMEOUT, connect())
    except BaseException as exc:
        sock.close()
        if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
            raise NoConnectionError(f"no answer within {DIAL_TIMEOUT:g} s") from exc
        if isinstance(exc, OSError) and not isinstance(exc, DistributedError):
            # asyncio's own words repeat the address.
            raise NoConnectionError(os.strerror(exc.errno) if exc.errno else str(exc)) from exc
        raise
    return sock, handshake


async def open_over(sock: socket.socket, handshake: Handshake) -> None:
    """Runs either side of a handshake to its end. Raises what `Opening.feed` does; what there is left to say, which
    tells a cousin why, is said."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            if handshake.outgoing:
                data, handshake.outgoing = handshake.outgoing, bytearray()
                await loop.sock_sendall(sock, data)
            if handshake.is_open:
                return
            data = await loop.sock_recv(sock, handshake.wants)
            if not data:
                raise ProtocolError("it closed before it said who it is")
            handshake.feed(data)
    except DistributedError:
        with suppress(OSError):
            if handshake.outgoing:
                sock.send(handshake.outgoing)
            sock.recv(_REST)  # closed with unread bytes, the connection would be reset and the words lost
        raise


async def hear(sock: socket.socket, handshake: Handshake) -> Hello:
    """Reads one hello over an open connection, and not a byte more. Raises what a refusal means, `ProtocolError`,
    or `NoConnectionError` when the other side goes."""
    head = await _read(sock, LENGTH.size)
    length = LENGTH.unpack(head)[0] if handshake.opener is None else handshake.opener.body_length(head)
    if length > hello.MAX_HELLO + MAX_OVERHEAD:
        raise ProtocolError(f"a hello of {length} bytes; the limit is {hello.MAX_HELLO}")
    body = await _read(sock, length)
    if handshake.opener is not None:
        plain = bytearray(LENGTH.size + length - handshake.opener.overhead)
        handshake.opener.open(head + body, memoryview(plain))
        body = bytes(plain)
    said = hello.decode(body)
    if isinstance(said, Refused):
        raise hello.to_error(said, "it")
    return said


async def _read(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        try:
            more = await loop.sock_recv(sock, count - len(data))
        except OSError as exc:
            raise NoConnectionError(f"it broke the connection: {exc.strerror or exc}") from exc
        if not more:
            raise NoConnectionError("it closed the connection before it answered")
        data += more
    return data


class ControlLink(asyncio.Protocol):
    """Messages over an open connection. `on_message` gets each one's bytes, `on_end` is called once, unless `close` was
    called before."""

    def __init__(
        self,
        handshake: Handshake,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._opener = handshake.opener
        self._sealer = handshake.sealer
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._is_over = False
        self.ended = asyncio.Event()
        """Set when nothing is left of it."""

    async def attach(self, sock: socket.socket) -> None:
        """Begins. From now on the socket is this link's."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self, sock)
        except BaseException:
            self.ended.set()
            sock.close()
            raise

    def send(self, body: bytes) -> None:
        """Queues a message."""
        if self._transport is None or self._is_over or self._transport.is_closing():
            return
        self._transport.write(sealed(self._sealer, body))
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            self._end("it does not read what it is sent")

    def close(self) -> None:
        """Ends the link when what was queued has left. What still comes is not looked at, but read: a socket that is
        closed with unread bytes in it resets the connection, and the last words could be lost."""
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
        """Ends the link at once; one that is only just being attached, then."""
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
        self._data += data
        try:
            while not self._is_over:
                body = self._next()
                if body is None:
                    return
                self._on_message(body)
        except DistributedError as exc:
            self._end(str(exc))

    def _next(self) -> bytes | None:
        """The next whole message. Raises `ProtocolError` or `TamperedError`."""
        data = self._data
        if len(data) < LENGTH.size:
            return None
        head = bytes(data[: LENGTH.size])
        length = LENGTH.unpack(head)[0] if self._opener is None else self._opener.body_length(head)
        if length > MAX_MESSAGE_BYTES + MAX_OVERHEAD:
            raise ProtocolError(f"a control message has at most {MAX_MESSAGE_BYTES} bytes, this one claims {length}")
        end = LENGTH.size + length
        if len(data) < end:
            return None
        record = bytes(data[:end])
        del data[:end]
        if self._opener is None:
            return record[LENGTH.size :]
        body = bytearray(end - self._opener.overhead)
        self._opener.open(record, memoryview(body))
        return bytes(body)

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
            # Soon and not now: it may be in the middle of carrying out what the core instructed.
            asyncio.get_running_loop().call_soon(self._on_end, why)
