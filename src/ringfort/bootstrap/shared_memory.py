"""Shared memory between two ranks of one machine: the lower one creates it, the other opens it and confirms. If either
fails, both use their connection."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ringfort.bootstrap.terms import Connections
from ringfort.errors import ProtocolError, TransportError
from ringfort.transport.hello import Share, Shared
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Segment
from ringfort.transport.shm import ShmStream, stream_bytes
from ringfort.transport.tcp import tune

_log = logging.getLogger(__name__)


def share_with_neighbours(rank: int, ours: Machine, connections: Connections, deadline: float) -> dict[int, ShmStream]:
    """Return streams to the ranks of this machine that can share memory. Both sides of a connection call this.

    Raises `TransportError` if a peer goes away meanwhile.
    """
    near = [
        peer
        for peer, connection in sorted(connections.items())
        if ours.shares and connection.machine.shares and connection.machine.id == ours.id
    ]
    lower, higher = [peer for peer in near if peer < rank], [peer for peer in near if peer > rank]
    segments: dict[int, Segment | None] = {}
    shared: dict[int, Segment] = {}
    try:
        # All offers are sent before any answer is awaited: otherwise ranks could wait for each other in a circle.
        for peer in higher:
            segment = segments[peer] = _attempt(lambda: Segment.create(stream_bytes()))
            connections[peer].say(Share(segment and segment.offer), deadline)
        for peer in lower:
            said = connections[peer].hear(f"rank {peer}", deadline)
            if not isinstance(said, Share):
                raise ProtocolError(f"Unexpected message from rank {peer}, which should offer shared memory", peer=peer)
            offer = said.offer
            segment = segments[peer] = offer and _attempt(lambda offer=offer: Segment.open(offer, stream_bytes()))
            if segment is not None:
                shared[peer] = segment
            connections[peer].say(Shared(segment is not None), deadline)
        for peer in higher:
            said = connections[peer].hear(f"rank {peer}", deadline)
            if not isinstance(said, Shared):
                raise ProtocolError(f"Unexpected answer from rank {peer} to an offer of shared memory", peer=peer)
            segment = segments[peer]
            if said.is_open and segment is not None:
                segment.settle()
                shared[peer] = segment
    except BaseException:
        shared.clear()
        raise
    finally:
        for peer, segment in segments.items():
            if segment is not None and peer not in shared:
                segment.close()
    return {
        peer: ShmStream(
            tune(connections[peer].sock),
            segment,
            is_first=rank < peer,
            is_ordered=ours.is_ordered and connections[peer].machine.is_ordered,
        )
        for peer, segment in shared.items()
    }


def _attempt(make: Callable[[], Segment]) -> Segment | None:
    try:
        return make()
    except TransportError as exc:
        _log.debug("Shared memory is not used: %s", exc)
        return None
