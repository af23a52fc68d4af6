"""How agents of a group that has formed come to be connected: each opens a port where the others know it, tells them
over the group, dials those below it and lets in those above it."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from typing import NamedTuple

from ringfort.backends.tcp import credentials_for
from ringfort.bootstrap.connection import Connection
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.rendezvous import Terms
from ringfort.cluster.discovery.interfaces import choose
from ringfort.cluster.discovery.system import list_interfaces
from ringfort.config import DEFAULT_PATIENCE, Environment, patience_of
from ringfort.context import DistributedContext
from ringfort.errors import HandshakeError, InvalidArgumentError, NoConnectionError, RendezvousTimeoutError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.hello import Calls
from ringfort.transport.machine import Machine

_LOOPBACK = "127.0.0.1"
_TURN = 0.05
"""Seconds at one listener before the next is looked at, where there are several."""
_UNSENT = 128 * 1024
"""Bytes that the kernel may hold of what has not left yet: what a small call waits behind, beside one frame."""


class Formed(NamedTuple):
    """What an agent knows of the others."""

    connections: dict[int, Connection]
    names: list[str]
    max_message_bytes: list[int]
    """What each of them accepts."""
    patience: float
    """Seconds for which a machine may answer nothing before its agents are lost."""


def connect(context: DistributedContext, name: str, max_message_bytes: int, timeout: float) -> Formed:
    """Called by all ranks of the group, at the same place among its collectives. Raises `RendezvousTimeoutError` with
    who did not come, `InvalidArgumentError` if two ranks have one name."""
    ways = context.group.routes
    credentials = ways.credentials if ways is not None else _own_credentials(context)
    terms = Terms.begin(timeout, credentials, Machine())
    rank, world_size = context.rank, context.world_size
    token = secrets.token_bytes(16)
    listeners: dict[str, Listener] = {}
    connections: dict[int, Connection] = {}
    try:
        # For each rank, where it may connect: only those above do.
        places = [
            [(host, _listener_at(host, listeners, terms)) for host in _hosts_for(context, peer)] if peer > rank else []
            for peer in range(world_size)
        ]
        own = b"" if credentials is None else credentials.identity.public_key
        # What is said over the group is said by its members: so this is whom to expect on each connection.
        said = context.all_gather_object([name, max_message_bytes, token, places, own], timeout=timeout)
        identities = [one[4] for one in said]
        names = [str(one[0]) for one in said]
        for peer, other in enumerate(names):
            if names.index(other) != peer:
                why = f"rank {names.index(other)} has it too; give every rank a name of its own"
                raise InvalidArgumentError("name", other, f"of rank {peer}: {why}")
        # Everybody comes to the lowest first and then to the next: so there is always one who lets in.
        for peer in range(rank):
            seen = None if ways is None else ways.hosts[peer][1]
            addresses = [(seen or host, port) for host, port in said[peer][3][rank]]
            connections[peer] = _connect(peer, addresses, Calls(rank, said[peer][2]), identities[peer], terms)
        _accept(list(listeners.values()), range(rank + 1, world_size), token, identities, connections, terms)
        context.barrier(timeout=max(0.01, terms.deadline - time.monotonic()))
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    finally:
        for listener in listeners.values():
            listener.close()
    patience = patience_of(context.config.patience, DEFAULT_PATIENCE)
    for connection in connections.values():
        tune(connection.sock, patience)
    return Formed(connections, names, [int(one[1]) for one in said], patience)


def _own_credentials(context: DistributedContext) -> Credentials | None:
    """For groups over engines that know nothing of ours."""
    return credentials_for(context.config, None) if context.world_size > 1 else None


def _hosts_for(context: DistributedContext, peer: int) -> list[str]:
    """The addresses of this rank that `peer` can reach."""
    ways, hosts = context.group.routes, context.group.hosts
    if ways is not None:
        return [ways.hosts[peer][0]]
    if hosts[peer] == hosts[context.rank]:
        return [_LOOPBACK]
    told = Environment.from_mapping().interfaces or ""
    return list(choose(list_interfaces(), [name.strip() for name in told.split(",") if name.strip()]).addresses)


def _listener_at(host: str, listeners: dict[str, Listener], terms: Terms) -> int:
    if host not in listeners:
        listeners[host] = Listener(tcp.listen(host, 0), terms.credentials)
    return listeners[host].address[1]


def _connect(peer: int, addresses: list[tuple[str, int]], purpose: Calls, identity: bytes, terms: Terms) -> Connection:
    """Raises `HandshakeError` if whoever answers has proved another identity. Tried again until the deadline: where
    strangers crowd the listener, a member may be pushed out with them."""
    while True:
        sock: socket.socket | None = None
        try:
            sock = tcp.connect(addresses, terms.deadline)
            connection = Connection.open(sock, terms.credentials, purpose, f"rank {peer}", terms.deadline)
            if connection.identity != identity:
                raise HandshakeError(f"another machine answers at the address of rank {peer}'s agent", peer=peer)
            return connection
        except BaseException as exc:
            if sock is not None:
                sock.close()
            if not isinstance(exc, NoConnectionError):
                raise
            if terms.is_over:
                raise RendezvousTimeoutError(
                    "connecting the agents", terms.timeout, missing=[peer], state=f"rank {peer}: {exc}"
                ) from exc
            time.sleep(_TURN)


def _accept(
    listeners: list[Listener],
    higher: range,
    token: bytes,
    identities: list[bytes],
    connections: dict[int, Connection],
    terms: Terms,
) -> None:
    """Lets in each of `higher` once, on a connection that has proved its identity."""
    while missing := [peer for peer in higher if peer not in connections]:
        if terms.is_over:
            state = f"missing: rank {', '.join(map(str, missing))}; every rank must make an agent"
            away = [one for listener in listeners for one in listener.turned_away]
            state += f". Turned away: {'; '.join(away)}" if away else ""
            raise RendezvousTimeoutError("connecting the agents", terms.timeout, missing=missing, state=state)
        for listener in listeners:
            until = terms.deadline if len(listeners) == 1 else min(terms.deadline, time.monotonic() + _TURN)
            for arrival in listener.wait(until)[0]:
                said = arrival.said
                if (
                    not isinstance(said, Calls)
                    or said.rank not in higher
                    or said.rank in connections
                    or not secrets.compare_digest(said.token, token)
                    or arrival.connection.identity != identities[said.rank]
                ):
                    listener.refuse(arrival, "group", "this port is for the agents of a group that has formed")
                    continue
                connections[said.rank] = arrival.connection


def tune(sock: socket.socket, patience: float) -> None:
    """What a link of agents needs beside what every data socket does, where the system has it."""
    tcp.keep_alive(sock, patience)
    if sys.platform.startswith("linux"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
