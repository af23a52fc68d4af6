"""Shared memory between two ranks of one machine: the lower one creates it, the other opens it and confirms. If either
fails, both use their connection."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ringfort.bootstrap.terms import Connections
from ringfort.errors import TransportError
from ringfort.transport.hello import Share, Shared
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Segment
from ringfort.transport.shm import STREAM_BYTES, ShmStream
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
    segments: dict[int, Segment] = {}
    try:
        # All offers are sent before any answer is awaited: otherwise ranks could wait for each other in a circle.
        for peer in higher:
            segment = _attempt(lambda: Segment.create(STREAM_BYTES))
            if segment is not None:
                segments[peer] = segment
            connections[peer].say(Share(segment and segment.offer), deadline)
        for peer in lower:
            offer = connections[peer].hear(peer, Share, deadline).offer
            segment = offer and _attempt(lambda offer=offer: Segment.open(offer, STREAM_BYTES))
            if segment is not None:
                segments[peer] = segment
            connections[peer].say(Shared(segment is not None), deadline)
        for peer in higher:
            is_open = connections[peer].hear(peer, Shared, deadline).is_open
            if peer in segments:
                segments[peer].settle() if is_open else segments.pop(peer).close()
    except BaseException:
        for segment in segments.values():
            segment.close()
        raise
    return {
        peer: ShmStream(
            tune(connections[peer].sock),
            segment,
            is_first=rank < peer,
            is_ordered=ours.is_ordered and connections[peer].machine.is_ordered,
        )
        for peer, segment in segments.items()
    }


def _attempt(make: Callable[[], Segment]) -> Segment | None:
    try:
        return make()
    except TransportError as exc:
        _log.debug("Shared memory is not used: %s", exc)
        return None
