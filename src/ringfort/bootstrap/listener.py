"""The listener: the one place where connections are accepted. Strangers are turned away and keep nobody waiting."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from ringfort.bootstrap.admission import (
    ACCEPT_PAUSE,
    CROWDED,
    HANDSHAKE_TIMEOUT,
    MAX_WAITING,
    source_of,
    who_makes_room,
    why_not_accepted,
)
from ringfort.bootstrap.connection import Connection
from ringfort.config import format_address
from ringfort.errors import DistributedError, ProtocolError
from ringfort.identity.credentials import Credentials
from ringfort.transport.forks import keep_from_children
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Hello
from ringfort.transport.tcp import LONGEST_SLEEP

_log = logging.getLogger(__name__)

_LOG_EVERY = 1.0
"""Seconds between two lines about strangers; those in between are counted."""


@dataclass
class Arrival:
    """Somebody who has proved membership and said what for. The connection now belongs to the caller."""

    connection: Connection
    said: Hello
    address: str


@dataclass
class _Waiting:
    sock: socket.socket
    address: str
    source: str
    deadline: float
    handshake: Handshake

    @property
    def has_begun(self) -> bool:
        return self.handshake.has_begun


class Listener:
    """Accepts on a listening socket, opens connections with all who come at the same time, and drops strays."""

    def __init__(self, listener: socket.socket, credentials: Credentials | None) -> None:
        keep_from_children(listener).setblocking(False)
        self._listener = listener
        self._credentials = credentials
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._watched: set[socket.socket] = set()
        self._accept_at: float | None = None
        """When to accept again, where the system has refused to."""
        self._has_warned = False
        self._log_at, self._unlogged = 0.0, 0
        self.turned_away: list[str] = []
        """Who was refused and why, for the error when the group does not come together. The last few only."""

    @property
    def address(self) -> tuple[str, int]:
        """Where the listener is."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def watch(self, connection: Connection) -> None:
        """Reports in `wait` when `connection`, on which nobody is expected to speak yet, says something or ends."""
        connection.sock.setblocking(False)
        self._selector.register(connection.sock, selectors.EVENT_READ)
        self._watched.add(connection.sock)

    def forget(self, connection: Connection) -> None:
        """No longer watches `connection`."""
        self._selector.unregister(connection.sock)
        self._watched.discard(connection.sock)

    def wait(self, deadline: float) -> tuple[list[Arrival], list[socket.socket]]:
        """Who has arrived, and which watched sockets have stirred. Returns, perhaps with neither, by `deadline`."""
        arrivals: list[Arrival] = []
        stirred: list[socket.socket] = []
        if self._accept_at is not None and self._accept_at <= time.monotonic():
            self._accept_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        soonest = min([deadline, *(waiting.deadline for waiting in self._waiting.values())])
        soonest = soonest if self._accept_at is None else min(soonest, self._accept_at)
        for key, _ in self._selector.select(max(0.0, min(soonest - time.monotonic(), LONGEST_SLEEP))):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listener:
                arrivals += self._accept()
            elif sock in self._watched:
                stirred.append(sock)
            elif sock in self._waiting:  # else it was turned away a moment ago, to make room
                arrival = self._listen_to(self._waiting[sock])
                if arrival is not None:
                    arrivals.append(arrival)
        now = time.monotonic()
        for waiting in [waiting for waiting in self._waiting.values() if waiting.deadline <= now]:
            self._turn_away(waiting, f"said nothing useful for {HANDSHAKE_TIMEOUT:g} s")
        return arrivals, stirred

    def refuse(self, arrival: Arrival, code: str, reason: str) -> None:
        """Tells a member no, and closes."""
        arrival.connection.refuse(code, reason)
        self._note(arrival.address, reason)

    def close(self) -> None:
        """Closes the listener, and on all who still wait outside."""
        for waiting in self._waiting.values():
            waiting.sock.close()
        self._waiting.clear()
        self._selector.close()
        self._listener.close()
        self._log_rest()

    def _accept(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for _ in range(MAX_WAITING):  # then the others are heard again: who comes faster must not have all the time
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                why = why_not_accepted(exc)
                if why:
                    self._pause(why)
                break
            keep_from_children(sock).setblocking(False)
            if len(self._waiting) >= MAX_WAITING:
                self._turn_away(who_makes_room(list(self._waiting.values())), CROWDED)
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT
            where = format_address(*address[:2])
            waiting = _Waiting(sock, where, source_of(str(address[0])), deadline, Handshake(self._credentials))
            self._waiting[sock] = waiting
            self._selector.register(sock, selectors.EVENT_READ)
            # A member's first message comes with its connection. It is read before the next one is accepted, so that a
            # member is told from who says nothing.
            arrival = self._listen_to(waiting)
            if arrival is not None:
                arrivals.append(arrival)
        return arrivals

    def _pause(self, why: str) -> None:
        """Accepts nobody for a moment. Those who are connected are served meanwhile."""
        self._selector.unregister(self._listener)
        self._accept_at = time.monotonic() + ACCEPT_PAUSE
        if not self._has_warned:
            self._has_warned = True
            _log.warning("cannot accept connections at %s: %s", format_address(*self.address), why)

    def _listen_to(self, waiting: _Waiting) -> Arrival | None:
        handshake = waiting.handshake
        try:
            while not handshake.is_open:
                data = waiting.sock.recv(handshake.wants)
                if not data:
                    raise ProtocolError("it closed before it said who it is")
                handshake.feed(data)
                self._answer(waiting)
        except BlockingIOError:
            return None
        except (DistributedError, OSError) as exc:
            with suppress(OSError):  # what there is to say tells a cousin why; a stranger may be gone
                self._answer(waiting)
            self._turn_away(waiting, str(exc))
            return None
        assert handshake.purpose is not None
        self._release(waiting)
        return Arrival(Connection(waiting.sock, handshake), handshake.purpose, waiting.address)

    @staticmethod
    def _answer(waiting: _Waiting) -> None:
        outgoing = waiting.handshake.outgoing
        if outgoing and waiting.sock.send(outgoing) < len(outgoing):
            raise ProtocolError("it does not read what it is told")  # a fresh socket has room for all of a handshake
        outgoing.clear()

    def _turn_away(self, waiting: _Waiting, reason: str) -> None:
        self._release(waiting)
        waiting.sock.close()
        self._note(waiting.address, reason)

    def _release(self, waiting: _Waiting) -> None:
        self._selector.unregister(waiting.sock)
        del self._waiting[waiting.sock]

    def _note(self, address: str, reason: str) -> None:
        self.turned_away = [*self.turned_away[-7:], f"{address}: {reason}"]
        if time.monotonic() < self._log_at:
            self._unlogged += 1
            return
        self._log_rest()
        self._log_at = time.monotonic() + _LOG_EVERY
        _log.warning("turned away %s: %s", address, reason)

    def _log_rest(self) -> None:
        if self._unlogged:
            _log.warning("turned away %d more, the last of them %s", self._unlogged, self.turned_away[-1])
            self._unlogged = 0
