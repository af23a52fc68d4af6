"""All-reduce and broadcast of tensors on GPUs, host by host: NCCL inside, our links between the first ranks of the
hosts, through the memory of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.backends.base import Backend
from ringfort.backends.engines.hybrid import HybridBackend
from ringfort.backends.engines.native import Native, Pending
from ringfort.collectives import reduction, signature
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.signature import Collective
from ringfort.collectives.tensors import TensorView, in_callers_stream, scale_after, scale_before, tensor_view
from ringfort.transport.messages import Envelope


def all_reduce(backend: HybridBackend, x: Any, op: Op, timeout: float | None) -> Operation | None:
    """Every rank's `x` becomes the reduction of all, if it is on a GPU."""
    view = tensor_view(x, backend.device)
    if view is None:
        return None
    reduction.reducer(op, view.kind)
    name = reduction.describe(op)
    name = ReduceOp.SUM.name if name in (ReduceOp.MEAN.name, ReduceOp.PREMUL_SUM.name) else name
    call = _encode(Collective.ALL_REDUCE, view, op=reduction.code_of(op))
    backend.check_timeout(timeout)

    from ringfort.collectives import reductions  # which ask here first

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        backend.meet(envelope)
        scale_before(op, view)
        _inside(backend, lambda native: native.reduce(view.flat, 0, name), envelope)
        _cross(backend, view, lambda group, x: reductions.all_reduce(group, x, ReduceOp[name], timeout=timeout))
        _inside(backend, lambda native: native.broadcast(view.flat, 0), envelope)
        scale_after(op, view, backend.world_size)
        return view.finish()

    return Operation("all_reduce", view.nbytes, in_callers_stream(view, run))


def broadcast(backend: HybridBackend, x: Any, root: int, timeout: float | None) -> Operation | None:
    """Every rank's `x` becomes the root's, if it is on a GPU."""
    view = tensor_view(x, backend.device)
    if view is None:
        return None
    call = _encode(Collective.BROADCAST, view, root=root)
    backend.check_timeout(timeout)

    from ringfort.collectives import movements  # which ask here first

    def run() -> Any:
        envelope = backend.envelope(call, timeout)
        backend.meet(envelope)
        if backend.hosts[root] == backend.hosts[backend.rank]:
            place = backend.local.to_local(root)
            _inside(backend, lambda native: native.broadcast(view.flat, place), envelope)
        first = sorted(set(backend.hosts)).index(backend.hosts[root])
        _cross(backend, view, lambda group, x: movements.broadcast(group, x, first, timeout=timeout))
        _inside(backend, lambda native: native.broadcast(view.flat, 0), envelope)
        return view.finish()

    return Operation("broadcast", view.nbytes, in_callers_stream(view, run))


def _inside(backend: HybridBackend, begin: Callable[[Native], Pending], envelope: Envelope) -> None:
    native = backend.inside
    if native is not None and backend.local.world_size > 1:
        native.carry(lambda: begin(native), envelope)


def _cross(backend: HybridBackend, view: TensorView, prepare: Callable[[Backend, Any], Operation]) -> None:
    """Does what `prepare` prepares for the first ranks of the hosts, with a copy in the memory of the CPU."""
    if backend.between is not None and backend.between.world_size > 1:
        copy = view.tensor.cpu()
        prepare(backend.between, copy).run()
        view.tensor.copy_(copy)


def _encode(what: Collective, view: TensorView, *, op: int = 0, root: int = 0) -> bytes:
    return signature.encode(what, kind=view.kind.code, count=view.tensor.numel(), op=op, root=root)
