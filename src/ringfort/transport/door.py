"""The door: the one place where connections are accepted. Strangers are turned away and keep nobody waiting."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from ringfort.config import format_address
from ringfort.errors import DistributedError, ProtocolError
from ringfort.identity.credentials import Credentials
from ringfort.transport.channel import Channel
from ringfort.transport.forks import keep_from_children
from ringfort.transport.greeting import Greeting
from ringfort.transport.opening import Opening
from ringfort.transport.tcp import LONGEST_SLEEP

_log = logging.getLogger(__name__)

OPENING_TIMEOUT = 5.0
"""Seconds a connection may take to prove itself, however slowly it drips. A peer needs milliseconds."""
MAX_WAITING = 64
"""Connections that have not proved themselves. The one that has waited longest makes room for a new one; a member that
was pushed out so comes again."""
_LOG_EVERY = 1.0
"""Seconds between two lines about strangers; those in between are counted."""


@dataclass
class Arrival:
    """Somebody who has proved membership and said what for. The channel now belongs to the caller."""

    channel: Channel
    said: Greeting
    address: str


@dataclass
class _Waiting:
    sock: socket.socket
    address: str
    deadline: float
    opening: Opening


class Door:
    """Accepts on a listening socket, opens connections with all who come at the same time, and drops strays."""

    def __init__(self, listener: socket.socket, credentials: Credentials | None) -> None:
        keep_from_children(listener).setblocking(False)
        self._listener = listener
        self._credentials = credentials
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._watched: set[socket.socket] = set()
        self._log_at, self._unlogged = 0.0, 0
        self.turned_away: list[str] = []
        """Who was refused and why, for the error when the group does not come together. The last few only."""

    @property
    def address(self) -> tuple[str, int]:
        """Where the door is."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def watch(self, channel: Channel) -> None:
        """Reports in `wait` when `channel`, on which nobody is expected to speak yet, says something or ends."""
        channel.sock.setblocking(False)
        self._selector.register(channel.sock, selectors.EVENT_READ)
        self._watched.add(channel.sock)

    def forget(self, channel: Channel) -> None:
        """No longer watches `channel`."""
        self._selector.unregister(channel.sock)
        self._watched.discard(channel.sock)

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
            self._turn_away(waiting, f"said nothing useful for {OPENING_TIMEOUT:g} s")
        return arrivals, stirred

    def refuse(self, arrival: Arrival, code: str, reason: str) -> None:
        """Tells a member no, and closes."""
        arrival.channel.refuse(code, reason)
        self._note(arrival.address, reason)

    def close(self) -> None:
        """Closes the door, and on all who still wait outside."""
        for waiting in self._waiting.values():
            waiting.sock.close()
        self._waiting.clear()
        self._selector.close()
        self._listener.close()
        self._log_rest()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:  # nobody there any more, or no descriptor left: others may still be served
                return
            keep_from_children(sock).setblocking(False)
            if len(self._waiting) >= MAX_WAITING:
                self._turn_away(next(iter(self._waiting.values())), "too many strangers at once")
            deadline = time.monotonic() + OPENING_TIMEOUT
            waiting = _Waiting(sock, format_address(*address[:2]), deadline, Opening(self._credentials))
            self._waiting[sock] = waiting
            self._selector.register(sock, selectors.EVENT_READ)

    def _listen_to(self, waiting: _Waiting) -> Arrival | None:
        opening = waiting.opening
        try:
            data = waiting.sock.recv(opening.wants)
            if not data:
                raise ProtocolError("it closed before it said who it is")
            opening.feed(data)
            self._answer(waiting)
        except BlockingIOError:
            return None
        except (DistributedError, OSError) as exc:
            with suppress(OSError):  # what there is to say tells a cousin why; a stranger may be gone
                self._answer(waiting)
            self._turn_away(waiting, str(exc))
            return None
        if not opening.is_open or opening.purpose is None:
            return None
        self._release(waiting)
        return Arrival(Channel(waiting.sock, opening), opening.purpose, waiting.address)

    @staticmethod
    def _answer(waiting: _Waiting) -> None:
        outgoing = waiting.opening.outgoing
        if outgoing and waiting.sock.send(outgoing) < len(outgoing):
            raise ProtocolError("it does not read what it is told")  # a fresh socket has room for all of an opening
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
