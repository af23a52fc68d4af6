"""A barrier that names the ranks that did not come."""

from __future__ import annotations

from typing import Final

from ringfort.backends.group import Group
from ringfort.errors import DistributedError, OperationTimeoutError
from ringfort.transport.messages import Envelope

_TAG: Final = 1 << 62
"""Above all tags that a caller may use, below that of the collectives."""


def monitored_barrier(group: Group, timeout: float, *, wait_all_ranks: bool = False) -> None:
    """Return when every rank has called it.

    Raises `OperationTimeoutError`, at rank 0 with the first rank that did not come, or with `wait_all_ranks` all of
    them. If ranks failed and none is merely late, rank 0 raises the error of the first.
    """
    deadline = group.now() + timeout

    def envelope(seconds: float) -> Envelope:
        return Envelope(group.comm_id, _TAG, timeout=seconds, deadline=group.now() + seconds)

    if group.rank != 0:
        group.send(b"", 0, envelope(timeout))
        group.recv(bytearray(), 0, envelope(timeout))
        return
    missing: dict[int, DistributedError] = {}
    for peer in range(1, group.world_size):
        try:
            group.recv(bytearray(), peer, envelope(max(0.001, deadline - group.now())))
        except DistributedError as exc:
            missing[peer] = exc
            if not wait_all_ranks:
                break
    late = [peer for peer, exc in missing.items() if isinstance(exc, OperationTimeoutError)]
    if late:
        state = "; ".join(f"rank {peer} did not come" if peer in late else str(exc) for peer, exc in missing.items())
        raise OperationTimeoutError("monitored_barrier", timeout, peer=late[0], state=state)
    for exc in missing.values():
        raise exc
    for peer in range(1, group.world_size):
        group.send(b"", peer, envelope(timeout))
