"""`Entrance`: where a node's connections are accepted, on every address it is found at. What has proved itself is
handed on by its purpose; strangers have no more time and room than at `transport.door`, whose twin in asyncio this is.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from ringfort.cluster.discovery.static import DEFAULT_PORT
from ringfort.cluster.wire import open_over
from ringfort.config import format_address
from ringfort.errors import DistributedError, TransportError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.door import MAX_WAITING, OPENING_TIMEOUT
from ringfort.transport.forks import keep_from_children
from ringfort.transport.opening import Opening

_TRIES: Final = 20
"""Free ports that are tried on all addresses. One is nearly always free on the others too."""

OnOpen = Callable[[socket.socket, Opening, str], None]
"""Takes over the socket; the text is where it came from."""


class Entrance:
    """Lives in the control thread's loop."""

    def __init__(
        self, credentials: Credentials | None, on_open: OnOpen, on_refused: Callable[[str, str], None]
    ) -> None:
        self.port = 0
        self._credentials = credentials
        self._on_open = on_open
        self._on_refused = on_refused
        self._listeners: dict[str, socket.socket] = {}
        self._waiting: dict[asyncio.Task[None], str] = {}

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
        for task in tuple(self._waiting):
            task.cancel()

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
        except OSError:  # nobody there any more, or no descriptor left: others may still be served
            return
        keep_from_children(sock).setblocking(False)
        if len(self._waiting) >= MAX_WAITING:
            # The one that has waited longest makes room; a member that was pushed out so comes again.
            oldest = next(iter(self._waiting))
            self._on_refused(self._waiting.pop(oldest), "too many strangers at once")
            oldest.cancel()
        where = format_address(str(address[0]), int(address[1]))
        task = asyncio.ensure_future(self._receive(sock, where))
        self._waiting[task] = where
        task.add_done_callback(lambda done: self._waited(done, sock))

    def _waited(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._waiting.pop(task, None)
        if task.cancelled():  # perhaps before it began
            sock.close()

    async def _receive(self, sock: socket.socket, where: str) -> None:
        opening = Opening(self._credentials)
        try:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(open_over(sock, opening), OPENING_TIMEOUT)
        except BaseException as exc:
            sock.close()
            if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):
                self._on_refused(where, f"said nothing useful for {OPENING_TIMEOUT:g} s")
            elif isinstance(exc, (DistributedError, OSError)):
                self._on_refused(where, str(exc))
            else:
                raise
            return
        self._on_open(sock, opening, where)
