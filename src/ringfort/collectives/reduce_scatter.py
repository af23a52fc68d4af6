"""reduce_scatter: each rank gets the reduction of its own part of all ranks' arrays."""

from __future__ import annotations

from typing import Any

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, native, reduction
from ringfort.collectives.algorithms import Span, Step
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.parallel import over_connections
from ringfort.collectives.parts import Parts, as_parts, check_alike, check_rows
from ringfort.collectives.plan import Operation, Plan, planned
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.steps import Reducers, block_of
from ringfort.collectives.tensors import operation, view_for
from ringfort.transport.reducer import Array


def reduce_scatter(
    group: Group, x: Any, op: Op = ReduceOp.SUM, *, out: Any = None, timeout: float | None = None
) -> Operation:
    """`x` has a part for each rank, along its first axis or as a list of arrays; `out`, or a new array, becomes the
    reduction of this rank's parts. `x` is kept."""
    n = group.world_size
    into = None if out is None else as_view(out, "out", writable=True)
    if isinstance(x, (list, tuple)):
        parts = as_parts(x, "x", n, like=into)
        into = into or parts.new_part(group.rank)
    else:
        view = view_for(group, x)
        check_rows(view, n)
        if into is not None:
            check_alike("out", into.kind, into.size, view.kind, view.size // n)
        parts = Parts.of(view, n)
        into = into or view.new(view.shape[1:])
    key = "reduce_scatter", into.kind, into.size, op, into.device, parts.whole is None
    plan = planned(group, key if isinstance(op, ReduceOp) else None, lambda: _plan(group, parts, into, op))
    return operation(group, "reduce_scatter", parts.whole or parts, plan, into.finish, timeout, parts, into.flat)


def _plan(group: Group, parts: Parts, into: ArrayView, op: Op) -> Plan:
    kind, rank, n = into.kind, group.rank, group.world_size
    reduction.reducer(op, kind)  # raises where they do not fit
    by_engine = native.reduce_scatter(group, parts.whole, op) if parts.whole is not None else None
    if by_engine is not None:
        return by_engine
    call = encode(Collective.REDUCE_SCATTER, kind=kind.code, count=n * into.size, op=reduction.code_of(op))
    # What a rank sends must be scaled too, and `x` kept: then block by block, through a copy.
    is_scaled = reduction.needs_scale_before(op)

    def run(parts: Parts, flat: Array, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        flat[...] = parts.parts[rank]
        if n == 1:
            reduction.scale_before(op, kind, flat)
        block = block_of(flat) if is_scaled else max(flat.size, 1)

        def move(connection: Group, whole: Span) -> None:
            reducers = Reducers(op, kind, flat, n)
            for turn, (dst, src) in enumerate(algorithms.exchange_order(rank, n), start=2):
                part = parts.parts[dst]
                for start in range(whole[0], max(whole[1], whole[0] + 1), block):
                    span = start, min(start + block, whole[1])
                    data = part[span[0] : span[1]]
                    if is_scaled:
                        data = data.copy()
                        reduction.scale_before(op, kind, data)
                    reduce = reducers(Step(None, None, src, span, True, span if turn == n else None))
                    connection.exchange(data, dst, flat[span[0] : span[1]], src, envelope, reduce)

        over_connections(group, flat, envelope, move)

    return Plan(run)
