"""`TcpBackend`: ranks that know the address of rank 0. `RingBackend` is for ranks that know all addresses."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ringfort.backends.group import Routes
from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.more_connections import open_connections, wanted
from ringfort.bootstrap.rendezvous import Address, Connections, Terms, host_group, host_of, is_loopback, join_group
from ringfort.bootstrap.shared_memory import share_with_neighbours
from ringfort.config import DEFAULT_PATIENCE, DistributedConfig, check_world_size, parse_address, patience_of
from ringfort.errors import ConfigError, InvalidRankError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.machine import Machine, this_machine
from ringfort.transport.shm import LocalPoller
from ringfort.transport.stream import Poller, Stream

_log = logging.getLogger(__name__)


class TcpBackend(MeshBackend):
    """A rank of a group over TCP. Rank 0 listens at `master`; the others find it there, and then each other."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | Sequence[str] | None = None,
        *,
        config: DistributedConfig | None = None,
        listener: socket.socket | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Returns when every rank is linked to every other.

        `master` is `host:port` (IPv4, a name, or `[v6]:port`), or several that are tried in turn. Rank 0 may be handed
        a `listener` that is bound already; it is closed in the end. `credentials` are this user's own unless given.

        Raises `InvalidWorldSizeError`, `InvalidRankError` and `ConfigError` at once; `TransportError` if the port
        cannot be had or the name is unknown; `RendezvousTimeoutError` with who is missing; `RefusedError`, by its
        children, if rank 0 says no; `IdentityError` if the node's key or the cluster's secret cannot be read.
        """
        config = config or DistributedConfig()
        check_world_size(world_size)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(rank, world_size)
        addresses = _where(rank, world_size, master, listener)
        connections: Connections = {}
        if world_size == 1:
            if listener is not None:
                listener.close()
        else:
            terms = terms_for(config, credentials)
            credentials = terms.credentials
            if rank == 0:
                listener = listener or _listen_at(*addresses[0])
                connections = host_group(listener, world_size, terms)
            else:
                connections = join_group(rank, world_size, addresses, terms)
        super().__init__(
            rank, world_size, config, *links_over(rank, connections, config, credentials), is_measured=True
        )


def terms_for(config: DistributedConfig, credentials: Credentials | None) -> Terms:
    """The terms on which `config` lets a group form, from now on."""
    return Terms.begin(config.timeout, credentials_for(config, credentials), machine_for(config))


def machine_for(config: DistributedConfig) -> Machine:
    """What this process says of its machine."""
    return this_machine(shares=config.shared_memory == "on")


def credentials_for(config: DistributedConfig, given: Credentials | None) -> Credentials | None:
    """What to prove oneself with: what was given, else this user's own; None with encryption off."""
    if config.encryption == "off":
        _say_once()
        return None
    return given or Credentials.load()


@cache
def _say_once() -> None:
    _log.warning("encryption is off: whoever is on the network can read and change what the ranks say")


class Links(NamedTuple):
    """What a `MeshBackend` is made of."""

    streams: dict[int, Stream]
    poller: Poller
    machines: dict[int, Machine]
    connections: list[tuple[dict[int, Stream], Poller]]
    routes: Routes


def links_over(
    rank: int,
    connections: Connections,
    config: DistributedConfig,
    credentials: Credentials | None,
    *,
    deadline: float | None = None,
) -> Links:
    """Streams and their poller over open connections, on which machine each rank is, and further streams where they are
    wanted. It takes until `deadline` at most, or else `config.timeout` seconds. Raises `TransportError` if a peer has
    gone, `ConfigError` if one wants another number of connections."""
    machines = {peer: connection.machine for peer, connection in connections.items()}
    machines[rank] = machine_for(config)
    seconds = config.timeout if deadline is None else max(0.01, deadline - time.monotonic())
    terms = Terms.begin(seconds, credentials, machines[rank])
    hosts = {p: (host_of(c.sock.getsockname()), host_of(c.sock.getpeername())) for p, c in connections.items()}
    patience = patience_of(config.patience, DEFAULT_PATIENCE)
    sets = [connections]
    made: list[tuple[dict[int, Stream], Poller]] = []
    try:
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
    return streams, LocalPoller(sockets, local, patience) if local else tcp.SocketPoller(sockets, patience)


def _where(
    rank: int, world_size: int, master: str | Sequence[str] | None, listener: socket.socket | None
) -> list[Address]:
    if world_size == 1 or (rank == 0 and listener is not None):
        return []
    if not master:
        raise ConfigError("master", None, "say where rank 0 is, as host:port, or set MASTER_ADDR and MASTER_PORT")
    listed = [master] if isinstance(master, str) else master
    addresses = [parse_address(address, "master") for address in listed]
    if any(port == 0 for _, port in addresses):
        raise ConfigError("master", master, "port 0 is not one that others can connect to; choose one above 1023")
    return addresses


def _listen_at(host: str, port: int) -> socket.socket:
    return tcp.listen(_listening_host(host), port)


def _listening_host(host: str) -> str:
    """Where rank 0 listens: at the address it was given. A name that only its own machine takes for loopback (Debian's
    127.0.1.1) must be reachable for others too: listen on all interfaces."""
    if is_loopback(host):
        return host
    return "" if is_loopback(str(tcp.resolve(host, 0)[0][1][0])) else host
