"""The collectives whose results land in arrays that the caller has, part by part: what other libraries' interfaces
ask for. Nothing is allocated, and nothing copied but this rank's own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringfort.backends.base import Backend, as_bytes
from ringfort.collectives import algorithms, reduction, shared_memory, signature
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.operation import Memory, Operation, check_root, run_steps
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.reductions import block_of
from ringfort.collectives.signature import Collective
from ringfort.errors import InvalidArgumentError
from ringfort.transport.reducer import Array


def all_gather(backend: Backend, x: Any, into: Sequence[Any], *, timeout: float | None = None) -> Operation:
    """`into[r]` becomes rank r's `x`."""
    rank, n = backend.rank, backend.world_size
    view = as_view(x, "x")
    places = _places(into, "into", [view] * n, writable=True)
    call = signature.encode(Collective.ALL_GATHER, kind=view.kind.code, count=view.flat.size)
    backend.check_timeout(timeout)

    def run() -> None:
        envelope = backend.envelope(call, timeout)
        arena = backend.arena(envelope) if backend.shares_memory else None
        if arena is not None:
            with arena:
                shared_memory.all_gather(arena, view.flat, [place.flat for place in places], envelope)
        else:
            places[rank].flat[...] = view.flat
            run_steps(backend, algorithms.ring_all_gather(rank, n, backend.ring), _Parts(places), envelope)
        _finish(places)

    return Operation("all_gather", view.flat.nbytes, run)


def gather(
    backend: Backend, x: Any, into: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None
) -> Operation:
    """At the root `into[r]` becomes rank r's `x`; the others pass None."""
    check_root(backend, root)
    rank, n = backend.rank, backend.world_size
    view = as_view(x, "x")
    places = [] if into is None else _places(into, "into", [view] * n, writable=True)
    _check_who_passes("into", into, backend, root)
    call = signature.encode(Collective.GATHER, kind=view.kind.code, count=view.flat.size, root=root)
    backend.check_timeout(timeout)

    def run() -> None:
        envelope = backend.envelope(call, timeout)
        if rank != root:
            backend.send(view.flat, root, tag=envelope._replace(sync=True))
            return
        places[rank].flat[...] = view.flat
        for src in range(n):
            if src != rank:
                backend.recv(places[src].flat, src, tag=envelope)
        _finish(places)

    return Operation("gather", view.flat.nbytes, run)


def scatter(
    backend: Backend, parts: Sequence[Any] | None, into: Any, root: int = 0, *, timeout: float | None = None
) -> Operation:
    """Rank r's `into` becomes the root's `parts[r]`; the others pass None."""
    check_root(backend, root)
    rank, n = backend.rank, backend.world_size
    place = as_view(into, "into", writable=True)
    views = [] if parts is None else _places(parts, "parts", [place] * n)
    _check_who_passes("parts", parts, backend, root)
    call = signature.encode(Collective.SCATTER, kind=place.kind.code, count=place.flat.size, root=root)
    backend.check_timeout(timeout)

    def run() -> None:
        envelope = backend.envelope(call, timeout)
        if rank == root:
            for dst, _ in algorithms.exchange_order(rank, n):
                backend.send(views[dst].flat, dst, tag=envelope._replace(sync=True))
            place.flat[...] = views[rank].flat
        else:
            backend.recv(place.flat, root, tag=envelope)
        place.finish()

    return Operation("scatter", place.flat.nbytes, run)


def reduce_scatter(
    backend: Backend, parts: Sequence[Any], into: Any, op: Op = ReduceOp.SUM, *, timeout: float | None = None
) -> Operation:
    """`into` becomes the reduction of all ranks' `parts[rank]`. `parts` are kept."""
    n = backend.world_size
    place = as_view(into, "into", writable=True)
    views = _places(parts, "parts", [place] * n)
    reduction.reducer(op, place.kind)  # raises where they do not fit
    call = signature.encode(
        Collective.REDUCE_SCATTER, kind=place.kind.code, count=n * place.flat.size, op=reduction.code_of(op)
    )
    backend.check_timeout(timeout)

    def run() -> None:
        envelope = backend.envelope(call, timeout)
        _reduce_parts(backend, [view.flat for view in views], place, op, envelope)
        place.finish()

    return Operation("reduce_scatter", n * place.flat.nbytes, run)


def _reduce_parts(backend: Backend, parts: Sequence[Array], place: ArrayView, op: Op, envelope: Any) -> None:
    rank, n = backend.rank, backend.world_size
    flat, kind = place.flat, place.kind
    flat[...] = parts[rank]
    reduction.scale_before(op, kind, flat)
    plain, closing = reduction.reducer(op, kind), reduction.closing_reducer(op, kind, n)
    # What a rank sends must be scaled too, and `parts` kept: then block by block, through a copy.
    scaled = reduction.needs_scale_before(op)
    block = block_of(flat) if scaled else max(flat.size, 1)
    for turn, (dst, src) in enumerate(algorithms.exchange_order(rank, n), start=2):
        reduce = closing if turn == n else plain
        for start in range(0, max(flat.size, 1), block):
            out = parts[dst][start : start + block]
            if scaled:
                out = out.copy()
                reduction.scale_before(op, kind, out)
            backend.exchange(out, dst, flat[start : start + block], src, reduce=reduce, tag=envelope)


def all_to_all(
    backend: Backend, parts: Sequence[Any], into: Sequence[Any], *, timeout: float | None = None
) -> Operation:
    """`into[r]` becomes rank r's `parts[rank]`. Parts may have any sizes; both sides of one must agree."""
    rank, n = backend.rank, backend.world_size
    views, places = _places(parts, "parts", n), _places(into, "into", n, writable=True)
    if views[rank].flat.size != places[rank].flat.size:
        why = f"this rank's own part has {views[rank].flat.size} elements in parts; the two must agree"
        raise InvalidArgumentError("into", f"array of {places[rank].flat.size} elements", why)
    call = signature.encode(Collective.ALL_TO_ALL_LIST, kind=views[0].kind.code)
    backend.check_timeout(timeout)

    def run() -> None:
        envelope = backend.envelope(call, timeout)
        places[rank].flat[...] = views[rank].flat
        for dst, src in algorithms.exchange_order(rank, n):
            backend.exchange(views[dst].flat, dst, places[src].flat, src, tag=envelope)
        _finish(places)

    return Operation("all_to_all", sum(view.flat.nbytes for view in views), run)


class _Parts(Memory):
    """Arrays that a plan of parts takes for one: part p is the array of rank p."""

    def __init__(self, places: Sequence[ArrayView]) -> None:
        self._parts = [as_bytes(place.flat, "into", writable=False) for place in places]

    def __getitem__(self, span: Span) -> memoryview:
        return self._parts[span[0]]


def _places(
    arrays: Sequence[Any], name: str, like: Sequence[ArrayView] | int, *, writable: bool = False
) -> list[ArrayView]:
    """Views of `arrays`: one for each of `like`, of its element type and size; or so many, of whatever size."""
    count = like if isinstance(like, int) else len(like)
    if len(arrays) != count:
        raise InvalidArgumentError(name, f"list of {len(arrays)}", f"must have one array for each of {count} ranks")
    views = [as_view(array, f"{name}[{index}]", writable=writable) for index, array in enumerate(arrays)]
    for index, view in enumerate(views):
        other = views[0] if isinstance(like, int) else like[index]
        same_size = isinstance(like, int) or view.flat.size == other.flat.size
        if view.kind is not other.kind or not same_size:
            raise InvalidArgumentError(
                f"{name}[{index}]",
                f"{view.kind.name} of {view.flat.size} elements",
                f"must match the other arrays, {other.kind.name}"
                + ("" if isinstance(like, int) else f" of {other.flat.size} elements"),
            )
        if writable:
            as_bytes(view.flat, f"{name}[{index}]", writable=True)
    return views


def _check_who_passes(name: str, given: Sequence[Any] | None, backend: Backend, root: int) -> None:
    if (given is None) == (backend.rank == root):
        why = "the root passes one array a rank" if backend.rank == root else "only the root passes arrays; pass None"
        raise InvalidArgumentError(name, "None" if given is None else "arrays", f"rank {backend.rank}: {why}")


def _finish(places: Sequence[ArrayView]) -> None:
    for place in places:
        place.finish()
