"""The links of a peer and what has been said on them: who is who, who floods, who is a clone. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ringfort.cluster.core.peer_messages import Hello, Member, Report

RATE: Final = 200.0
"""Messages a second that a peer may send for long. A cluster of a hundred that forms at once stays below."""
BURST: Final = 600.0
"""Messages that it may send at once."""
BAN: Final = 30.0
"""Seconds for which a peer that misbehaves is refused."""
MAX_BANNED: Final = 1024
"""Peers that are remembered as refused; the oldest are forgotten first."""


@dataclass
class Contact:
    """One link."""

    link: int
    node: str
    """What the handshake proved; empty where encryption is off."""
    initiated: bool
    opened: float
    hello: Hello | None = None
    report: Report | None = None
    """The latest. A contact counts from the first one on."""
    asked: float = 0.0
    """Our time when we sent the latest heartbeat that it has answered: it was surely there then."""
    their_time: float = 0.0
    """Its time in its latest heartbeat, which we echo."""
    their_time_came: float = 0.0
    """Our time then."""
    step: int = 0
    """How many steps of training its program has done, as its latest heartbeat says."""
    hung_up: str = ""
    """Why the other side closes this link, if it said so."""
    has_left: bool = False
    """The peer has closed its node, and said so."""
    _credit: float = BURST
    _credit_at: float = field(default=0.0)

    @property
    def peer(self) -> str:
        """The peer's id; empty before its hello."""
        return "" if self.hello is None else self.hello.member.peer

    def is_flooding(self, now: float) -> bool:
        """Counts a message. True when there are too many."""
        self._credit = min(BURST, self._credit + RATE * (now - self._credit_at)) - 1
        self._credit_at = now
        return self._credit < 0


class Contacts:
    """All links. At most one of a peer is in use."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self._links: dict[int, Contact] = {}
        self._used: dict[str, Contact] = {}
        self._banned: dict[str, float] = {}

    def opened(self, contact: Contact) -> None:
        """A new link."""
        self._links[contact.link] = contact

    def ended(self, link: int) -> tuple[Contact | None, bool]:
        """Forgets a link. Returns it, and whether it was the one in use with its peer and no other is open."""
        contact = self._links.pop(link, None)
        if contact is None or self._used.get(contact.peer) is not contact:
            return contact, False
        del self._used[contact.peer]
        return contact, not any(other.peer == contact.peer for other in self._links.values())

    def by_link(self, link: int) -> Contact | None:
        """The contact on `link`, if it is open."""
        return self._links.get(link)

    def get(self, peer: str) -> Contact | None:
        """The link in use with `peer`."""
        return self._used.get(peer)

    def __iter__(self) -> Iterator[Contact]:
        """The links in use."""
        return iter(self._used.values())

    def without_hello(self, opened_before: float) -> list[Contact]:
        """Links on which nobody has said who they are for too long."""
        return [c for c in self._links.values() if c.hello is None and c.opened < opened_before]

    def introduce(self, contact: Contact, hello: Hello) -> Contact | None:
        """Its first message says who is on this link. Returns the link that is one too many, if any: where both sides
        dialled, the link that the lower id dialled stays; of two that one side dialled, the newer."""
        contact.hello = hello
        other = self._used.get(contact.peer)
        if other is not None and other.initiated != contact.initiated:
            lower_dialled = contact.initiated == (self.me.peer < contact.peer)
            if not lower_dialled:
                return contact
        self._used[contact.peer] = contact
        return other

    def clone_host(self, member: Member) -> str | None:
        """The machine that already has the node's key, if `member` comes from another one."""
        node = node_of(member.peer)
        for known in (self.me, *(c.hello.member for c in self._used.values() if c.hello)):
            if node_of(known.peer) == node and known.host and member.host and known.host != member.host:
                return known.host
        return None

    def ban(self, peer: str, until: float) -> None:
        """Refuses `peer` for a while."""
        self._banned[peer] = until
        while len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]

    def is_banned(self, peer: str, now: float) -> bool:
        """Whether `peer` is refused."""
        return self._banned.get(peer, 0.0) > now


def node_of(peer: str) -> str:
    """The node's part of a peer id."""
    return peer.rpartition(".")[0]
