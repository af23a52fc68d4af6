"""How ranks that are linked come to have several connections with each other: the lower one of two opens a port on the
interface that they meet on, tells the other over what they have, and lets it in there as often as agreed."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from hashlib import blake2b

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.rendezvous import Connections, Terms, host_of
from ringfort.config import MAX_CONNECTIONS, CollectiveConfig
from ringfort.errors import ConfigError, HandshakeError, NoConnectionError, ProtocolError, RendezvousTimeoutError
from ringfort.transport import tcp
from ringfort.transport.hello import ExtraConnection, OfferConnections
from ringfort.transport.machine import Machine, hosts_of

AUTO_CONNECTIONS = 4
"""What `auto` weighs against one. Where a connection is held back (by a limit a flow, by a window too small for the
way) four do nearly four times as much; a wire that four cannot fill is beyond what one process can."""

_LOOK = 0.1
"""Seconds between two looks whether those who are to come are still there."""


def wanted(config: CollectiveConfig, machines: Mapping[int, Machine]) -> int:
    """How many connections every two ranks have: the same at all. One where all of them share memory."""
    if len(set(hosts_of(machines))) == 1 and all(machine.shares for machine in machines.values()):
        return 1
    return AUTO_CONNECTIONS if config.connections == "auto" else config.connections


def open_connections(rank: int, connections: Connections, count: int, terms: Terms) -> list[Connections]:
    """The further sets of connections, `count - 1` of them. Called by all ranks, with nothing else said on
    `connections`.

    Raises `ConfigError` if a rank wants another number, `HandshakeError` if one has met another machine in the place of
    a rank, `TransportError` if one goes away.
    """
    token = secrets.token_bytes(16)
    members = _digest(rank, connections, terms)
    listeners: dict[str, Listener] = {}
    sets: list[Connections] = [{} for _ in range(count - 1)]
    try:
        # All speak before anybody listens: so nobody waits in a circle.
        for peer, connection in sorted(connections.items()):
            port = _listener_for(connection, listeners, terms).address[1] if sets and peer > rank else 0
            connection.say(OfferConnections(count, port, token, members), terms.deadline)
        said = {
            peer: _hear(peer, connection, count, members, terms) for peer, connection in sorted(connections.items())
        }
        # Everybody comes to the lowest first and then to the next: so there is always one who lets in.
        for peer in sorted(peer for peer in connections if sets and peer < rank):
            for number, others in enumerate(sets, start=1):
                others[peer] = _connect(rank, peer, connections[peer], number, said[peer], terms)
        for host, listener in listeners.items():
            _accept(
                listener,
                {p: c for p, c in connections.items() if p > rank and _own_host(c) == host},
                sets,
                token,
                terms,
            )
    except BaseException:
        for others in sets:
            for connection in others.values():
                connection.close()
        raise
    finally:
        for listener in listeners.values():
            listener.close()
    return sets


def _listener_for(connection: Connection, listeners: dict[str, Listener], terms: Terms) -> Listener:
    """Where the peer comes in: at the address that it knows us by, so that all goes the same way."""
    host = _own_host(connection)
    if host not in listeners:
        listeners[host] = Listener(tcp.listen(host, 0), terms.credentials)
    return listeners[host]


def _own_host(connection: Connection) -> str:
    return host_of(connection.sock.getsockname())


def _digest(rank: int, connections: Connections, terms: Terms) -> bytes:
    """Of the keys that all ranks have proved, in order: where nobody hands out a list of them (`RingBackend`), this is
    how the ranks notice that another machine holds a rank's place at some of them."""
    proved = {peer: connection.identity for peer, connection in connections.items()}
    proved[rank] = terms.credentials.identity.public_key if terms.credentials else b""
    return blake2b(b"".join(proved[peer] for peer in sorted(proved)), digest_size=16).digest()


def _hear(peer: int, connection: Connection, count: int, members: bytes, terms: Terms) -> OfferConnections:
    said = connection.hear(f"rank {peer}", terms.deadline)
    if not isinstance(said, OfferConnections):
        raise ProtocolError(f"rank {peer} says something else than how many connections it wants", peer=peer)
    if said.count != count:
        raise ConfigError("connections", count, f"rank {peer} has {said.count}; set the same on all ranks")
    if not secrets.compare_digest(said.members, members):
        why = f"rank {peer} and this rank are connected with different machines"
        raise HandshakeError(f"{why}; somebody else holds a rank's place at one of them", peer=peer)
    return said


def _connect(rank: int, peer: int, first: Connection, number: int, said: OfferConnections, terms: Terms) -> Connection:
    sock: socket.socket | None = None
    try:
        sock = tcp.connect([(host_of(first.sock.getpeername()), said.port)], terms.deadline, beside=first.sock)
        purpose = ExtraConnection(rank, number, said.token)
        connection = Connection.open(
            sock, terms.credentials, purpose, f"rank {peer}", terms.deadline, beside=first.sock
        )
        if connection.identity != first.identity:
            raise ProtocolError(f"somebody else answers at the port of rank {peer}", peer=peer)
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    connection.machine = first.machine
    return connection


def _accept(listener: Listener, higher: Connections, sets: list[Connections], token: bytes, terms: Terms) -> None:
    """Lets in each of `higher` once for each of `sets`. One whose first connection has ended does not come any more."""
    while missing := [peer for peer in higher if any(peer not in others for others in sets)]:
        if terms.is_over:
            raise RendezvousTimeoutError("opening further connections", terms.timeout, missing=missing)
        for peer in missing:
            if tcp.has_hung_up(higher[peer].sock):
                raise NoConnectionError(f"rank {peer} has gone before all connections were open", peer=peer)
        for arrival in listener.wait(min(terms.deadline, time.monotonic() + _LOOK))[0]:
            said, connection = arrival.said, arrival.connection
            if (
                not isinstance(said, ExtraConnection)
                or said.rank not in higher
                or not 1 <= said.number <= len(sets)
                or said.rank in sets[said.number - 1]
                or not secrets.compare_digest(said.token, token)
                or connection.identity != higher[said.rank].identity
            ):
                listener.refuse(arrival, "group", "this port is for further connections of a group that has formed")
                continue
            connection.machine = higher[said.rank].machine
            sets[said.number - 1][said.rank] = connection


assert AUTO_CONNECTIONS <= MAX_CONNECTIONS
