"""Collectives by the backend's own engine (Gloo's, MPI's, NCCL's), where that can do them as we would. Each of these
prepares an operation, or returns None: then it is done our way, over messages."""

from __future__ import annotations

from typing import Any

from ringfort.backends.base import Backend
from ringfort.backends.native import Native
from ringfort.collectives import calls, kernels
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.calls import Collective
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.config import Shape, Strategy

_AS_SUM = (ReduceOp.MEAN.name, ReduceOp.PREMUL_SUM.name)
"""Sums of what was scaled before, or is scaled after: the arithmetic of that is always ours."""


def all_reduce(backend: Backend, x: Any, op: Op, strategy: Strategy | None, timeout: float | None) -> Operation | None:
    """Every rank's `x` becomes the reduction of all of them, in place."""
    native = _native(backend, strategy, backend.config.collective.all_reduce)
    if native is None:
        return None
    view = as_view(x, "x", writable=True)
    name = _reduction(native, backend, "all_reduce", view, op)
    if name is None:
        return None
    flat, kind = view.flat, view.kind
    call = calls.encode(Collective.ALL_REDUCE, kind=kind.code, count=flat.size, op=kernels.code_of(op))
    backend.check_timeout(timeout)

    def begin() -> Any:
        kernels.scale_before(op, kind, flat)
        return native.all_reduce(flat, name)

    def run() -> Any:
        native.run(begin, backend.envelope(call, timeout))
        kernels.scale_after(op, kind, flat, backend.world_size)
        return view.finish()

    return Operation("all_reduce", flat.nbytes, run)


def reduce_scatter(backend: Backend, view: ArrayView, op: Op, timeout: float | None) -> Operation | None:
    """`view` has a part for each rank; the result is the reduction of this rank's parts."""
    native = _native(backend)
    if native is None:
        return None
    name = _reduction(native, backend, "reduce_scatter", view, op)
    if name is None:
        return None
    kind = view.kind
    call = calls.encode(Collective.REDUCE_SCATTER, kind=kind.code, count=view.flat.size, op=kernels.code_of(op))
    backend.check_timeout(timeout)

    def run() -> Any:
        result = view.new(view.shape[1:])

        def begin() -> Any:
            source = view.flat
            if kernels.needs_scale_before(op):  # of a copy, for `x` is kept
                source = source.copy()
                kernels.scale_before(op, kind, source)
            return native.reduce_scatter(source, result.flat, name)

        native.run(begin, backend.envelope(call, timeout))
        kernels.scale_after(op, kind, result.flat, backend.world_size)
        return result.finish()

    return Operation("reduce_scatter", view.flat.nbytes, run)


def broadcast(
    backend: Backend, view: ArrayView, x: Any, root: int, strategy: Strategy | None, timeout: float | None
) -> Operation | None:
    """Every rank's `x`, seen as `view`, becomes the root's, in place."""
    native = _native(backend, strategy, backend.config.collective.broadcast)
    if native is None or not _suits(native, backend, "broadcast", view):
        return None
    call = calls.encode(Collective.BROADCAST, kind=view.kind.code, count=view.flat.size, root=root)
    backend.check_timeout(timeout)

    def run() -> Any:
        native.run(lambda: native.broadcast(view.flat, root), backend.envelope(call, timeout))
        return x if backend.rank == root else view.finish()

    return Operation("broadcast", view.flat.nbytes, run)


def all_gather(backend: Backend, view: ArrayView, timeout: float | None) -> Operation | None:
    """A new array of shape `(world_size, *view.shape)` with every rank's."""
    call = calls.encode(Collective.ALL_GATHER, kind=view.kind.code, count=view.flat.size)
    return _move(backend, view, "all_gather", (backend.world_size, *view.shape), call, timeout)


def all_to_all(backend: Backend, view: ArrayView, timeout: float | None) -> Operation | None:
    """Part i of rank j's becomes part j of rank i's result."""
    call = calls.encode(Collective.ALL_TO_ALL, kind=view.kind.code, count=view.flat.size)
    return _move(backend, view, "all_to_all", view.shape, call, timeout)


def _move(
    backend: Backend, view: ArrayView, what: str, shape: tuple[int, ...], call: bytes, timeout: float | None
) -> Operation | None:
    native = _native(backend)
    if native is None or not _suits(native, backend, what, view):
        return None
    backend.check_timeout(timeout)
    move = native.all_gather if what == "all_gather" else native.all_to_all

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new(shape)
        native.run(lambda: move(view.flat, result.flat), envelope)
        return result.finish()

    return Operation(what, view.flat.nbytes, run)


def _native(backend: Backend, asked: Strategy | None = None, configured: Strategy | None = None) -> Native | None:
    """The backend's engine, unless a person has chosen one of our ways."""
    if any(strategy is not None and strategy.shape is not Shape.AUTO for strategy in (asked, configured)):
        return None
    return backend.native()


def _suits(native: Native, backend: Backend, what: str, view: ArrayView, op: str = "") -> bool:
    least = backend.config.collective.native_bytes
    return least is not None and view.flat.nbytes >= max(1, least) and native.takes(what, view.kind.name, op)


def _reduction(native: Native, backend: Backend, what: str, view: ArrayView, op: Op) -> str | None:
    """The engine's reduction of which `op` is made, if it has it. Raises where `op` has no meaning."""
    kernels.fold(op, view.kind)
    name = kernels.describe(op)
    name = ReduceOp.SUM.name if name in _AS_SUM else name
    return name if _suits(native, backend, what, view, name) else None
