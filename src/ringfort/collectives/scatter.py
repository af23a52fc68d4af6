"""scatter: each rank gets its part of the root's array."""

from __future__ import annotations

from typing import Any

from ringfort.backends.group import Group
from ringfort.collectives import algorithms
from ringfort.collectives.arrays import as_view
from ringfort.collectives.parts import as_parts, check_who_passes, pack_layout, receive_layout
from ringfort.collectives.plan import Operation, unplanned
from ringfort.collectives.signature import Collective, encode
from ringfort.transport.messages import Envelope


def scatter(group: Group, x: Any = None, root: int = 0, *, out: Any = None, timeout: float | None = None) -> Operation:
    """Give each rank its part of the root's `x`, an array with a part for each rank along its first axis or a list of
    arrays; the others pass `None`. The part goes into `out`, which all ranks or none must pass, or a new array."""
    group.check_rank(root, "root")
    rank, n = group.rank, group.world_size
    check_who_passes("x", x, group, root)
    into = None if out is None else as_view(out, "out", writable=True)
    parts = None if x is None else as_parts(x, "x", n, like=into)
    kind, count = (0, 0) if into is None else (into.kind.code, into.size)
    call = encode(Collective.SCATTER, kind=kind, count=count, root=root)
    layout = b"" if parts is None else pack_layout(parts.kind, parts.part_shape)

    def run(envelope: Envelope) -> Any:
        place = into
        if parts is None:
            place = place or receive_layout(group, root, envelope)
            group.recv(place.flat, root, envelope)
            return place.finish()
        for dst, _ in algorithms.exchange_order(rank, n):
            if into is None:  # the others do not know what comes
                group.send(layout, dst, envelope)
            group.send(parts.parts[dst], dst, envelope._replace(sync=True))
        place = place or parts.new_part(rank)
        place.flat[...] = parts.parts[rank]
        return place.finish()

    nbytes = into.nbytes if into is not None else 0 if parts is None else parts.nbytes
    return unplanned(group, "scatter", nbytes, call, timeout, run)
