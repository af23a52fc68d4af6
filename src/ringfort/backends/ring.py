"""`RingBackend`: ranks that know the addresses of all others beforehand. No rank is special."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.rendezvous import Sockets, accept_higher, knock_lower
from ringfort.backends.tcp import links_over
from ringfort.config import DistributedConfig, parse_address
from ringfort.errors import ConfigError, TransportError
from ringfort.transport import tcp
from ringfort.transport.door import Door
from ringfort.transport.greeting import Meet


class RingBackend(MeshBackend):
    """A rank of a group with a fixed list of peers: `DistributedConfig(nodes=["host:port", ...], rank=...)`.

    A node may have several addresses; the first that can be bound or reached is used.
    """

    def __init__(self, config: DistributedConfig) -> None:
        """Returns when this rank is linked to every other. Raises as `TcpBackend` does."""
        if not config.nodes or config.rank is None:
            raise ConfigError(
                "nodes", list(config.nodes), 'name every rank, such as nodes=["10.0.0.1:29500", ...], rank=0'
            )
        nodes = [_addresses(node) for node in config.nodes]
        rank, world_size = config.rank, len(nodes)
        sockets: Sockets = {}
        if world_size > 1:
            deadline = time.monotonic() + config.timeout
            # Ranks that were given other lists must not meet by accident.
            token = blake2b(repr(nodes).encode(), digest_size=16).digest()
            meet = Meet(rank, world_size, token)
            door = _open_door(nodes[rank])
            try:
                knock_lower(nodes, meet, sockets, config.timeout, deadline)
                accept_higher(door, rank, meet, sockets, config.timeout, deadline)
            except BaseException:
                for sock in sockets.values():
                    sock.close()
                raise
            finally:
                door.close()
        super().__init__(rank, world_size, config, *links_over(sockets))


def _addresses(node: str | Sequence[str]) -> list[tuple[str, int]]:
    return [parse_address(text, "nodes") for text in ([node] if isinstance(node, str) else node)]


def _open_door(addresses: list[tuple[str, int]]) -> Door:
    failure: TransportError | None = None
    for host, port in addresses:
        try:
            return Door(tcp.listen(host, port))
        except TransportError as exc:
            failure = exc
    assert failure is not None
    raise failure
