"""Members of clusters, and two sides of a handshake that talk over a wire which may change what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

from ringfort.errors import DistributedError
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import NodeIdentity
from ringfort.identity.namespace import NetworkNamespace
from ringfort.transport.handshake import Handshake
from ringfort.transport.hello import Hello, Join

CLUSTER = NetworkNamespace.generate("lab")
PURPOSE = Join(1, 2, "a-host-name-that-shows", 54321)

Change = Callable[[bytes, int], bytes]
"""What becomes of some bytes that begin at an offset of their direction."""


def member(namespace: NetworkNamespace = CLUSTER) -> Credentials:
    """A process of a node of its own."""
    return Credentials(NodeIdentity.ephemeral(), namespace)


def impostor(namespace: NetworkNamespace = CLUSTER) -> Credentials:
    """Somebody who knows a cluster's public network id and not its secret."""
    forged = NetworkNamespace.generate(namespace.name)
    forged.network_id = namespace.network_id
    return member(forged)


def handshake_of(version: int, credentials: Credentials | None, purpose: Hello | None = None) -> Handshake:
    """One side of a handshake that has another version of the protocol."""
    return type("OtherHandshake", (Handshake,), {"version": version})(credentials, purpose)


def as_it_is(data: bytes, _: int) -> bytes:
    return data


def flipped(place: int, mask: int) -> Change:
    """Changes bits of one byte."""

    def change(data: bytes, offset: int) -> bytes:
        if not offset <= place < offset + len(data):
            return data
        changed = bytearray(data)
        changed[place - offset] ^= mask
        return bytes(changed)

    return change


class Side:
    """One side, what it has said so far, and what it made of the other."""

    def __init__(self, handshake: Handshake, change: Change = as_it_is, sizes: Iterator[int] | None = None) -> None:
        self.handshake = handshake
        self.said = b""
        self.error: DistributedError | None = None
        self.unread = b""
        self._change = change
        self._sizes = sizes or cycle([1 << 20])

    def speak(self) -> bytes:
        """What it has to say now, as it arrives."""
        data = bytes(self.handshake.outgoing)
        self.handshake.outgoing.clear()
        arriving = self._change(data, len(self.said))
        self.said += data
        return arriving

    def listen(self, data: bytes) -> None:
        """Reads as much as it wants, in pieces, until it is open or has had enough."""
        self.unread += data
        while self.unread and not self.handshake.is_open and self.error is None:
            count = min(next(self._sizes), self.handshake.wants)
            assert count > 0, "it waits for nothing"
            piece, self.unread = self.unread[:count], self.unread[count:]
            try:
                self.handshake.feed(piece)
            except DistributedError as exc:
                self.error = exc


def converse(initiator: Side, responder: Side) -> None:
    """Carries what both say until neither says anything more."""
    while True:
        there = initiator.speak()
        responder.listen(there)
        back = responder.speak()
        initiator.listen(back)
        if not there and not back and not initiator.handshake.outgoing:
            return


def opened(
    credentials: Credentials | None = None, other: Credentials | None = None, purpose: Join = PURPOSE
) -> tuple[Side, Side]:
    """Both sides of a handshake that nobody disturbed."""
    initiator = Side(Handshake(credentials or member(), purpose))
    responder = Side(Handshake(other or member()))
    converse(initiator, responder)
    return initiator, responder
