"""`ControlListener`: the listener of a node, on every address of it, in the control service's event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable
from math import inf
from typing import Final

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.cluster.discovery.static import DEFAULT_PORT
from ringfort.config import format_address
from ringfort.errors import TransportError
from ringfort.transport import tcp

_ATTEMPTS: Final = 20
"""Free ports that are tried on all addresses. One is nearly always free on the others too."""


class ControlListener:
    """Watches a `Listener` in the running event loop, and listens at all addresses of this node on one port."""

    def __init__(self, listener: Listener, on_connection: Callable[[Connection], None]) -> None:
        """`on_connection` takes over each connection that has proved membership."""
        self.port = 0
        self._listener = listener
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._sockets: dict[str, socket.socket] = {}
        self._is_open = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, as `host:port`, in the order that was asked for."""
        return tuple(format_address(host, self.port) for host in self._sockets)

    def open(self, hosts: Iterable[str], port: int) -> None:
        """Listen at all of `hosts` on one port: `port`, or with 0 the default one if it is free, else any.

        Raises `TransportError` if no port is free.
        """
        hosts = tuple(hosts)
        wishes = [port] if port else [DEFAULT_PORT, *[0] * _ATTEMPTS]
        while True:
            try:
                self._sockets, self.port = _bind(hosts, wishes.pop(0))
                break
            except TransportError:
                if not wishes:
                    raise
        for sock in self._sockets.values():
            self._listener.add(sock)
        self._loop.add_reader(self._listener.fileno(), self._turn)
        self._is_open = True

    def move(self, hosts: Iterable[str]) -> list[str]:
        """Listen at these hosts instead. Returns what went wrong, in words."""
        hosts = tuple(hosts)
        for host in [host for host in self._sockets if host not in hosts]:
            self._listener.remove(self._sockets.pop(host))
        troubles: list[str] = []
        kept, self._sockets = self._sockets, {}
        for host in hosts:
            try:
                if host not in kept:
                    kept[host] = tcp.listen(host, self.port)
                    self._listener.add(kept[host])
                self._sockets[host] = kept[host]
            except TransportError as exc:
                troubles.append(str(exc))
        return troubles

    def close(self) -> None:
        """Stop listening, and close all clients that are not authenticated yet."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._sockets.clear()
        self._listener.close()

    def _turn(self) -> None:
        for connection in self._listener.wait(0):
            self._on_connection(connection)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._listener.next_deadline
        if self._is_open and deadline < inf:
            self._timer = self._loop.call_at(deadline, self._turn)


def _bind(hosts: tuple[str, ...], port: int) -> tuple[dict[str, socket.socket], int]:
    bound: dict[str, socket.socket] = {}
    for host in hosts:
        try:
            bound[host] = tcp.listen(host, port)
            port = bound[host].getsockname()[1]
        except TransportError as exc:
            # An address that is just appearing or disappearing is left out: the next check of the interfaces adds it.
            is_last = host == hosts[-1] and not bound
            if is_last or getattr(exc.__cause__, "errno", None) != errno.EADDRNOTAVAIL:
                for sock in bound.values():
                    sock.close()
                raise
    return bound, port
