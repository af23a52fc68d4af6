"""How ranks that know one address become a full mesh.

Rank 0 keeps the listener. The others connect with backoff, say who they are, and wait; when all are there each is told
where the others listen. Then every rank connects to those below it and accepts those above it, says so to rank 0, and
starts when rank 0 says that all are ready: so either every rank has a whole mesh or every rank gets an error.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Arrival, Listener
from ringfort.config import format_address
from ringfort.errors import (
    DistributedError,
    HandshakeError,
    NoConnectionError,
    ProtocolError,
    RefusedError,
    RendezvousTimeoutError,
)
from ringfort.identity.credentials import Credentials
from ringfort.identity.keypair import peer_id_of
from ringfort.transport import tcp
from ringfort.transport.hello import Join, Meet, Ready, Welcome
from ringfort.transport.machine import Machine

Connections = dict[int, Connection]
Address = tuple[str, int]

_PAUSE = 0.05
"""Seconds before a connection that closed too early is tried again."""


@dataclass(frozen=True)
class Terms:
    """What every part of a rendezvous needs: by when, with what to prove oneself (None with encryption off), and
    on which machine this is."""

    timeout: float
    deadline: float
    credentials: Credentials | None
    machine: Machine

    @classmethod
    def begin(cls, timeout: float, credentials: Credentials | None, machine: Machine) -> Terms:
        """Terms whose time starts now."""
        return cls(timeout, time.monotonic() + timeout, credentials, machine)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline


# --- rank 0 -----------------------------------------------------------------------------------------------------------


def host_group(sock: socket.socket, world_size: int, terms: Terms) -> Connections:
    """Rank 0's part: a connection to every other rank. Closes `sock`."""
    listener = Listener(sock, terms.credentials)
    seated: dict[int, tuple[Connection, Join]] = {}
    try:
        while len(seated) < world_size - 1:
            arrivals, _ = listener.wait(terms.deadline)
            for arrival in arrivals:
                _clear_seats(listener, seated)
                _seat(listener, arrival, world_size, seated)
            _clear_seats(listener, seated)
            if terms.is_over and len(seated) < world_size - 1:
                raise _incomplete("waiting for all ranks to come", terms, range(1, world_size), seated, listener)
        for connection, _ in seated.values():
            listener.forget(connection)
    except BaseException as exc:
        _dismiss((connection for connection, _ in seated.values()), exc)
        raise
    finally:
        listener.close()
    addresses = [("", 0), *((seated[rank][1].host, seated[rank][1].port) for rank in range(1, world_size))]
    connections = {rank: connection for rank, (connection, _) in seated.items()}
    # Later links of a rank are bound to what it proved here: else any member could come in its place.
    identities = [b"", *(connections[rank].identity for rank in range(1, world_size))] if terms.credentials else []
    _start(connections, Welcome(secrets.token_bytes(16), addresses, terms.machine, identities), terms.deadline)
    return connections


def _clear_seats(listener: Listener, seated: dict[int, tuple[Connection, Join]]) -> None:
    """Frees the seats of those who have gone before the welcome: they may come again."""
    for rank, (connection, _) in tuple(seated.items()):
        if tcp.is_ended(connection.sock):
            del seated[rank]
            listener.forget(connection)
            connection.close()


def _seat(listener: Listener, arrival: Arrival, world_size: int, seated: dict[int, tuple[Connection, Join]]) -> None:
    said = arrival.said
    if not isinstance(said, Join):
        listener.refuse(
            arrival, "group", "this is rank 0 of a group that forms; join it with MASTER_ADDR and MASTER_PORT"
        )
    elif said.world_size != world_size:
        why = f"rank {said.rank} was started with world size {said.world_size}, rank 0 with {world_size}"
        listener.refuse(arrival, "world_size", why)
    elif not 1 <= said.rank < world_size:
        taken = "rank 0 is this process" if said.rank == 0 else f"ranks are 0 to {world_size - 1}"
        listener.refuse(
            arrival, "rank_taken" if said.rank == 0 else "rank_range", f"rank {said.rank} cannot join: {taken}"
        )
    elif said.rank in seated:
        other = format_address(*seated[said.rank][0].sock.getpeername()[:2])
        why = f"rank {said.rank} is taken by {other}; give every process a rank of its own"
        listener.refuse(arrival, "rank_taken", why)
    else:
        arrival.connection.machine = said.machine
        seated[said.rank] = (arrival.connection, said)
        listener.watch(arrival.connection)


def _start(connections: Connections, welcome: Welcome, deadline: float) -> None:
    """Tells all where the others are, waits until each has its links, and lets them start."""
    try:
        for connection in connections.values():
            connection.say(welcome, deadline)
        for rank, connection in connections.items():
            if not isinstance(connection.hear(f"rank {rank}", deadline), Ready):
                raise ProtocolError(f"rank {rank} did not say that it is ready", peer=rank)
        for connection in connections.values():
            connection.say(Ready(), deadline)
    except BaseException as exc:
        _dismiss(connections.values(), exc)
        raise


def _dismiss(connections: Iterable[Connection], exc: BaseException) -> None:
    """Tells those who wait that the group will not be, and why."""
    reason = str(exc) if isinstance(exc, DistributedError) else f"a rank stopped ({type(exc).__name__})"
    for connection in connections:
        connection.refuse("failed", reason)


# --- the other ranks --------------------------------------------------------------------------------------------------


def join_group(rank: int, world_size: int, addresses: list[Address], terms: Terms) -> Connections:
    """The part of every other rank: a connection to each of the others. Rank 0 is at one of `addresses`."""
    name = f"rank 0 at {' or '.join(format_address(*address) for address in addresses)}"
    named = next((host for host, _ in addresses if not is_loopback(host)), addresses[0][0])
    listeners: list[Listener] = []
    connections: Connections = {}

    def join(sock: socket.socket) -> Join:
        # Only now, connected, is it known which interface leads to rank 0.
        local = host_of(sock.getsockname())
        if not listeners:
            listeners.append(Listener(tcp.listen(_listening_host(named, local), 0), terms.credentials))
        return Join(rank, world_size, local, listeners[0].address[1], terms.machine)

    try:
        master = connections[0] = _open(rank, addresses, join, 0, name, terms)
        welcome = master.hear(name, terms.deadline)
        if not isinstance(welcome, Welcome) or not _is_for(welcome, world_size, terms):
            raise ProtocolError(f"{name} answered something else than a welcome", peer=0)
        master.machine = welcome.machine
        meet = Meet(rank, world_size, welcome.token, terms.machine)
        for lower in range(1, rank):
            way = _reachable(welcome.addresses[lower], master.sock)
            connections[lower] = connect(lower, [way], meet, terms, welcome.identities)
        accept_higher(listeners[0], meet, connections, terms, welcome.identities)
        master.say(Ready(), terms.deadline)
        master.hear(name, terms.deadline)
    except BaseException as exc:
        if 0 in connections and isinstance(exc, DistributedError) and not isinstance(exc, RefusedError):
            _dismiss([connections[0]], exc)
        for connection in connections.values():
            connection.close()
        if isinstance(exc, NoConnectionError) and terms.is_over:
            raise RendezvousTimeoutError(f"rank {rank} waiting for all ranks to come: {exc}", terms.timeout) from exc
        raise
    finally:
        for listener in listeners:
            listener.close()
    return connections


def _is_for(welcome: Welcome, world_size: int, terms: Terms) -> bool:
    return len(welcome.addresses) == world_size == (len(welcome.identities) if terms.credentials else world_size)


def connect(
    lower: int, addresses: list[Address], meet: Meet, terms: Terms, identities: Sequence[bytes] = ()
) -> Connection:
    """A connection to the rank `lower`, which is at one of `addresses`. `identities` are the ranks', where they are
    known: whoever answers must have proved that of `lower`."""
    name = f"rank {lower}"
    connection = _open(meet.rank, addresses, lambda _: meet, lower, name, terms)
    try:
        if identities and connection.identity != identities[lower]:
            why = f"another machine answers at the address of {name}: {peer_id_of(connection.identity)}"
            raise HandshakeError(f"{why}, not {peer_id_of(identities[lower])}", peer=lower)
        answer = connection.hear(name, terms.deadline)
        if not isinstance(answer, Ready):
            raise ProtocolError(f"{name} answered a hello with something else", peer=lower)
        connection.machine = answer.machine
    except BaseException:
        connection.close()
        raise
    return connection


def _open(
    me: int,
    addresses: list[Address],
    purpose: Callable[[socket.socket], Join | Meet],
    rank: int,
    name: str,
    terms: Terms,
) -> Connection:
    """A connection to `rank`. Tried again until the deadline if it closes before it is open: where strangers crowd the
    listener, a member may be pushed out with them."""
    while True:
        sock: socket.socket | None = None
        try:
            sock = tcp.connect(addresses, terms.deadline)
            return Connection.open(sock, terms.credentials, purpose(sock), name, terms.deadline)
        except BaseException as exc:
            if sock is not None:
                sock.close()
            if not isinstance(exc, NoConnectionError):
                raise
            if terms.is_over:
                why = f"rank {me} looking for {name}: {exc}"
                raise RendezvousTimeoutError(why, terms.timeout, missing=[rank]) from exc
            time.sleep(_PAUSE)


def accept_higher(
    listener: Listener, ours: Meet, connections: Connections, terms: Terms, identities: Sequence[bytes] = ()
) -> None:
    """Lets in every rank above. Those already in are watched: one that dies before all are there is expected again.
    `identities` are the ranks', where they are known: a rank's place is for no other."""
    higher = range(ours.rank + 1, ours.world_size)
    while any(other not in connections for other in higher):
        arrivals, stirred = listener.wait(terms.deadline)
        for sock in stirred:
            other = next(other for other in higher if other in connections and connections[other].sock is sock)
            listener.forget(connections[other])
            if tcp.is_ended(sock):  # else it has begun to work, which is no business of ours
                connections.pop(other).close()
        for arrival in arrivals:
            refusal = _why_not(arrival, ours, connections, higher, identities)
            if refusal:
                listener.refuse(arrival, *refusal)
                continue
            assert isinstance(arrival.said, Meet)
            with suppress(NoConnectionError):  # it has gone: it comes again, or is missed at the deadline
                arrival.connection.say(Ready(ours.machine), terms.deadline)
            arrival.connection.machine = arrival.said.machine
            connections[arrival.said.rank] = arrival.connection
            listener.watch(arrival.connection)
        if terms.is_over and any(other not in connections for other in higher):
            raise _incomplete(f"rank {ours.rank} waiting for higher ranks", terms, higher, connections, listener)


def _why_not(
    arrival: Arrival, ours: Meet, connections: Connections, higher: range, identities: Sequence[bytes]
) -> tuple[str, str] | None:
    said = arrival.said
    if not isinstance(said, Meet):
        return "group", f"this is rank {ours.rank}; a new group is joined at rank 0"
    if said.world_size != ours.world_size:
        return "world_size", f"rank {said.rank} knows {said.world_size} ranks, rank {ours.rank} {ours.world_size}"
    if not secrets.compare_digest(said.token, ours.token):
        return "group", f"rank {said.rank} belongs to another group, or was given another list of nodes"
    if said.rank not in higher:
        return "rank_range", f"rank {said.rank} does not connect to rank {ours.rank}: check that each rank is used once"
    if identities and arrival.connection.identity != identities[said.rank]:
        return "group", f"rank {said.rank} has come to rank 0 from another machine than this one"
    if said.rank in connections:
        return "rank_taken", f"rank {said.rank} is taken; give every process a rank of its own"
    return None


def _incomplete(
    what: str, terms: Terms, wanted: Iterable[int], have: Iterable[int], listener: Listener
) -> RendezvousTimeoutError:
    present = set(have)
    missing = [rank for rank in wanted if rank not in present]
    lines = [
        f"missing: rank {', '.join(map(str, missing))}",
        *(f"turned away: {who}" for who in listener.turned_away),
        "to try: start the missing ranks with the same address and world size",
    ]
    return RendezvousTimeoutError(what, terms.timeout, missing=missing, state="\n".join(lines))


# --- addresses --------------------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine has."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: tuple[str, ...]) -> str:
    """The host of a socket's address; a link-local one needs the interface."""
    host = address[0]
    return f"{host}%{address[3]}" if host.lower().startswith("fe80:") and "%" not in host else host


def _listening_host(master: str, local: str) -> str:
    """Where a rank listens: on the interface that leads to rank 0. If that is loopback only because a host name is so
    resolved on its own machine (Debian's 127.0.1.1), ranks elsewhere come in through another: listen on all."""
    return "" if is_loopback(local) and not is_loopback(master) else local


def _reachable(address: Address, master: socket.socket) -> Address:
    """Another rank's address as seen from here. Loopback means rank 0's machine, which we know how to reach; a
    link-local address needs the name of our own interface."""
    host, port = address
    mine = master.getsockname()
    if is_loopback(host) and not is_loopback(mine[0]):
        host = master.getpeername()[0]
    if host.lower().startswith("fe80:") and len(mine) == 4:  # a scope in it is that of the other machine
        host = f"{host.partition('%')[0]}%{mine[3]}"
    return host, port
