"""all_to_all: part i of rank j's array becomes part j of rank i's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ringfort.backends.group import Group
from ringfort.collectives import algorithms, native
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.parallel import over_connections
from ringfort.collectives.parts import LAYOUT_BYTES, as_parts, check_alike, check_rows, pack_layout, room_for
from ringfort.collectives.plan import Operation, Plan, planned, unplanned
from ringfort.collectives.signature import Collective, encode
from ringfort.collectives.tensors import operation, view_for
from ringfort.errors import InvalidArgumentError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array


def all_to_all(group: Group, x: Any, *, out: Any = None, timeout: float | None = None) -> Operation:
    """Part i of rank j's `x` becomes part j of rank i's result. A list of arrays may have parts of any sizes; `out` is
    then a list of arrays too, of the sizes that come, or left out."""
    if isinstance(x, (list, tuple)):
        arrays = cast("Sequence[Any]", x)
        return _uneven(group, arrays, timeout) if out is None else _into(group, arrays, out, timeout)
    view = view_for(group, x)
    check_rows(view, group.world_size)
    result = view.new(view.shape) if out is None else as_view(out, "out", writable=True)
    check_alike("out", result.kind, result.size, view.kind, view.size)
    plan = planned(group, ("all_to_all", view.kind, view.size, view.device), lambda: _plan(group, view))
    return operation(group, "all_to_all", view, plan, result.finish, timeout, view.flat, result.flat)


def _plan(group: Group, view: ArrayView) -> Plan:
    by_engine = native.all_to_all(group, view)
    if by_engine is not None:
        return by_engine
    rank, n = group.rank, group.world_size
    call = encode(Collective.ALL_TO_ALL, kind=view.kind.code, count=view.size)

    def run(flat: Array, result: Array, timeout: float | None = None) -> None:
        envelope = group.envelope(call, timeout)
        parts, into = flat.reshape(n, -1), result.reshape(n, -1)
        into[rank] = parts[rank]

        def move(connection: Group, span: Span) -> None:
            part = slice(*span)
            for dst, src in algorithms.exchange_order(rank, n):
                connection.exchange(parts[dst][part], dst, into[src][part], src, envelope)

        over_connections(group, into[rank], envelope, move)

    return Plan(run)


def _into(group: Group, x: Sequence[Any], out: Any, timeout: float | None) -> Operation:
    """Both sides of each part know its size."""
    rank, n = group.rank, group.world_size
    parts = as_parts(x, "x", n, is_uneven=True)
    into = as_parts(out, "out", n, writable=True, is_uneven=True)
    own, place = parts.parts[rank], into.parts[rank]
    check_alike(f"out[{rank}]", into.kind, place.size, parts.kind, own.size)
    call = encode(Collective.ALL_TO_ALL_LIST, kind=parts.kind.code)

    def run(envelope: Envelope) -> Any:
        place[...] = own
        for dst, src in algorithms.exchange_order(rank, n):
            group.exchange(parts.parts[dst], dst, into.parts[src], src, envelope)
        return into.finish()

    return unplanned(group, "all_to_all", parts.nbytes, call, timeout, run)


def _uneven(group: Group, x: Sequence[Any], timeout: float | None) -> Operation:
    """Parts of any shapes and element types, which the ranks tell each other first."""
    rank, n = group.rank, group.world_size
    if len(x) != n:
        raise InvalidArgumentError("x", f"list of {len(x)}", f"must have one array for each of {n} ranks")
    views = [as_view(item, f"x[{index}]") for index, item in enumerate(x)]
    layouts = [pack_layout(view.kind, view.shape) for view in views]
    call = encode(Collective.ALL_TO_ALL_LIST)

    def run(envelope: Envelope) -> Any:
        own = views[rank].new(views[rank].shape)
        own.flat[...] = views[rank].flat
        result: list[Any] = [None] * n
        result[rank] = own.finish()
        for dst, src in algorithms.exchange_order(rank, n):
            arriving = bytearray(LAYOUT_BYTES)
            group.exchange(layouts[dst], dst, arriving, src, envelope)
            part = room_for(arriving, src)
            group.exchange(views[dst].flat, dst, part.flat, src, envelope)
            result[src] = part.finish()
        return result

    return unplanned(group, "all_to_all", sum(view.nbytes for view in views), call, timeout, run)
