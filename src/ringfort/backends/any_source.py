"""Waiting for a message from anybody: who it comes from is known before it is received."""

# pyright: reportPrivateUsage=false
# What waits here is nobody's message yet, so it asks the engine itself; the backends have no such method of their own.

from __future__ import annotations

from ringfort.backends.base import Backend
from ringfort.backends.mesh import MeshBackend
from ringfort.backends.sub import SubBackend
from ringfort.errors import ChannelClosedError, InvalidArgumentError, OperationTimeoutError, PeerLostError


def wait_for_any(backend: Backend, tag: int, timeout: float | None = None) -> int:
    """The rank of a peer whose message with `tag` is here, or has begun to come. It is still to be received.

    Peers that leave or are lost are done without as long as there are others. Raises `OperationTimeoutError`, what
    became of the last peer, and `InvalidArgumentError` where nobody could send.
    """
    backend = backend.current
    mesh = backend._outermost if isinstance(backend, SubBackend) else backend
    if not isinstance(mesh, MeshBackend) or backend.world_size == 1:
        raise InvalidArgumentError("backend", backend, "nobody else can send to this rank here")
    engine = mesh._engine
    seconds, deadline = backend.time_of(tag, timeout)
    envelope = backend.check_tag(tag)._replace(timeout=seconds, deadline=deadline)
    links = {rank: engine.links[member] for rank, member in enumerate(backend.members) if rank != backend.rank}

    def sender() -> int | None:
        return next((rank for rank, link in links.items() if link.inbound.holds(envelope[:2])), None)

    while True:
        found = sender()
        if found is not None:
            return found
        there = [link.peer for link in links.values() if link.is_open]
        peer = there[0] if there else next(link.peer for link in links.values())
        try:
            engine.watch(lambda: sender() is not None, peer, envelope)
        except OperationTimeoutError as exc:
            what = f"recv from any of {len(there)} ranks"
            raise OperationTimeoutError(what, seconds, state="nothing was sent; the links are usable") from exc
        except (PeerLostError, ChannelClosedError):
            if len(there) < 2 or engine.links[peer].is_open:  # else only that one has gone
                raise
