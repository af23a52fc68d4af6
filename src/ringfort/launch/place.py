"""Where the ranks of a run meet: an address of the first machine that the others reach, and two ports there."""

from __future__ import annotations

import socket
from collections import Counter
from typing import TYPE_CHECKING

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.cluster.discovery.interfaces import Choice
from ringfort.cluster.discovery.system import list_interfaces
from ringfort.config import parse_address
from ringfort.launch.agreement_messages import Place
from ringfort.transport import tcp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfort.cluster.node import ClusterNode

LOOPBACK = "127.0.0.1"


def open_place(epoch: Epoch, node: ClusterNode | None) -> tuple[socket.socket, Place]:
    """Open the place where the ranks meet, on the first machine. Returns Ringfort's listening socket and the place.

    torch's own store cannot take over a socket, so its port is one that is free now. Raises `TransportError`.
    """
    if node is None or len(epoch.members) == 1:
        host = LOOPBACK
    else:
        links = [view.interface for view in node.snapshot() if view.peer in epoch.peers and not view.is_self]
        host = best_address([parse_address(address)[0] for address in node.addresses], links)
    with tcp.listen(host, 0) as other:  # still open when ours is opened, so that the ports differ
        torch_port = int(other.getsockname()[1])
        listener = tcp.listen(host, 0)
    return listener, Place(host, torch_port, int(listener.getsockname()[1]))


def best_address(mine: Sequence[str], links: Sequence[str]) -> str:
    """The address of this machine (`mine`, best first) on the interface that most links to the others use."""
    choice = Choice(tuple(list_interfaces()))
    used = Counter(links)

    def badness(host: str) -> tuple[int, bool, bool]:
        interface = choice.interface_of(host)
        # An address with a scope is valid on this machine only, and many programs cannot parse it.
        return -used[interface.name if interface else ""], "%" in host, ":" in host

    return min(mine, key=badness)


def interface_towards(host: str) -> str:
    """The interface of this machine that leads to `host`; empty if that is unknown."""
    interface = Choice(tuple(list_interfaces())).interface_of(host)
    return "" if interface is None else interface.name
