"""`ControlListener`: where a node's connections are accepted, on every address it is found at. What has proved itself
is handed on by its purpose; strangers have no more time and room than at `transport.listener`, whose twin in asyncio
this is.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ringfort.bootstrap.admission import (
    ACCEPT_PAUSE,
    CROWDED,
    HANDSHAKE_TIMEOUT,
    MAX_WAITING,
    source_of,
    who_makes_room,
    why_not_accepted,
)
from ringfort.cluster.discovery.static import DEFAULT_PORT
from ringfort.cluster.net.control_link import open_over
from ringfort.cluster.net.waiting import within
from ringfort.config import format_address
from ringfort.errors import DistributedError, TransportError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.forks import keep_from_children
from ringfort.transport.handshake import Handshake

_log = logging.getLogger(__name__)

_TRIES: Final = 20
"""Free ports that are tried on all addresses. One is nearly always free on the others too."""

OnOpen = Callable[[socket.socket, Handshake, str], None]
"""Takes over the socket; the text is where it came from."""


@dataclass(eq=False)
class _Waiting:
    sock: socket.socket
    address: str
    source: str
    handshake: Handshake
    task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self.handshake.has_begun


class ControlListener:
    """Lives in the control service's loop."""

    def __init__(
        self, credentials: Credentials | None, on_open: OnOpen, on_refused: Callable[[str, str], None]
    ) -> None:
        self.port = 0
        self._credentials = credentials
        self._on_open = on_open
        self._on_refused = on_refused
        self._listeners: dict[str, socket.socket] = {}
        self._waiting: list[_Waiting] = []
        self._has_warned = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, as `host:port`, in the order that was asked for."""
        return tuple(format_address(host, self.port) for host in self._listeners)

    def open(self, hosts: Iterable[str], port: int) -> None:
        """Listens at all of `hosts` on one port: `port`, or with 0 the usual one if it is free, else any.

        Raises `TransportError` when the port that was asked for cannot be had.
        """
        hosts = tuple(hosts)
        failure: TransportError | None = None
        for wish in (port,) if port else (DEFAULT_PORT, *[0] * _TRIES):
            try:
                self._bind(hosts, wish)
                return
            except TransportError as exc:
                failure = exc
        assert failure is not None
        raise failure

    def move(self, hosts: Iterable[str]) -> list[str]:
        """The addresses have changed: listens at these. Returns what went wrong, in words."""
        hosts = tuple(hosts)
        for host in [host for host in self._listeners if host not in hosts]:
            self._drop(self._listeners.pop(host))
        troubles: list[str] = []
        kept, self._listeners = self._listeners, {}
        for host in hosts:
            try:
                self._listeners[host] = kept.get(host) or self._listen(host, self.port)
            except TransportError as exc:
                troubles.append(str(exc))
        return troubles

    def close(self) -> None:
        """Closes, and on all who wait outside."""
        for listener in self._listeners.values():
            self._drop(listener)
        self._listeners.clear()
        for waiting in self._waiting:
            if waiting.task is not None:
                waiting.task.cancel()

    def _bind(self, hosts: tuple[str, ...], port: int) -> None:
        bound: dict[str, socket.socket] = {}
        for host in hosts:
            try:
                bound[host] = self._listen(host, port)
                port = bound[host].getsockname()[1]
            except TransportError as exc:
                # An address that is just coming or going is done without: the next look at the interfaces has it.
                is_last = host == hosts[-1] and not bound
                if is_last or getattr(exc.__cause__, "errno", None) != errno.EADDRNOTAVAIL:
                    for listener in bound.values():
                        self._drop(listener)
                    raise
        self._listeners, self.port = bound, port

    def _listen(self, host: str, port: int) -> socket.socket:
        listener = tcp.listen(host, port)
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        return listener

    def _drop(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except OSError as exc:
            why = why_not_accepted(exc)
            if why:
                self._pause(listener, why)
            return
        keep_from_children(sock).setblocking(False)
        if len(self._waiting) >= MAX_WAITING:
            self._make_room()
        where = format_address(str(address[0]), int(address[1]))
        waiting = _Waiting(sock, where, source_of(str(address[0])), Handshake(self._credentials))
        waiting.task = asyncio.ensure_future(self._receive(waiting))
        self._waiting.append(waiting)
        waiting.task.add_done_callback(lambda done: self._waited(done, waiting))

    def _make_room(self) -> None:
        gone = who_makes_room(self._waiting)
        self._waiting.remove(gone)
        self._on_refused(gone.address, CROWDED)
        if gone.task is not None:
            gone.task.cancel()

    def _pause(self, listener: socket.socket, why: str) -> None:
        """Accepts nobody at `listener` for a moment. Those who are connected are served meanwhile."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(ACCEPT_PAUSE, self._resume, listener)
        if not self._has_warned:
            self._has_warned = True
            _log.warning("cannot accept connections at %s: %s", format_address(*listener.getsockname()[:2]), why)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners.values():  # else it was closed meanwhile
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _waited(self, task: asyncio.Task[None], waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        if task.cancelled():  # perhaps before it began
            waiting.sock.close()

    async def _receive(self, waiting: _Waiting) -> None:
        sock, handshake, where = waiting.sock, waiting.handshake, waiting.address
        try:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await within(HANDSHAKE_TIMEOUT, open_over(sock, handshake))
        except BaseException as exc:
            sock.close()
            if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
                self._on_refused(where, f"said nothing useful for {HANDSHAKE_TIMEOUT:g} s")
            elif isinstance(exc, (DistributedError, OSError)):
                self._on_refused(where, str(exc))
            else:
                raise
            return
        self._on_open(sock, handshake, where)
