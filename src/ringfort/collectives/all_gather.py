"""all_gather and gather: every rank's array, at every rank or at the root."""

from __future__ import annotations

from typing import Any

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, native, shared_memory
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.parallel import over_connections
from ringfort.collectives.parts import Parts, as_parts, check_who_passes
from ringfort.collectives.plan import Operation, Plan, Run, planned, unplanned
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.steps import PartMemory, run_ring
from ringfort.collectives.tensors import operation, view_for
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array


def all_gather(group: Group, x: Any, *, out: Any = None, timeout: float | None = None) -> Operation:
    """`out[r]` becomes rank r's `x`: a new array of shape `(world_size, *x.shape)` unless `out` is given, as such an
    array or as a list of arrays."""
    view = view_for(group, x)
    into = _room(group, view) if out is None else as_parts(out, "out", group.world_size, like=view, writable=True)
    key = "all_gather", view.kind, view.size, view.device, into.whole is None
    plan = planned(group, key, lambda: _plan(group, view, into))
    return operation(group, "all_gather", view, plan, into.finish, timeout, view.flat, into)


def _plan(group: Group, view: ArrayView, into: Parts) -> Plan:
    rank, n = group.rank, group.world_size
    by_engine = native.all_gather(group, view) if into.whole is not None else native.none_for(view)
    if by_engine is not None:
        return by_engine
    call = encode(Collective.ALL_GATHER, kind=view.kind.code, count=view.size)

    def decide(timeout: float | None) -> Run:
        arena = group.arena(call, timeout)
        if arena is not None:

            def share(flat: Array, into: Parts, timeout: float | None = None) -> None:
                with arena:
                    shared_memory.all_gather(arena, flat, into.parts, group.envelope(call, timeout))

            return share

        def run(flat: Array, into: Parts, timeout: float | None = None) -> None:
            envelope = group.envelope(call, timeout)
            into.parts[rank][...] = flat

            def move(connection: Group, span: Span) -> None:
                steps = algorithms.ring_all_gather(rank, n, connection.ring)
                run_ring(connection, steps, PartMemory(into.parts, span), envelope)

            over_connections(group, flat, envelope, move)

        return run

    return Plan.undecided(decide)


def gather(group: Group, x: Any, root: int = 0, *, out: Any = None, timeout: float | None = None) -> Operation:
    """Return at the root what `all_gather` returns, and `None` elsewhere. Only the root may pass `out`."""
    group.check_rank(root, "root")
    rank, n = group.rank, group.world_size
    view = as_view(x, "x")
    into: Parts | None = None
    if rank != root:
        check_who_passes("out", out, group, root, is_optional=True)
    else:
        into = _room(group, view) if out is None else as_parts(out, "out", n, like=view, writable=True)
    call = encode(Collective.GATHER, kind=view.kind.code, count=view.size, root=root)

    def run(envelope: Envelope) -> Any:
        def move(connection: Group, span: Span) -> None:
            part = slice(*span)
            if into is None:
                connection.send(view.flat[part], root, envelope._replace(sync=True))
                return
            into.parts[rank][part] = view.flat[part]
            for src in range(n):
                if src != rank:
                    connection.recv(into.parts[src][part], src, envelope)

        over_connections(group, view.flat, envelope, move)
        return None if into is None else into.finish()

    return unplanned(group, "gather", view.nbytes, call, timeout, run)


def _room(group: Group, view: ArrayView) -> Parts:
    """Return a new array with a part for each rank."""
    return Parts.of(view.new((group.world_size, *view.shape)), group.world_size)
