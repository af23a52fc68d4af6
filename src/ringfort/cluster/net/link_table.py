"""`LinkTable`: the open control links of this peer, by number, with what is known about each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from ringfort.cluster.core.contacts import Contact
from ringfort.cluster.core.gossip import Gossip, encode
from ringfort.cluster.core.peer_messages import AnyMessage
from ringfort.cluster.net.control_link import ControlLink
from ringfort.cluster.net.host import clock

GOSSIP_RATE: Final = 20.0
"""Gossip messages per second that a peer may send for long."""
GOSSIP_BURST: Final = 400.0
"""Gossip messages that a peer may send at once: the last output of a failing program, from every rank."""


@dataclass
class LinkEntry:
    """One control link and what this node knows about it."""

    link: ControlLink
    dialled: str
    """The address that this side dialled; empty for an incoming link."""
    remote: str
    """The other end, as `host:port`."""
    peer: str = ""
    """The peer at the other end; empty until its hello."""
    _credit: float = GOSSIP_BURST
    _credit_at: float = field(default_factory=clock)

    def is_flooding(self, now: float) -> bool:
        """Count one gossip message. Return True if there are too many."""
        self._credit = min(GOSSIP_BURST, self._credit + GOSSIP_RATE * (now - self._credit_at)) - 1
        self._credit_at = now
        return self._credit < 0


class LinkTable:
    """Numbers links, sends on them, and follows those that were closed until their last messages have left."""

    def __init__(self) -> None:
        self.open: dict[int, LinkEntry] = {}
        """The links that have not ended, by number."""
        self._numbers = count(1)
        self._closing: list[ControlLink] = []

    def new_number(self) -> int:
        """Return a number that no link has had."""
        return next(self._numbers)

    def __iter__(self) -> Iterator[ControlLink]:
        """All links that may still be in use, including those that are closing."""
        return iter([*self._closing, *(entry.link for entry in self.open.values())])

    def send(self, number: int, message: AnyMessage | Gossip) -> None:
        """Send on one link; do nothing if it has ended."""
        if number in self.open:
            self.open[number].link.send(encode(message))

    def broadcast(self, contacts: Iterable[Contact], message: AnyMessage | Gossip) -> None:
        """Send on the links of `contacts`."""
        data = encode(message)
        for contact in contacts:
            self.open[contact.link].link.send(data)

    def close(self, number: int) -> LinkEntry | None:
        """Close a link after what was queued on it has been sent. Return it if it was open."""
        entry = self.open.pop(number, None)
        if entry is not None:
            entry.link.close()
            self._closing = [link for link in (*self._closing, entry.link) if not link.ended.is_set()]
        return entry

    def abort(self) -> None:
        """End all open links at once."""
        for entry in self.open.values():
            entry.link.abort()
