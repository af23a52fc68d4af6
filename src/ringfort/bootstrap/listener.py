"""The listener: the one place where connections are accepted. It performs the handshake with all clients at the same
time, limits how many may wait unauthenticated and for how long, and returns those that have proved membership.

The training process calls `wait`. The control process watches `fileno` in its event loop, calls `wait` when it is
readable or `next_deadline` has come, and needs nothing else (`cluster.net.control_listener`).
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from ringfort.bootstrap import admission
from ringfort.bootstrap.connection import CLOSED_BY, Connection, SocketSteps, shake_hands
from ringfort.config import format_address
from ringfort.errors import DistributedError
from ringfort.identity.credentials import Credentials
from ringfort.telemetry.trace import own_trace
from ringfort.transport import tcp
from ringfort.transport.forks import keep_from_children
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Refused

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    """A connection that has not proved membership yet."""

    sock: socket.socket
    address: str
    source: str
    deadline: float
    handshake: Handshake
    steps: SocketSteps[None]


class Listener:
    """Accepts connections at any number of listening sockets, which it owns."""

    max_waiting = admission.MAX_WAITING
    handshake_timeout = admission.HANDSHAKE_TIMEOUT
    log_every = 1.0

    def __init__(
        self,
        credentials: Credentials | None,
        *sockets: socket.socket,
        on_refused: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_refused` gets the address of each refused client and the reason. Without it they are logged, at most
        one line in `log_every` seconds."""
        self._credentials = credentials
        self._on_refused = on_refused or self._log_refused
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._ports: dict[str, int] = {}
        self._waiting: dict[socket.socket, _Client] = {}
        self._resume_at = inf
        """When to accept again after the system has refused to."""
        self._has_warned = False
        self._log_at, self._unlogged = 0.0, 0
        self.refusals: list[str] = []
        """The last few refused clients and why, for the error if the group does not form."""
        for sock in sockets:
            self.add(sock)

    @property
    def address(self) -> tuple[str, int]:
        """Where the first socket listens."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    @property
    def next_deadline(self) -> float:
        """When `wait` has something to do although no socket is ready; infinite if never."""
        return min([self._resume_at, *(client.deadline for client in self._waiting.values())])

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` has something to do."""
        return self._selector.fileno()

    def add(self, sock: socket.socket) -> None:
        """Accept connections at a listening socket, too."""
        keep_from_children(sock).setblocking(False)
        self._sockets.append(sock)
        if self._resume_at == inf:
            self._selector.register(sock, selectors.EVENT_READ)

    def port_at(self, host: str) -> int:
        """Return the port where it accepts connections at `host`: a free one, the first time."""
        if host not in self._ports:
            sock = tcp.listen(host, 0)
            self.add(sock)
            self._ports[host] = sock.getsockname()[1]
        return self._ports[host]

    def remove(self, sock: socket.socket) -> None:
        """Close a listening socket."""
        self._sockets.remove(sock)
        if self._resume_at == inf:
            self._selector.unregister(sock)
        sock.close()

    def wait(self, deadline: float) -> list[Connection]:
        """Return the connections that have proved membership; perhaps none. Returns by `deadline`. Each connection
        belongs to the caller, and says in `purpose` what it is for."""
        if self._resume_at <= time.monotonic():
            self._resume_at = inf
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ)
        arrived: list[Connection] = []
        seconds = min(deadline, self.next_deadline) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(seconds, tcp.LONGEST_SLEEP))):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock in self._waiting:
                arrived += self._continue(self._waiting[sock])
            elif sock in self._sockets and self._resume_at == inf:  # else it was dropped or paused a moment ago
                arrived += self._accept(sock)
        now = time.monotonic()
        for client in [client for client in self._waiting.values() if client.deadline <= now]:
            self._drop(client, f"did not finish its handshake within {self.handshake_timeout:g} s")
        return arrived

    def refuse(self, connection: Connection, refused: Refused) -> None:
        """Tell a member why it is refused, and close."""
        connection.refuse(refused.code, refused.reason)
        self._refused(connection.address, refused.reason)

    def close(self) -> None:
        """Close the listening sockets and all clients that are not authenticated yet."""
        for sock in (*self._waiting, *self._sockets):
            sock.close()
        self._waiting.clear()
        self._selector.close()
        self._log_rest()

    def _accept(self, listening: socket.socket) -> list[Connection]:
        arrived: list[Connection] = []
        for _ in range(self.max_waiting):  # then other sockets get their turn, however fast clients connect
            try:
                sock, address = listening.accept()
            except OSError as exc:
                why = admission.why_not_accepted(exc)
                if why:
                    self._pause(listening, why)
                break
            keep_from_children(sock).setblocking(False)
            with suppress(OSError):  # the client may have gone
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._waiting) >= self.max_waiting:
                clients = list(self._waiting.values())
                place = admission.who_makes_room([(one.source, one.handshake.has_begun) for one in clients])
                self._drop(clients[place], admission.TOO_MANY)
            handshake = Handshake(self._credentials)
            client = self._waiting[sock] = _Client(
                sock,
                format_address(*address[:2]),
                admission.source_of(str(address[0])),
                time.monotonic() + self.handshake_timeout,
                handshake,
                shake_hands(sock, handshake),
            )
            self._selector.register(sock, selectors.EVENT_READ)
            # A member's first message comes with its connection. Read before the next client is accepted, it tells
            # members from clients that send nothing.
            arrived += self._continue(client)
        return arrived

    def _pause(self, listening: socket.socket, why: str) -> None:
        """Accept nothing for a moment. Clients that are connected already are served meanwhile."""
        self._resume_at = time.monotonic() + admission.ACCEPT_PAUSE
        for sock in self._sockets:
            self._selector.unregister(sock)
        if not self._has_warned:
            self._has_warned = True
            _log.warning("Cannot accept connections at %s: %s", format_address(*listening.getsockname()[:2]), why)

    def _continue(self, client: _Client) -> list[Connection]:
        """Move a handshake on as far as it gets without waiting."""
        try:
            next(client.steps)
        except StopIteration:
            self._release(client)
            return [Connection.of(client.sock, client.handshake, client.address)]
        except DistributedError as exc:
            self._drop(client, str(exc))
        return []

    def _drop(self, client: _Client, reason: str) -> None:
        self._release(client)
        client.sock.close()
        self._refused(client.address, reason)

    def _release(self, client: _Client) -> None:
        self._selector.unregister(client.sock)
        del self._waiting[client.sock]

    def _refused(self, address: str, reason: str) -> None:
        self.refusals = [*self.refusals[-7:], f"{address}: {reason}"]
        self._on_refused(address, reason)

    def _log_refused(self, address: str, reason: str) -> None:
        if time.monotonic() < self._log_at:
            self._unlogged += 1
            return
        self._log_rest()
        self._log_at = time.monotonic() + self.log_every
        _log.warning("Refused %s: %s", address, reason)
        if not reason.startswith(CLOSED_BY):
            own_trace().event("refused", f"A connection from {address} was refused: {reason}")

    def _log_rest(self) -> None:
        if self._unlogged:
            _log.warning("Refused %d more connections; the last is %s", self._unlogged, self.refusals[-1])
            self._unlogged = 0
