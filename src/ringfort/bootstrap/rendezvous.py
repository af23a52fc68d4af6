"""Ranks that know one address, that of rank 0.

Rank 0 listens there. The others connect, repeatedly if need be, say which rank they are, and wait. When all have
joined, rank 0 tells each the addresses of the others, and they continue as with a fixed list. Every rank tells rank 0
when it has all its connections, and starts when rank 0 says that all ranks are ready: either every rank has a full
mesh, or every rank gets an error.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable
from contextlib import closing

from ringfort.bootstrap.accepting import accept_each
from ringfort.bootstrap.addresses import host_of, is_loopback, listening_host, reachable_from
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.connector import connect
from ringfort.bootstrap.fixed_list import accept_higher, connect_lower
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Address, Connections, Terms
from ringfort.errors import DistributedError, NoConnectionError, ProtocolError, RefusedError, RendezvousTimeoutError
from ringfort.transport.hello import Join, Meet, Ready, Refused, Welcome

# --- rank 0 -----------------------------------------------------------------------------------------------------------


def host_group(sock: socket.socket, world_size: int, terms: Terms, group: str = "") -> Connections:
    """Do rank 0's part: return a connection to every other rank of the `group`. Closes `sock`, the listening socket."""
    listener = Listener(terms.credentials, sock)
    connections: Connections = {}

    def place_of(connection: Connection) -> int | Refused:
        said = connection.purpose
        if not isinstance(said, Join):
            why = "this is rank 0 of a group that forms; join it with MASTER_ADDR and MASTER_PORT"
            return Refused("group", why)
        if said.group and group and said.group != group:
            return Refused("group", f"rank {said.rank} belongs to {said.group}, and this is rank 0 of {group}")
        if said.world_size != world_size:
            why = f"rank {said.rank} was started with world size {said.world_size}, rank 0 with {world_size}"
            return Refused("world_size", why)
        if said.rank == 0:
            return Refused("rank_taken", "rank 0 has joined already; give every process its own rank")
        if not 1 <= said.rank < world_size:
            return Refused("rank_range", f"rank {said.rank} cannot join: ranks are 0 to {world_size - 1}")
        connection.machine = said.machine
        return said.rank

    others = range(1, world_size)
    try:
        with closing(listener):
            what = "waiting for all ranks"
            for _ in accept_each(listener, others, connections, place_of, terms, what):
                pass
        joins = (connections[rank].purpose for rank in others)
        addresses = [("", 0), *((join.host, join.port) for join in joins if isinstance(join, Join))]
        # Later connections of a rank must prove the same key: otherwise any member could take its place.
        identities = [b"", *(connections[rank].identity for rank in others)] if terms.credentials else []
        _start(connections, Welcome(secrets.token_bytes(16), addresses, terms.machine, identities), terms.deadline)
    except BaseException as exc:
        _cancel(connections.values(), exc)
        raise
    return connections


def _start(connections: Connections, welcome: Welcome, deadline: float) -> None:
    """Tell all ranks the addresses, wait until each has its connections, and let them start."""
    for connection in connections.values():
        connection.say(welcome, deadline)
    for rank, connection in connections.items():
        connection.hear(rank, Ready, deadline)
    for connection in connections.values():
        connection.say(Ready(), deadline)


def _cancel(connections: Iterable[Connection], exc: BaseException) -> None:
    """Tell the ranks that wait why the group will not form."""
    reason = str(exc) if isinstance(exc, DistributedError) else f"a rank stopped ({type(exc).__name__})"
    for connection in connections:
        connection.refuse("failed", reason)


# --- the other ranks --------------------------------------------------------------------------------------------------


def join_group(rank: int, world_size: int, addresses: list[Address], terms: Terms, group: str = "") -> Connections:
    """Do the part of every other rank of the `group`: return a connection to each rank. Rank 0 is at one of
    `addresses`."""
    named = next((host for host, _ in addresses if not is_loopback(host)), addresses[0][0])
    listener = Listener(terms.credentials)
    connections: Connections = {}

    def join(sock: socket.socket) -> Join:
        # Only now, connected, is it known which interface leads to rank 0.
        local = host_of(sock.getsockname())
        port = listener.port_at(listening_host(named, local))
        return Join(rank, world_size, local, port, terms.machine, group)

    try:
        master = connections[0] = connect(0, addresses, join, terms)
        welcome = master.hear(0, Welcome, terms.deadline)
        if len(welcome.addresses) != world_size or len(welcome.identities) != (world_size if terms.credentials else 0):
            raise ProtocolError("Invalid welcome from rank 0: it is for another number of ranks", peer=0)
        master.machine = welcome.machine
        meet = Meet(rank, world_size, welcome.token, terms.machine)
        for lower in range(1, rank):
            address = reachable_from(master.sock, welcome.addresses[lower])
            connections[lower] = connect_lower(lower, [address], meet, terms, welcome.identities)
        accept_higher(listener, meet, connections, terms, welcome.identities)
        master.say(Ready(), terms.deadline)
        master.hear(0, Ready, terms.deadline)
    except BaseException as exc:
        if 0 in connections and isinstance(exc, DistributedError) and not isinstance(exc, RefusedError):
            _cancel([connections[0]], exc)
        for connection in connections.values():
            connection.close()
        if isinstance(exc, NoConnectionError) and terms.is_over:
            raise RendezvousTimeoutError(f"rank {rank} waiting for all ranks: {exc}", terms.timeout) from exc
        raise
    finally:
        listener.close()
    return connections
