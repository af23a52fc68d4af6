"""`TcpBackend`: ranks that know the address of rank 0. `RingBackend` is for ranks that know all addresses."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.addresses import listen_as_master, parse_master
from ringfort.bootstrap.links import links_over
from ringfort.bootstrap.rendezvous import host_group, join_group
from ringfort.bootstrap.terms import Connections, Terms, check_place
from ringfort.config import DistributedConfig
from ringfort.identity.credentials import Credentials


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
        group: str = "",
    ) -> None:
        """Connect this rank to every other rank.

        `master` is `host:port` (IPv4, a name, or `[v6]:port`), or several that are tried in turn. Rank 0 may pass a
        `listener` that is bound already; it is closed in the end. `credentials` default to this user's own. Ranks that
        give another name of the `group` than rank 0 are refused.

        Raises `InvalidWorldSizeError`, `InvalidRankError` and `ConfigError` at once; `TransportError` if the port
        is not available or the name is unknown; `RendezvousTimeoutError` with the missing ranks; `RefusedError`, by its
        children, if rank 0 refuses this rank; `IdentityError` if the node's key or the cluster's secret cannot be read.
        """
        self._check_engine()
        config = config or DistributedConfig()
        check_place(rank, world_size)
        needs_address = world_size > 1 and (rank > 0 or listener is None)
        addresses = parse_master(master) if needs_address else []
        connections: Connections = {}
        if world_size > 1:
            terms = Terms.of(config, credentials)
            credentials = terms.credentials
            if rank == 0:
                connections = host_group(listener or listen_as_master(addresses[0]), world_size, terms, group)
            else:
                connections = join_group(rank, world_size, addresses, terms, group)
        elif listener is not None:
            listener.close()
        links = links_over(rank, connections, config, credentials)
        super().__init__(rank, world_size, config, *links, is_measured=True)
        self._start_engine(master)

    def _check_engine(self) -> None:
        """Raise `BackendUnavailableError` unless this machine has the engine of a subclass: before anything begins."""

    def _start_engine(self, master: str | Sequence[str] | None) -> None:
        """Give the group the collectives of the engine of a subclass."""
