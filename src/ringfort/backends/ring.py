"""`RingBackend`: ranks that know the addresses of all others beforehand. No rank is special."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.tcp import links_over, terms_for
from ringfort.bootstrap.listener import Listener
from ringfort.bootstrap.rendezvous import Connections, Terms, accept_higher, connect
from ringfort.config import DistributedConfig, parse_address
from ringfort.errors import ConfigError, TransportError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.hello import Meet


class RingBackend(MeshBackend):
    """A rank of a group with a fixed list of peers: `DistributedConfig(nodes=["host:port", ...], rank=...)`.

    A node may have several addresses; the first that can be bound or reached is used.
    """

    def __init__(self, config: DistributedConfig, *, credentials: Credentials | None = None) -> None:
        """Returns when this rank is linked to every other. Raises as `TcpBackend` does."""
        if not config.nodes or config.rank is None:
            raise ConfigError(
                "nodes", list(config.nodes), 'name every rank, such as nodes=["10.0.0.1:29500", ...], rank=0'
            )
        nodes = [_addresses(node) for node in config.nodes]
        rank, world_size = config.rank, len(nodes)
        connections: Connections = {}
        if world_size > 1:
            terms = terms_for(config, credentials)
            credentials = terms.credentials
            # Ranks that were given other lists must not meet by accident.
            token = blake2b(repr(nodes).encode(), digest_size=16).digest()
            meet = Meet(rank, world_size, token, terms.machine)
            listener = _open_listener(nodes[rank], terms)
            try:
                for lower in range(rank):
                    connections[lower] = connect(lower, nodes[lower], meet, terms)
                accept_higher(listener, meet, connections, terms)
            except BaseException:
                for connection in connections.values():
                    connection.close()
                raise
            finally:
                listener.close()
        super().__init__(
            rank, world_size, config, *links_over(rank, connections, config, credentials), is_measured=True
        )


def _addresses(node: str | Sequence[str]) -> list[tuple[str, int]]:
    return [parse_address(text, "nodes") for text in ([node] if isinstance(node, str) else node)]


def _open_listener(addresses: list[tuple[str, int]], terms: Terms) -> Listener:
    failure: TransportError | None = None
    for host, port in addresses:
        try:
            return Listener(tcp.listen(host, port), terms.credentials)
        except TransportError as exc:
            failure = exc
    assert failure is not None
    raise failure
