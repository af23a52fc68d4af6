"""Collectives by the backend's own engine (Gloo's, MPI's, NCCL's), where that can do them as we would. Each of these
prepares an operation, or returns None: then it is done our way, over messages."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ringfort.backends.base import Backend
from ringfort.backends.engines.hybrid import HybridBackend
from ringfort.backends.engines.native import Native, Pending
from ringfort.collectives import hybrid, reduction, signature
from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.signature import Collective
from ringfort.collectives.tensors import in_callers_stream, scale_after, scale_before, tensor_view
from ringfort.config import Shape, Strategy

_AS_SUM = (ReduceOp.MEAN.name, ReduceOp.PREMUL_SUM.name)
"""Sums of what was scaled before, or is scaled after: the arithmetic of that is always ours."""


def all_reduce(backend: Backend, x: Any, op: Op, strategy: Strategy | None, timeout: float | None) -> Operation | None:
    """Every rank's `x` becomes the reduction of all of them, in place."""
    if isinstance(backend, HybridBackend):
        return hybrid.all_reduce(backend, x, op, timeout)
    native = _native(backend, strategy, backend.config.collective.all_reduce)
    view = None if native is None else _view(native, x, writable=True)
    if native is None or view is None:
        return None
    name = _reduction(native, backend, "all_reduce", view, op)
    if name is None:
        return None
    call = _encode(Collective.ALL_REDUCE, view, op)
    backend.check_timeout(timeout)

    def begin() -> Pending:
        scale_before(op, view)
        return native.all_reduce(view.flat, name)

    def run() -> Any:
        native.run(begin, backend.envelope(call, timeout))
        scale_after(op, view, backend.world_size)
        return view.finish()

    return Operation("all_reduce", view.flat.nbytes, in_callers_stream(view, run))


def reduce_scatter(backend: Backend, x: Any, op: Op, timeout: float | None) -> Operation | None:
    """`x` has a part for each rank; the result is the reduction of this rank's parts."""
    native = _native(backend)
    view = None if native is None else _view(native, x)
    if native is None or view is None or view.shape[:1] != (backend.world_size,):
        return None
    name = _reduction(native, backend, "reduce_scatter", view, op)
    if name is None:
        return None
    call = _encode(Collective.REDUCE_SCATTER, view, op)
    backend.check_timeout(timeout)

    def run() -> Any:
        result = view.new(view.shape[1:])

        def begin() -> Pending:
            source = view
            if reduction.needs_scale_before(op):  # of a copy, for `x` is kept
                source = view.new(view.shape)
                source.flat[...] = view.flat
                scale_before(op, source)
            return native.reduce_scatter(source.flat, result.flat, name)

        native.run(begin, backend.envelope(call, timeout))
        scale_after(op, result, backend.world_size)
        return result.finish()

    return Operation("reduce_scatter", view.flat.nbytes, in_callers_stream(view, run))


def broadcast(
    backend: Backend, x: Any, root: int, strategy: Strategy | None, timeout: float | None
) -> Operation | None:
    """Every rank's `x` becomes the root's, in place."""
    if isinstance(backend, HybridBackend):
        return hybrid.broadcast(backend, x, root, timeout)
    native = _native(backend, strategy, backend.config.collective.broadcast)
    view = None if native is None else _view(native, x, writable=backend.rank != root)
    if native is None or view is None or not _suits(native, backend, "broadcast", view):
        return None
    call = _encode(Collective.BROADCAST, view, root=root)
    backend.check_timeout(timeout)

    def run() -> Any:
        native.run(lambda: native.broadcast(view.flat, root), backend.envelope(call, timeout))
        return x if backend.rank == root else view.finish()

    return Operation("broadcast", view.flat.nbytes, in_callers_stream(view, run))


def all_gather(backend: Backend, x: Any, timeout: float | None) -> Operation | None:
    """A new array of shape `(world_size, *x.shape)` with every rank's `x`."""
    native = _native(backend)
    view = None if native is None else _view(native, x)
    if native is None or view is None or not _suits(native, backend, "all_gather", view):
        return None
    call = _encode(Collective.ALL_GATHER, view)
    return _move(backend, native, "all_gather", view, (backend.world_size, *view.shape), call, timeout)


def all_to_all(backend: Backend, x: Any, timeout: float | None) -> Operation | None:
    """Part i of rank j's `x` becomes part j of rank i's result."""
    native = _native(backend)
    view = None if native is None else _view(native, x)
    if native is None or view is None or not _suits(native, backend, "all_to_all", view):
        return None
    if view.shape[:1] != (backend.world_size,):
        return None
    return _move(backend, native, "all_to_all", view, view.shape, _encode(Collective.ALL_TO_ALL, view), timeout)


def _move(
    backend: Backend,
    native: Native,
    what: str,
    view: ArrayView,
    shape: tuple[int, ...],
    call: bytes,
    timeout: float | None,
) -> Operation:
    backend.check_timeout(timeout)
    move: Callable[[Any, Any], Pending] = getattr(native, what)

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        result = view.new(shape)
        native.run(lambda: move(view.flat, result.flat), envelope)
        return result.finish()

    return Operation(what, view.flat.nbytes, in_callers_stream(view, run))


def _view(native: Native, x: Any, *, writable: bool = False) -> ArrayView | None:
    """`x` as the engine takes it, if it does."""
    return tensor_view(x, native.tensors_on) if native.tensors_on else as_view(x, "x", writable=writable)


# --- whether ----------------------------------------------------------------------------------------------------------


def _native(backend: Backend, asked: Strategy | None = None, configured: Strategy | None = None) -> Native | None:
    """The backend's engine, unless a person has chosen one of our ways."""
    if any(strategy is not None and strategy.shape is not Shape.AUTO for strategy in (asked, configured)):
        return None
    return backend.native()


def _suits(native: Native, backend: Backend, what: str, view: ArrayView, op: str = "") -> bool:
    if not native.takes(what, view.kind.name, op):
        return False
    least = backend.config.collective.native_bytes
    # What is on a device is not looked at by anybody else.
    return bool(native.tensors_on) or (least is not None and view.flat.nbytes >= max(1, least))


def _reduction(native: Native, backend: Backend, what: str, view: ArrayView, op: Op) -> str | None:
    """The engine's reduction of which `op` is made, if it has it. Raises where `op` has no meaning."""
    reduction.reducer(op, view.kind)
    name = reduction.describe(op)
    name = ReduceOp.SUM.name if name in _AS_SUM else name
    return name if _suits(native, backend, what, view, name) else None


def _encode(what: Collective, view: ArrayView, op: Op | None = None, root: int = 0) -> bytes:
    code = 0 if op is None else reduction.code_of(op)
    return signature.encode(what, kind=view.kind.code, count=prod(view.shape), op=code, root=root)
