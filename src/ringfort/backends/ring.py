"""`RingBackend`: ranks that know the addresses of all others beforehand. No rank is special."""

from __future__ import annotations

from collections.abc import Sequence

from ringfort.backends.mesh import MeshBackend
from ringfort.bootstrap.fixed_list import connect_fixed_list
from ringfort.bootstrap.links import links_over
from ringfort.bootstrap.terms import Connections, Terms
from ringfort.config import DistributedConfig, parse_address
from ringfort.errors import ConfigError
from ringfort.identity.credentials import Credentials


class RingBackend(MeshBackend):
    """A rank of a group with a fixed list of peers: `DistributedConfig(nodes=["host:port", ...], rank=...)`.

    A node may have several addresses; the first that can be bound or reached is used.
    """

    def __init__(self, config: DistributedConfig, *, credentials: Credentials | None = None) -> None:
        """Connect this rank to every other rank. Raises as `TcpBackend` does."""
        if not config.nodes or config.rank is None:
            why = 'missing; name every rank, such as nodes=["10.0.0.1:29500", ...], rank=0'
            raise ConfigError("nodes", list(config.nodes), why)
        nodes = [_addresses(node) for node in config.nodes]
        connections: Connections = {}
        if len(nodes) > 1:
            terms = Terms.of(config, credentials)
            credentials = terms.credentials
            connections = connect_fixed_list(config.rank, nodes, terms)
        links = links_over(config.rank, connections, config, credentials)
        super().__init__(config.rank, len(nodes), config, *links, is_measured=True)


def _addresses(node: str | Sequence[str]) -> list[tuple[str, int]]:
    return [parse_address(text, "nodes") for text in ([node] if isinstance(node, str) else node)]
