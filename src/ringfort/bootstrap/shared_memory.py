"""How two ranks of one machine come to speak through memory: the lower one makes it, the other opens it and says so.
Where that does not work they stay on their connection."""

from __future__ import annotations

import logging

from ringfort.bootstrap.terms import Connections
from ringfort.errors import ProtocolError, TransportError
from ringfort.transport.hello import Share, Shared
from ringfort.transport.machine import Machine
from ringfort.transport.segment import Segment
from ringfort.transport.shm import ShmStream, stream_bytes
from ringfort.transport.tcp import tune

_log = logging.getLogger(__name__)


def share_with_neighbours(rank: int, ours: Machine, connections: Connections, deadline: float) -> dict[int, ShmStream]:
    """Streams to the ranks of this machine that are willing and able. Both sides of a connection call this. Raises
    `TransportError` if a peer goes away meanwhile."""
    near = [
        peer
        for peer, connection in sorted(connections.items())
        if ours.shares and connection.machine.shares and connection.machine.id == ours.id
    ]
    segments: dict[int, Segment] = {}
    shared: dict[int, Segment] = {}
    try:
        # All offers go out before any answer is waited for: so nobody waits in a circle.
        for peer in near:
            if peer > rank:
                segment = _create()
                if segment is not None:
                    segments[peer] = segment
                connections[peer].say(Share(None if segment is None else segment.offer), deadline)
        for peer in near:
            if peer < rank:
                said = connections[peer].hear(f"rank {peer}", deadline)
                if not isinstance(said, Share):
                    raise ProtocolError(f"rank {peer} offers something else than memory", peer=peer)
                segment = _open(said)
                if segment is not None:
                    segments[peer] = shared[peer] = segment
                connections[peer].say(Shared(segment is not None), deadline)
        for peer in near:
            if peer > rank:
                said = connections[peer].hear(f"rank {peer}", deadline)
                if not isinstance(said, Shared):
                    raise ProtocolError(f"rank {peer} answers an offer with something else", peer=peer)
                if said.is_open and peer in segments:
                    segments[peer].settle()
                    shared[peer] = segments[peer]
    except BaseException:
        shared.clear()
        raise
    finally:
        for peer in segments.keys() - shared.keys():
            segments[peer].close()
    return {
        peer: ShmStream(
            tune(connections[peer].sock),
            segment,
            is_first=rank < peer,
            is_ordered=ours.is_ordered and connections[peer].machine.is_ordered,
        )
        for peer, segment in shared.items()
    }


def _create() -> Segment | None:
    try:
        return Segment.create(stream_bytes())
    except TransportError as exc:
        _log.debug("memory is not shared: %s", exc)
        return None


def _open(said: Share) -> Segment | None:
    if said.offer is None:
        return None
    try:
        return Segment.open(said.offer, stream_bytes())
    except TransportError as exc:
        _log.debug("memory is not shared: %s", exc)
        return None
