"""The collectives that only move: broadcast, all_gather, gather, scatter, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import Any, cast

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import algorithms, cost_model, native, shared_memory, signature
from ringfort.collectives.algorithms import Span
from ringfort.collectives.arrays import ArrayView, as_view, plain_view
from ringfort.collectives.operation import Memory, Operation, check_root, run_ring, run_steps
from ringfort.collectives.parallel import Columns, over_connections
from ringfort.collectives.reduction import by_code
from ringfort.collectives.reductions import block_of, check_parts, links_by
from ringfort.collectives.signature import Collective
from ringfort.config import BroadcastStrategy, Shape
from ringfort.errors import DistributedError, InvalidArgumentError, ProtocolError
from ringfort.transport.messages import Envelope
from ringfort.transport.reducer import Array


def broadcast(
    backend: Backend,
    x: Any,
    root: int = 0,
    *,
    strategy: BroadcastStrategy | None = None,
    timeout: float | None = None,
) -> Operation:
    """Every rank's `x` becomes the root's, in place."""
    check_root(backend, root)
    rank = backend.rank
    if strategy is not None and not isinstance(strategy, BroadcastStrategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgumentError("strategy", strategy, "must be a BroadcastStrategy, such as BroadcastStrategy.RING")
    if strategy is None or strategy.shape is Shape.AUTO:
        strategy = None
    by_engine = native.broadcast(backend, x, root, strategy, timeout)
    if by_engine is not None:
        return by_engine
    view = as_view(x, "x", writable=rank != root)
    config = backend.config.collective
    may_share = strategy is None and config.broadcast.shape is Shape.AUTO and backend.shares_memory
    settled = cost_model.settle(backend, strategy or BroadcastStrategy.AUTO, view.flat.nbytes)
    told = None if may_share else settled
    call = signature.encode(Collective.BROADCAST, kind=view.kind.code, count=view.flat.size, root=root, strategy=told)
    backend.check_timeout(timeout)

    def run() -> Any:
        meeting = backend.envelope(call, timeout) if may_share else None
        arena = None if meeting is None else backend.arena(meeting)
        if meeting is not None and arena is not None:
            with arena:
                shared_memory.broadcast(arena, view.flat, root, meeting)
        else:
            chosen, envelope = cost_model.begin(backend, settled, view.flat.nbytes, view.kind.name, call, timeout)

            def move(connection: Backend, span: Span) -> None:
                part = view.flat[span[0] : span[1]]
                spread(connection, part, links_by(chosen, connection, root, part), envelope)

            over_connections(backend, view.flat, envelope, move)
        return x if rank == root else view.finish()

    return Operation("broadcast", view.flat.nbytes, run)


def spread(backend: Backend, flat: Array, links: algorithms.Links, envelope: Envelope) -> None:
    """Moves the root's elements to everybody's, down a tree."""
    steps = algorithms.broadcast_down(links, flat.size, block_of(flat))
    run_steps(backend, steps, Memory(flat), envelope, first=envelope._replace(sync=True))


def all_gather(backend: Backend, x: Any, *, timeout: float | None = None) -> Operation:
    """A new array of shape `(world_size, *x.shape)` with every rank's `x`."""
    rank, n = backend.rank, backend.world_size
    by_engine = native.all_gather(backend, x, timeout)
    if by_engine is not None:
        return by_engine
    view = as_view(x, "x")
    call = signature.encode(Collective.ALL_GATHER, kind=view.kind.code, count=view.flat.size)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new((n, *view.shape))
        arena = backend.arena(envelope) if backend.shares_memory else None
        if arena is not None:
            with arena:
                shared_memory.all_gather(arena, view.flat, [result.part(r) for r in range(n)], envelope)
            return result.finish()
        result.part(rank)[...] = view.flat

        def move(connection: Backend, span: Span) -> None:
            memory = Columns(result.flat, unit=view.flat.nbytes, itemsize=view.flat.itemsize, span=span)
            run_ring(connection, algorithms.ring_all_gather(rank, n, connection.ring), memory, envelope)

        over_connections(backend, view.flat, envelope, move)
        return result.finish()

    return Operation("all_gather", view.flat.nbytes, run)


def gather(backend: Backend, x: Any, root: int = 0, *, timeout: float | None = None) -> Operation:
    """At the root what `all_gather` gives, `None` elsewhere."""
    check_root(backend, root)
    rank, n = backend.rank, backend.world_size
    view = as_view(x, "x")
    call = signature.encode(Collective.GATHER, kind=view.kind.code, count=view.flat.size, root=root)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        if rank != root:

            def send(connection: Backend, span: Span) -> None:
                connection.send(view.flat[span[0] : span[1]], root, tag=envelope._replace(sync=True))

            over_connections(backend, view.flat, envelope, send)
            return None
        result = view.new((n, *view.shape))
        result.part(rank)[...] = view.flat

        def receive(connection: Backend, span: Span) -> None:
            for src in range(n):
                if src != rank:
                    connection.recv(result.part(src)[span[0] : span[1]], src, tag=envelope)

        over_connections(backend, view.flat, envelope, receive)
        return result.finish()

    return Operation("gather", view.flat.nbytes, run)


def scatter(backend: Backend, x: Any | None, root: int = 0, *, timeout: float | None = None) -> Operation:
    """The root passes one part a rank along the first axis, the others `None`; every rank gets its part."""
    check_root(backend, root)
    rank, n = backend.rank, backend.world_size
    if (x is None) == (rank == root):
        why = "the root passes the array" if rank == root else "only the root passes an array; pass None"
        raise InvalidArgumentError("x", "None" if x is None else f"a {type(x).__name__}", f"rank {rank}: {why}")
    view = None if x is None else as_view(x, "x")
    if view is not None:
        check_parts(view, n)
        _pack_layout(view.kind.code, view.shape[1:])
    call = signature.encode(Collective.SCATTER, root=root)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        if view is None:
            part = _receive_layout(backend, root, envelope)
            backend.recv(part.flat, root, tag=envelope)
            return part.finish()
        layout = _pack_layout(view.kind.code, view.shape[1:])
        for dst, _ in algorithms.exchange_order(rank, n):
            backend.send(layout, dst, tag=envelope)
            backend.send(view.part(dst), dst, tag=envelope._replace(sync=True))
        result = view.new(view.shape[1:])
        result.flat[...] = view.part(rank)
        return result.finish()

    return Operation("scatter", 0 if view is None else view.flat.nbytes, run)


def all_to_all(backend: Backend, x: Any, *, timeout: float | None = None) -> Operation:
    """Part i of rank j's `x` becomes part j of rank i's result. A list of arrays may have parts of any shapes."""
    if isinstance(x, (list, tuple)):
        return _all_to_all_list(backend, cast("Sequence[Any]", x), timeout)
    rank, n = backend.rank, backend.world_size
    by_engine = native.all_to_all(backend, x, timeout)
    if by_engine is not None:
        return by_engine
    view = as_view(x, "x")
    check_parts(view, n)
    call = signature.encode(Collective.ALL_TO_ALL, kind=view.kind.code, count=view.flat.size)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new(view.shape)
        result.part(rank)[...] = view.part(rank)

        def move(connection: Backend, span: Span) -> None:
            low, high = span
            for dst, src in algorithms.exchange_order(rank, n):
                connection.exchange(view.part(dst)[low:high], dst, result.part(src)[low:high], src, tag=envelope)

        over_connections(backend, result.part(rank), envelope, move)
        return result.finish()

    return Operation("all_to_all", view.flat.nbytes, run)


def _all_to_all_list(backend: Backend, x: Sequence[Any], timeout: float | None) -> Operation:
    rank, n = backend.rank, backend.world_size
    if len(x) != n:
        raise InvalidArgumentError("x", f"list of {len(x)}", f"must have one array for each of {n} ranks")
    views = [as_view(item, f"x[{index}]") for index, item in enumerate(x)]
    layouts = [_pack_layout(view.kind.code, view.shape) for view in views]
    call = signature.encode(Collective.ALL_TO_ALL_LIST)
    backend.check_timeout(timeout)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        own = views[rank].new(views[rank].shape)
        own.flat[...] = views[rank].flat
        result: list[Any] = [None] * n
        result[rank] = own.finish()
        for dst, src in algorithms.exchange_order(rank, n):
            arriving = bytearray(_LAYOUT.size)
            backend.exchange(layouts[dst], dst, arriving, src, tag=envelope)
            kind, shape = _unpack_layout(arriving, src)
            part = _room(kind, shape, src)
            backend.exchange(views[dst].flat, dst, part.flat, src, tag=envelope)
            result[src] = part.finish()
        return result

    return Operation("all_to_all", sum(view.flat.nbytes for view in views), run)


def barrier(backend: Backend, *, timeout: float | None = None) -> Operation:
    """Returns when every rank has called it."""
    backend.check_timeout(timeout)
    return Operation("barrier", 0, lambda: backend.barrier(timeout=timeout))


# --- layouts: what a receiver must know that passes no array of its own ----------------------------------------------

_MAX_AXES = 32
_LAYOUT = Struct(f"<BB6x{_MAX_AXES}Q")
"""Element type, number of axes, their lengths."""


def _pack_layout(kind: int, shape: tuple[int, ...]) -> bytes:
    if len(shape) > _MAX_AXES:
        raise InvalidArgumentError("x", f"array of {len(shape)} axes", f"must have at most {_MAX_AXES}")
    return _LAYOUT.pack(kind, len(shape), *shape, *([0] * (_MAX_AXES - len(shape))))


def _unpack_layout(data: bytes | bytearray, peer: int) -> tuple[int, tuple[int, ...]]:
    kind, axes, *lengths = _LAYOUT.unpack(data)
    if axes > _MAX_AXES:
        raise ProtocolError(f"rank {peer} describes an array of {axes} axes", peer=peer)
    return kind, tuple(lengths[:axes])


def _receive_layout(backend: Backend, root: int, envelope: Envelope) -> ArrayView:
    data = bytearray(_LAYOUT.size)
    backend.recv(data, root, tag=envelope)
    return _room(*_unpack_layout(data, root), root)


def _room(kind: int, shape: tuple[int, ...], peer: int) -> ArrayView:
    """Memory for what a peer describes. The kernel gives it page by page as bytes arrive: a claim takes none."""
    try:
        element = by_code(kind)
        return plain_view(np.empty(prod(shape), element.storage), element, shape)
    except (DistributedError, MemoryError, ValueError, OverflowError) as exc:
        raise ProtocolError(f"rank {peer} describes an array that cannot be: {exc}", peer=peer) from exc
