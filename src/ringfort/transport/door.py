"""The door: the one place where connections are accepted. Strangers are turned away and keep nobody waiting."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from dataclasses import dataclass, field

from ringfort.config import format_address
from ringfort.errors import DistributedError, NoConnectionError, ProtocolError, TransportError, VersionMismatchError
from ringfort.transport import greeting
from ringfort.transport.greeting import Greeting, GreetingReader, Refused
from ringfort.transport.tcp import LONGEST_SLEEP

_log = logging.getLogger(__name__)

GREETING_TIMEOUT = 5.0
"""Seconds a connection may take to say who it is. A peer needs milliseconds."""
MAX_WAITING = 64
"""Connections that have not said who they are. The one that has waited longest makes room for a new one."""


@dataclass
class Arrival:
    """Somebody who said who they are. `sock` is non-blocking and now belongs to the caller."""

    sock: socket.socket
    said: Greeting
    address: str


@dataclass
class _Waiting:
    sock: socket.socket
    address: str
    deadline: float
    reader: GreetingReader = field(default_factory=GreetingReader)


class Door:
    """Accepts on a listening socket, reads greetings from all who come at the same time, and drops strays."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._watched: set[socket.socket] = set()
        self.turned_away: list[str] = []
        """Who was refused and why, for the error when the group does not come together. The last few only."""

    @property
    def address(self) -> tuple[str, int]:
        """Where the door is."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def watch(self, sock: socket.socket) -> None:
        """Reports in `wait` when `sock`, which nobody expects to speak yet, says something or ends."""
        self._selector.register(sock, selectors.EVENT_READ)
        self._watched.add(sock)

    def forget(self, sock: socket.socket) -> None:
        """No longer watches `sock`."""
        self._selector.unregister(sock)
        self._watched.discard(sock)

    def wait(self, deadline: float) -> tuple[list[Arrival], list[socket.socket]]:
        """Who has arrived, and which watched sockets have stirred. Returns, perhaps with neither, by `deadline`."""
        arrivals: list[Arrival] = []
        stirred: list[socket.socket] = []
        soonest = min([deadline, *(waiting.deadline for waiting in self._waiting.values())])
        for key, _ in self._selector.select(max(0.0, min(soonest - time.monotonic(), LONGEST_SLEEP))):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                self._accept()
            elif sock in self._watched:
                stirred.append(sock)
            elif sock in self._waiting:  # else it was turned away a moment ago, to make room
                arrival = self._listen_to(self._waiting[sock])
                if arrival is not None:
                    arrivals.append(arrival)
        now = time.monotonic()
        for waiting in [waiting for waiting in self._waiting.values() if waiting.deadline <= now]:
            self._turn_away(waiting, f"said nothing useful for {GREETING_TIMEOUT:g} s")
        return arrivals, stirred

    def refuse(self, arrival: Arrival, code: str, reason: str) -> None:
        """Tells somebody no, and closes."""
        _say_last(arrival.sock, Refused(code, reason))
        self._note(arrival.address, reason)

    def close(self) -> None:
        """Closes the door, and on all who still wait outside."""
        for waiting in self._waiting.values():
            waiting.sock.close()
        self._waiting.clear()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:  # nobody there any more, or no descriptor left: others may still be served
                return
            sock.setblocking(False)
            if len(self._waiting) >= MAX_WAITING:
                self._turn_away(next(iter(self._waiting.values())), "too many strangers at once")
            waiting = _Waiting(sock, format_address(*address[:2]), time.monotonic() + GREETING_TIMEOUT)
            self._waiting[sock] = waiting
            self._selector.register(sock, selectors.EVENT_READ)

    def _listen_to(self, waiting: _Waiting) -> Arrival | None:
        try:
            data = waiting.sock.recv(waiting.reader.wants)
            if not data:
                raise ProtocolError("it closed before it said who it is")
            said = waiting.reader.feed(data)
        except BlockingIOError:
            return None
        except VersionMismatchError as exc:
            self._turn_away(waiting, str(exc), code="version")
            return None
        except (DistributedError, OSError) as exc:
            self._turn_away(waiting, str(exc))
            return None
        if said is None:
            return None
        self._release(waiting)
        return Arrival(waiting.sock, said, waiting.address)

    def _turn_away(self, waiting: _Waiting, reason: str, *, code: str = "") -> None:
        self._release(waiting)
        if code:
            _say_last(waiting.sock, Refused(code, reason))
        else:
            waiting.sock.close()
        self._note(waiting.address, reason)

    def _release(self, waiting: _Waiting) -> None:
        self._selector.unregister(waiting.sock)
        del self._waiting[waiting.sock]

    def _note(self, address: str, reason: str) -> None:
        _log.warning("turned away %s: %s", address, reason)
        self.turned_away = [*self.turned_away[-7:], f"{address}: {reason}"]


def _say_last(sock: socket.socket, refused: Refused) -> None:
    try:
        sock.send(greeting.encode(refused))  # a fresh socket's buffer always has room for it
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # they have gone already
    sock.close()


def _left(deadline: float) -> float:
    return max(0.01, min(deadline - time.monotonic(), LONGEST_SLEEP))


def say(sock: socket.socket, said: Greeting, deadline: float) -> None:
    """Sends a greeting. Raises `TransportError`."""
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(greeting.encode(said))
    except OSError as exc:
        raise TransportError(f"the connection broke while greeting: {exc.strerror or exc}") from exc


def hear(sock: socket.socket, peer: str, deadline: float) -> Greeting:
    """Reads one greeting, and not a byte more. Raises what a refusal means, or `NoConnectionError`."""
    reader = GreetingReader()
    while True:
        try:
            sock.settimeout(_left(deadline))
            data = sock.recv(reader.wants)
        except TimeoutError as exc:
            raise NoConnectionError(f"{peer} accepted the connection but did not answer in time", peer=peer) from exc
        except OSError as exc:
            raise NoConnectionError(f"{peer} broke the connection: {exc.strerror or exc}", peer=peer) from exc
        if not data:
            raise NoConnectionError(f"{peer} closed the connection before it answered", peer=peer)
        said = reader.feed(data)
        if isinstance(said, Refused):
            raise greeting.to_error(said, peer)
        if said is not None:
            return said
