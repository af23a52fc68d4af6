"""Several connections per link: of two connected ranks, the lower one listens on the interface that they are connected
through, tells the other the port (`OfferConnections`), and accepts the agreed number (`ExtraConnection`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import closing
from hashlib import blake2b

from ringfort.bootstrap.accepting import accept_each
from ringfort.bootstrap.addresses import host_of
from ringfort.bootstrap.connection import Connection, closed_on_error
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Connections, Terms
from ringfort.config import CollectiveConfig
from ringfort.errors import ConfigError, HandshakeError, NoConnectionError
from ringfort.transport import tcp
from ringfort.transport.hello import ExtraConnection, OfferConnections, Refused
from ringfort.transport.machine import Machine, hosts_of


def wanted(config: CollectiveConfig, machines: Mapping[int, Machine]) -> int:
    """Return how many connections every two ranks have, the same at all ranks: one if all of them share memory. With
    `auto` 0, which is one too: large all-reduces have channels of their own (collectives/channels.py)."""
    if len(set(hosts_of(machines))) == 1 and all(machine.shares for machine in machines.values()):
        return 1
    return 0 if config.connections == "auto" else config.connections


def open_connections(rank: int, connections: Connections, count: int, terms: Terms) -> list[Connections]:
    """Return `count - 1` further sets of connections. All ranks call this, with no other message on `connections`.

    Raises `ConfigError` if a rank wants another number, `HandshakeError` if the ranks are connected to different
    machines in the place of one rank, `TransportError` if a rank goes away.
    """
    token = secrets.token_bytes(16)
    members = _digest(rank, connections, terms)
    listener = Listener(terms.credentials)
    lower = sorted(peer for peer in connections if peer < rank)
    higher = sorted(peer for peer in connections if peer > rank)
    made: dict[tuple[int, int], Connection] = {}  # by rank and number

    def place_of(connection: Connection) -> tuple[int, int] | Refused:
        said = connection.purpose
        if (
            not isinstance(said, ExtraConnection)
            or said.rank not in higher
            or not 1 <= said.number < count
            or not secrets.compare_digest(said.token, token)
            or connection.identity != connections[said.rank].identity
        ):
            return Refused("group", "this port is for further connections of a group that has formed")
        return said.rank, said.number

    def check(peer: int) -> None:
        if tcp.has_hung_up(connections[peer].sock):
            raise NoConnectionError(f"Rank {peer} closed its connection before all connections were open", peer=peer)

    with closing(listener), closed_on_error(made):
        # All send before any rank reads: otherwise ranks could wait for each other in a circle.
        for peer, connection in sorted(connections.items()):
            # Listen at the address that the peer knows this rank by, so that all connections take the same path.
            port = listener.port_at(host_of(connection.sock.getsockname())) if count > 1 and peer in higher else 0
            connection.say(OfferConnections(count, port, token, members), terms.deadline)
        offers = {peer: _hear_offer(peer, connections[peer], count, members, terms) for peer in (*lower, *higher)}
        # Every rank connects to the lowest first and then to the next, so there is always one that accepts.
        for peer in lower:
            first, offer = connections[peer], offers[peer]
            address = (peer_host(peer, first), offer.port)
            for number in range(1, count):
                hello = ExtraConnection(rank, number, offer.token)
                made[peer, number] = connect(peer, [address], hello, terms, identity=first.identity, beside=first.sock)
        expected = [(peer, number) for peer in higher for number in range(1, count)]
        what, advice = "opening further connections", "the log of the missing ranks says why"
        for _ in accept_each(listener, expected, made, place_of, terms, what, advice=advice, check=check):
            pass
    for (peer, _), connection in made.items():
        connection.machine = connections[peer].machine
    return [{peer: made[peer, number] for peer in connections} for number in range(1, count)]


def peer_host(peer: int, connection: Connection) -> str:
    """Return the address of a peer. Raise `NoConnectionError` if the connection has ended: a socket that was shut down,
    here or there, has no peer any more."""
    try:
        return host_of(connection.sock.getpeername())
    except OSError as exc:
        raise NoConnectionError(f"The connection to rank {peer} ended before the group had formed", peer=peer) from exc


def _digest(rank: int, connections: Connections, terms: Terms) -> bytes:
    """Return a digest of the keys that all ranks have proved, in order. Where nobody hands out a list of keys
    (`RingBackend`), it reveals that some rank is connected to another machine in a rank's place."""
    proved = {peer: connection.identity for peer, connection in connections.items()}
    proved[rank] = terms.credentials.identity.public_key if terms.credentials else b""
    return blake2b(b"".join(proved[peer] for peer in sorted(proved)), digest_size=16).digest()


def _hear_offer(peer: int, connection: Connection, count: int, members: bytes, terms: Terms) -> OfferConnections:
    offer = connection.hear(peer, OfferConnections, terms.deadline)
    if offer.count != count:
        theirs = offer.count or "auto"
        raise ConfigError("connections", count or "auto", f"rank {peer} has {theirs}; set the same on all ranks")
    if not secrets.compare_digest(offer.members, members):
        why = f"Rank {peer} and this rank are connected with different machines"
        raise HandshakeError(f"{why}; at one of the two, another machine has taken the place of a rank", peer=peer)
    return offer
