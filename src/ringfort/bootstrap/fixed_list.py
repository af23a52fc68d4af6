"""Ranks that know each other's addresses: every rank connects to those below it and accepts those above it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import closing, suppress
from hashlib import blake2b

from ringfort.bootstrap.accepting import accept_each
from ringfort.bootstrap.connection import Connection, closed_on_error
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Address, Connections, Terms
from ringfort.errors import NoConnectionError, TransportError
from ringfort.transport import tcp
from ringfort.transport.hello import Meet, Ready, Refused


def connect_fixed_list(rank: int, nodes: Sequence[Sequence[Address]], terms: Terms) -> Connections:
    """Return a connection to every other rank; `nodes` has the addresses of each. Raises as `connect_lower`."""
    # Ranks that were given different lists must not meet by accident.
    token = blake2b(repr(nodes).encode(), digest_size=16).digest()
    meet = Meet(rank, len(nodes), token, terms.machine)
    connections: Connections = {}
    with closing(_listen(nodes[rank], terms)) as listener, closed_on_error(connections):
        for lower in range(rank):
            connections[lower] = connect_lower(lower, nodes[lower], meet, terms)
        accept_higher(listener, meet, connections, terms)
    return connections


def _listen(addresses: Sequence[Address], terms: Terms) -> Listener:
    failure: TransportError | None = None
    for host, port in addresses:
        try:
            return Listener(terms.credentials, tcp.listen(host, port))
        except TransportError as exc:
            failure = exc
    assert failure is not None
    raise failure


def connect_lower(
    lower: int, addresses: Sequence[Address], meet: Meet, terms: Terms, identities: Sequence[bytes] = ()
) -> Connection:
    """Connect to the rank `lower`, and wait until it has accepted. `identities` has the ranks' keys, if known.

    Raises as `connector.connect`, and a `RefusedError` if the rank refuses this one.
    """
    identity = identities[lower] if identities else None
    connection = connect(lower, addresses, meet, terms, identity=identity)
    with closed_on_error({lower: connection}):
        connection.machine = connection.hear(lower, Ready, terms.deadline).machine
    return connection


def accept_higher(
    listener: Listener, ours: Meet, connections: Connections, terms: Terms, identities: Sequence[bytes] = ()
) -> None:
    """Accept a connection from every rank above. `identities` has the ranks' keys, if known: no other machine gets a
    rank's place. Raises `RendezvousTimeoutError`."""
    higher = range(ours.rank + 1, ours.world_size)

    def place_of(connection: Connection) -> int | Refused:
        said = connection.purpose
        if not isinstance(said, Meet):
            return Refused("group", f"this is rank {ours.rank}; join a new group at rank 0")
        if said.world_size != ours.world_size:
            why = f"rank {said.rank} was started with {said.world_size} ranks, rank {ours.rank} with {ours.world_size}"
            return Refused("world_size", why)
        if not secrets.compare_digest(said.token, ours.token):
            return Refused("group", f"rank {said.rank} belongs to another group, or was given another list of nodes")
        if said.rank not in higher:
            why = f"rank {said.rank} does not connect to rank {ours.rank}: check that each rank is used once"
            return Refused("rank_range", why)
        if identities and connection.identity != identities[said.rank]:
            return Refused("group", f"rank {said.rank} has joined at rank 0 from another machine")
        connection.machine = said.machine
        return said.rank

    what = f"rank {ours.rank} waiting for higher ranks"
    for _, connection in accept_each(listener, higher, connections, place_of, terms, what):
        with suppress(NoConnectionError):  # it has gone: it connects again, or is missing at the deadline
            connection.say(Ready(ours.machine), terms.deadline)
