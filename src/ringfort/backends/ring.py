"""`RingBackend`: ranks that know the addresses of all others beforehand. No rank is special."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ringfort.backends.mesh import MeshBackend
from ringfort.backends.rendezvous import Channels, Terms, accept_higher, knock
from ringfort.backends.tcp import links_over, terms_for
from ringfort.config import DistributedConfig, parse_address
from ringfort.errors import ConfigError, TransportError
from ringfort.identity.credentials import Credentials
from ringfort.transport import tcp
from ringfort.transport.door import Door
from ringfort.transport.greeting import Meet


class RingBackend(MeshBackend):
    """A rank of a group with a fixed list of peers: `DistributedConfig(nodes=["host:port", ...], rank=...)`.

    A node may have several addresses; the first that can be bound or reached is used.
    """

    is_measured = True

    def __init__(self, config: DistributedConfig, *, credentials: Credentials | None = None) -> None:
        """Returns when this rank is linked to every other. Raises as `TcpBackend` does."""
        if not config.nodes or config.rank is None:
            raise ConfigError(
                "nodes", list(config.nodes), 'name every rank, such as nodes=["10.0.0.1:29500", ...], rank=0'
            )
        nodes = [_addresses(node) for node in config.nodes]
        rank, world_size = config.rank, len(nodes)
        channels: Channels = {}
        if world_size > 1:
            terms = terms_for(config, credentials)
            credentials = terms.credentials
            # Ranks that were given other lists must not meet by accident.
            token = blake2b(repr(nodes).encode(), digest_size=16).digest()
            meet = Meet(rank, world_size, token, terms.machine)
            door = _open_door(nodes[rank], terms)
            try:
                for lower in range(rank):
                    channels[lower] = knock(lower, nodes[lower], meet, terms)
                accept_higher(door, meet, channels, terms)
            except BaseException:
                for channel in channels.values():
                    channel.close()
                raise
            finally:
                door.close()
        super().__init__(rank, world_size, config, *links_over(rank, channels, config, credentials))


def _addresses(node: str | Sequence[str]) -> list[tuple[str, int]]:
    return [parse_address(text, "nodes") for text in ([node] if isinstance(node, str) else node)]


def _open_door(addresses: list[tuple[str, int]], terms: Terms) -> Door:
    failure: TransportError | None = None
    for host, port in addresses:
        try:
            return Door(tcp.listen(host, port), terms.credentials)
        except TransportError as exc:
            failure = exc
    assert failure is not None
    raise failure
