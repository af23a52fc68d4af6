"""`Contacts`: the links of a peer and who is at their other end. Detects floods and clones. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ringfort.cluster.core.peer_messages import Beat, Hello, Member, Report

RATE: Final = 200.0
"""Messages per second that a peer may send for long. A cluster of a hundred peers that starts at once sends fewer."""
BURST: Final = 600.0
"""Messages that a peer may send at once."""
BAN: Final = 30.0
"""Seconds for which a misbehaving peer is refused."""
MAX_BANNED: Final = 1024
"""Refused peers that are remembered; the oldest are forgotten first."""


@dataclass
class Contact:
    """One link."""

    link: int
    node: str
    """The node that the handshake proved; empty with encryption off."""
    initiated: bool
    opened: float
    hello: Hello | None = None
    report: Report | None = None
    """The latest. A contact counts once it has sent a report."""
    asked: float = 0.0
    """When this peer sent the latest heartbeat that was answered: the other was certainly there then."""
    beat: Beat = field(default_factory=partial(Beat, 0.0))
    """Its latest heartbeat; sent at 0 if there is none yet."""
    beat_came: float = 0.0
    """When that heartbeat arrived, by this peer's clock."""
    hung_up: str = ""
    """Why the other side closes this link, if it has said so."""
    has_left: bool = False
    """The peer has closed its node and said so."""
    _credit: float = BURST
    _credit_at: float = 0.0

    @property
    def peer(self) -> str:
        """The peer's id; empty before its hello."""
        return "" if self.hello is None else self.hello.member.peer

    def is_flooding(self, now: float) -> bool:
        """Count a message. Return True if there are too many."""
        self._credit = min(BURST, self._credit + RATE * (now - self._credit_at)) - 1
        self._credit_at = now
        return self._credit < 0


class Contacts:
    """All links. At most one link of each peer is in use."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.links: dict[int, Contact] = {}
        """The open links by number, with or without a hello."""
        self._used: dict[str, Contact] = {}
        self._banned: dict[str, float] = {}

    def ended(self, link: int) -> tuple[Contact | None, bool]:
        """Remove a link. Return it, and whether it was in use and its peer has no other link."""
        contact = self.links.pop(link, None)
        if contact is None or self._used.get(contact.peer) is not contact:
            return contact, False
        del self._used[contact.peer]
        return contact, not any(other.peer == contact.peer for other in self.links.values())

    def get(self, peer: str) -> Contact | None:
        """Return the contact in use with `peer`."""
        return self._used.get(peer)

    def __iter__(self) -> Iterator[Contact]:
        """Iterate over the contacts in use."""
        return iter(self._used.values())

    def introduce(self, contact: Contact, hello: Hello) -> Contact | None:
        """Take the hello of a link. Return the redundant link with that peer, if any: if both sides dialled, the link
        that the lower id dialled stays; if one side dialled twice, the newer one."""
        contact.hello = hello
        other = self._used.get(contact.peer)
        if other is not None and other.initiated != contact.initiated:
            lower_dialled = contact.initiated == (self.me.peer < contact.peer)
            if not lower_dialled:
                return contact
        self._used[contact.peer] = contact
        return other

    def clone_host(self, member: Member) -> str | None:
        """Return the host that already uses the key of `member`, if `member` is on another host."""
        node = node_of(member.peer)
        for known in (self.me, *(c.hello.member for c in self._used.values() if c.hello)):
            if node_of(known.peer) == node and known.host and member.host and known.host != member.host:
                return known.host
        return None

    def ban(self, peer: str, until: float) -> None:
        """Refuse `peer` until the given time."""
        self._banned[peer] = until
        while len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]

    def is_banned(self, peer: str, now: float) -> bool:
        """Return whether `peer` is refused now."""
        return self._banned.get(peer, 0.0) > now


def node_of(peer: str) -> str:
    """Return the node's part of a peer id."""
    return peer.rpartition(".")[0]
