"""Connections between the agents of an existing group: each agent listens where the others can reach it, tells them
over the group, connects to those below it, and accepts those above it."""

from __future__ import annotations

import secrets
import socket
import sys
import time
from contextlib import closing
from typing import NamedTuple

from ringfort.bootstrap.accepting import accept_each
from ringfort.bootstrap.connection import Connection, closed_on_error
from ringfort.bootstrap.connector import connect as connect_to
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.terms import Connections, Terms, credentials_for
from ringfort.cluster.discovery.interfaces import choose
from ringfort.cluster.discovery.system import list_interfaces
from ringfort.config import DEFAULT_PATIENCE, Environment, patience_of
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.transport import tcp
from ringfort.transport.hello import Calls, Refused
from ringfort.transport.machine import Machine

_LOOPBACK = "127.0.0.1"
_UNSENT = 128 * 1024
"""Bytes that the kernel may hold unsent: what a small call waits behind, beside one frame."""


class Formed(NamedTuple):
    """What an agent knows of the others."""

    connections: Connections
    names: list[str]
    max_message_bytes: list[int]
    """What each of them accepts."""
    patience: float
    """Seconds for which a machine may not answer before its agents are lost."""


def connect(context: DistributedContext, name: str, max_message_bytes: int, timeout: float) -> Formed:
    """Connect the agents. All ranks of the group call this, at the same place among its collectives.

    Raises `RendezvousTimeoutError` with the missing ranks, `InvalidArgumentError` if two ranks have the same name.
    """
    ways = context.group.routes
    if ways is not None:
        credentials = ways.credentials
    else:  # a group over an engine that does not use ours
        credentials = credentials_for(context.config, None) if context.world_size > 1 else None
    terms = Terms.begin(timeout, credentials, Machine())
    rank, world_size = context.rank, context.world_size
    token = secrets.token_bytes(16)
    connections: Connections = {}
    with closing(Listener(credentials)) as listener, closed_on_error(connections):
        # For each higher rank, where it may connect.
        places = [
            [(host, listener.port_at(host)) for host in _hosts_for(context, peer)] if peer > rank else []
            for peer in range(world_size)
        ]
        own = b"" if credentials is None else credentials.identity.public_key
        # Only members can send over the group, so this tells which key to expect on each connection.
        said = context.all_gather_object([name, max_message_bytes, token, places, own], timeout=timeout)
        names = [str(one[0]) for one in said]
        for peer, other in enumerate(names):
            if names.index(other) != peer:
                why = f"rank {names.index(other)} has the same name; give every rank its own"
                raise InvalidArgumentError("name", other, f"rank {peer} has this name, and {why}")
        # Every rank connects to the lowest first and then to the next, so there is always one that accepts.
        for peer in range(rank):
            seen = None if ways is None else ways.hosts[peer][1]
            addresses = [(seen or host, port) for host, port in said[peer][3][rank]]
            purpose = Calls(rank, said[peer][2])
            connections[peer] = connect_to(peer, addresses, purpose, terms, identity=said[peer][4])
        accept_agents(listener, range(rank + 1, world_size), token, [one[4] for one in said], connections, terms)
        context.barrier(timeout=max(0.01, terms.deadline - time.monotonic()))
    patience = patience_of(context.config.patience, DEFAULT_PATIENCE)
    for connection in connections.values():
        tcp.keep_alive(connection.sock, patience)
        if sys.platform.startswith("linux"):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
    return Formed(connections, names, [int(one[1]) for one in said], patience)


def _hosts_for(context: DistributedContext, peer: int) -> list[str]:
    """Return the addresses of this rank that `peer` can reach."""
    ways, hosts = context.group.routes, context.group.hosts
    if ways is not None:
        return [ways.hosts[peer][0]]
    if hosts[peer] == hosts[context.rank]:
        return [_LOOPBACK]
    return list(choose(list_interfaces(), Environment.from_mapping().interfaces).addresses)


def accept_agents(
    listener: Listener, higher: range, token: bytes, identities: list[bytes], connections: Connections, terms: Terms
) -> None:
    """Accept each of `higher` once, on a connection that has proved the rank's identity."""

    def place_of(connection: Connection) -> int | Refused:
        said = connection.purpose
        if (
            not isinstance(said, Calls)
            or said.rank not in higher
            or not secrets.compare_digest(said.token, token)
            or connection.identity != identities[said.rank]
        ):
            return Refused("group", "this port is for the agents of a group that has formed")
        return said.rank

    what, advice = "connecting the agents", "make an agent on every rank"
    for _ in accept_each(listener, higher, connections, place_of, terms, what, advice=advice):
        pass
