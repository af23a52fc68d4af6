"""From open connections to what a backend is made of: streams, through shared memory where ranks share a machine, and
further connections where they are wanted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from ringfort.bootstrap.addresses import host_of
from ringfort.bootstrap.more_connections import open_connections, peer_host, wanted
from ringfort.bootstrap.shared_memory import share_with_neighbours
from ringfort.bootstrap.terms import Connections, Terms, machine_for
from ringfort.config import DEFAULT_PATIENCE, DistributedConfig, patience_of
from ringfort.identity.credentials import Credentials
from ringfort.transport.machine import Machine
from ringfort.transport.shm import LocalPoller
from ringfort.transport.socket_streams import SocketPoller
from ringfort.transport.stream import Poller, Stream


class Routes(NamedTuple):
    """How the ranks of a group reach each other beside their links, for further connections."""

    hosts: Mapping[int, tuple[str, str]]
    """For each other rank, the two addresses of the path to it: this rank's, and its own."""
    credentials: Credentials | None
    """This rank's credentials; None with encryption off."""


class Links(NamedTuple):
    """What a `MeshBackend` is made of."""

    streams: dict[int, Stream]
    poller: Poller
    machines: dict[int, Machine]
    connections: list[tuple[dict[int, Stream], Poller]]
    """The further connections of each link."""
    routes: Routes


def links_over(
    rank: int,
    connections: Connections,
    config: DistributedConfig,
    credentials: Credentials | None,
    *,
    deadline: float | None = None,
) -> Links:
    """Turn open connections into links, by `deadline` or else within `config.timeout` seconds. All ranks call this.

    Raises `TransportError` if a peer has gone, `ConfigError` if one wants another number of connections.
    """
    machines = {peer: connection.machine for peer, connection in connections.items()}
    machines[rank] = machine_for(config)
    seconds = config.timeout if deadline is None else max(0.01, deadline - time.monotonic())
    terms = Terms.begin(seconds, credentials, machines[rank])
    patience = patience_of(config.patience, DEFAULT_PATIENCE)
    sets = [connections]
    made: list[tuple[dict[int, Stream], Poller]] = []
    try:
        hosts = {peer: (host_of(c.sock.getsockname()), peer_host(peer, c)) for peer, c in connections.items()}
        sets += open_connections(rank, connections, wanted(config.collective, machines), terms)
        for each in sets:
            made.append(_streams_over(rank, machines[rank], each, terms.deadline, patience))  # noqa: PERF401  # see below
    except BaseException:
        for streams, poller in made:
            for stream in streams.values():
                stream.close()
            poller.close()
        for each in sets[len(made) :]:
            for connection in each.values():
                connection.close()
        raise
    return Links(*made[0], machines, made[1:], Routes(hosts, credentials))


def _streams_over(
    rank: int, machine: Machine, connections: Connections, deadline: float, patience: float
) -> tuple[dict[int, Stream], Poller]:
    local = share_with_neighbours(rank, machine, connections, deadline)
    sockets = {peer: connection.sock for peer, connection in connections.items()}
    streams = {peer: local.get(peer) or connection.stream() for peer, connection in sorted(connections.items())}
    return streams, LocalPoller(sockets, local, patience) if local else SocketPoller(sockets, patience)
