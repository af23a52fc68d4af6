"""`TcpBackend`: ranks that know the address of rank 0. `RingBackend` is for ranks that know all addresses."""

from __future__ import annotations

import socket

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.rendezvous import Sockets, host_group, is_loopback, join_group
from ringfort.backends.simulated import check_world_size
from ringfort.config import DistributedConfig, parse_address
from ringfort.errors import ConfigError, InvalidRankError
from ringfort.transport import tcp
from ringfort.transport.stream import Stream


class TcpBackend(MeshBackend):
    """A rank of a group over TCP. Rank 0 listens at `master`; the others find it there, and then each other."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master: str | None = None,
        *,
        config: DistributedConfig | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Returns when every rank is linked to every other.

        `master` is `host:port` (IPv4, a name, or `[v6]:port`). Rank 0 may be handed a `listener` that is bound already;
        it is closed in the end. Raises `InvalidWorldSizeError`, `InvalidRankError` and `ConfigError` at once;
        `TransportError` if the port cannot be had or the name is unknown; `RendezvousTimeoutError` with who is missing;
        `RefusedError`, by its children, if rank 0 says no.
        """
        config = config or DistributedConfig()
        check_world_size(world_size)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRankError(rank, world_size)
        host, port = _where(rank, world_size, master, listener)
        sockets: Sockets = {}
        if world_size == 1:
            if listener is not None:
                listener.close()
        elif rank == 0:
            listener = listener or tcp.listen(_listening_host(host), port)
            sockets = host_group(listener, world_size, config.timeout)
        else:
            sockets = join_group(rank, world_size, host, port, config.timeout)
        super().__init__(rank, world_size, config, *links_over(sockets))


def links_over(sockets: Sockets) -> tuple[dict[int, Stream], tcp.SocketPoller]:
    """Streams and their poller over connected sockets."""
    streams: dict[int, Stream] = {peer: tcp.SocketStream(sock) for peer, sock in sorted(sockets.items())}
    return streams, tcp.SocketPoller(sockets)


def _where(rank: int, world_size: int, master: str | None, listener: socket.socket | None) -> tuple[str, int]:
    if world_size == 1 or (rank == 0 and listener is not None):
        return "", 0
    if master is None:
        raise ConfigError("master", None, "say where rank 0 is, as host:port, or set MASTER_ADDR and MASTER_PORT")
    host, port = parse_address(master, "master")
    if port == 0:
        raise ConfigError("master", master, "port 0 is not one that others can connect to; choose one above 1023")
    return host, port


def _listening_host(host: str) -> str:
    """Where rank 0 listens: at the address it was given. A name that only its own machine takes for loopback (Debian's
    127.0.1.1) must be reachable for others too: listen on all interfaces."""
    if is_loopback(host):
        return host
    return "" if is_loopback(str(tcp.resolve(host, 0)[0][1][0])) else host
