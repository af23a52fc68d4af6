"""Receiving from any source: wait for a message and learn which rank sent it, before it is received."""

from __future__ import annotations

from ringfort.backends.group import Group
from ringfort.errors import ChannelClosedError, InvalidArgumentError, OperationTimeoutError, PeerLostError


def wait_for_any(group: Group, tag: int, timeout: float | None = None) -> int:
    """Return the rank of a peer whose message with `tag` has arrived or begins to arrive. The caller still receives it.

    Peers that leave or are lost are ignored as long as there are others. Raises `OperationTimeoutError`, the error of
    the last peer if all are gone, and `InvalidArgumentError` if there is no other rank.
    """
    if group.world_size == 1:
        raise InvalidArgumentError("group", group, "has no other rank that could send")
    engine, envelope = group.engine, group.tagged(tag, timeout)
    links = {rank: engine.links[member] for rank, member in enumerate(group.members) if rank != group.rank}

    def sender() -> int | None:
        return next((rank for rank, link in links.items() if link.inbound.holds(envelope[:2])), None)

    while True:
        found = sender()
        if found is not None:
            return found
        there = [link.peer for link in links.values() if link.error is None]
        peer = there[0] if there else next(link.peer for link in links.values())
        try:
            engine.watch(lambda: sender() is not None, peer, envelope)
        except OperationTimeoutError as exc:
            what = f"recv from any source ({len(there)} ranks)"
            raise OperationTimeoutError(what, envelope.timeout, state="nothing was sent; the links are usable") from exc
        except (PeerLostError, ChannelClosedError):
            if len(there) < 2 or engine.links[peer].error is None:  # else only that one has gone
                raise
