"""Calls with several tensors per rank, as torch had them for several GPUs per process, and tensors that overlap.

Torch's methods still take lists; what they mean is what Gloo does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from ringfort.backends.base import Backend
from ringfort.collectives import landing, movements, reductions
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.errors import InvalidArgumentError, UnsupportedOpError
from ringfort.torch.names import torch
from ringfort.torch.tensors import to_array, to_moved

_LOCALLY: Final[dict[Any, Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def as_one(operations: Sequence[Operation]) -> Operation:
    """One after the other, as one operation."""
    if len(operations) == 1:
        return operations[0]

    def run() -> None:
        for operation in operations:
            operation.run()

    name = operations[0].name if operations else "nothing"
    return Operation(name, sum(operation.nbytes for operation in operations), run)


def all_reduce(backend: Backend, tensors: Sequence[Any], op: Op, timeout: float) -> Operation:
    """Every tensor of every rank becomes the reduction of all of them."""
    _check_alike(tensors)
    local = _LOCALLY.get(op)
    if local is None:
        raise UnsupportedOpError(str(op), str(tensors[0].dtype), "with several tensors per rank; pass one")
    total = torch.empty_like(tensors[0], memory_format=torch.contiguous_format).detach()
    whole = reductions.all_reduce(backend, to_array(total), op, timeout=timeout)

    def run() -> None:
        with torch.inference_mode():  # the tensors may be such that only this may write to them
            total.copy_(tensors[0])
            for tensor in tensors[1:]:
                local(total, tensor, out=total)
            whole.run()
            for tensor in tensors:
                tensor.copy_(total)

    return Operation(whole.name, whole.nbytes * len(tensors), run)


def broadcast(backend: Backend, tensors: Sequence[Any], root: int, index: int, timeout: float) -> Operation:
    """Every tensor of every rank becomes the root's number `index`."""
    _check_alike(tensors)
    if not 0 <= index < len(tensors):
        raise InvalidArgumentError("rootTensor", index, f"there are {len(tensors)} tensors")
    moved = movements.broadcast(backend, to_moved(tensors[index]), root, timeout=timeout)
    others = [tensor for place, tensor in enumerate(tensors) if place != index]
    return as_one([moved, _copies([(tensors[index], tensor) for tensor in others])])


def all_gather(backend: Backend, outputs: Sequence[Any], inputs: Sequence[Any], timeout: float) -> Operation:
    """Each list of outputs becomes the inputs of rank 0, those of rank 1, and so on."""
    n, count = backend.world_size, len(inputs)
    if len(outputs) != count or any(len(places) != n * count for places in outputs):
        lengths = [len(places) for places in outputs]
        why = f"{count} inputs at each of {n} ranks need {count} lists of {n * count} outputs"
        raise InvalidArgumentError("outputs", f"lists of {lengths}", why)
    first, *others = outputs
    moved = [
        landing.all_gather(
            backend,
            to_moved(source, "input"),
            [to_moved(place, "output") for place in first[index::count]],
            timeout=timeout,
        )
        for index, source in enumerate(inputs)
    ]
    return as_one([*moved, _copies([pair for places in others for pair in zip(first, places, strict=True)])])


def apart(tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors, or where some share memory as many that do not: to be filled and written back by `around`."""
    if len(tensors) == 1:
        return tensors
    ranges = sorted(_extent(tensor) for tensor in tensors if tensor.numel())
    if all(before[1] <= after[0] for before, after in pairwise(ranges)):
        return tensors
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format).detach() for tensor in tensors]


def around(tensors: Sequence[Any], copies: Sequence[Any], operations: Sequence[Operation]) -> Sequence[Operation]:
    """The operations on `copies`, which were made by `apart`, as if they were on `tensors`."""
    if copies is tensors:
        return operations
    pairs = list(zip(tensors, copies, strict=True))
    return [as_one([_copies(pairs), *operations, _copies([(copy, x) for x, copy in pairs])])]


def _extent(tensor: Any) -> tuple[int, int]:
    """The addresses from the first element to behind the last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _copies(pairs: Sequence[tuple[Any, Any]]) -> Operation:
    """Copies the first of each pair to the second."""

    def run() -> None:
        with torch.inference_mode():  # the tensors may be such that only this may write to them
            for source, place in pairs:
                place.copy_(source)

    return Operation("all_reduce", 0, run)


def _check_alike(tensors: Sequence[Any]) -> None:
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            what = f"{tensor.dtype}{list(tensor.shape)} beside {first.dtype}{list(first.shape)}"
            raise InvalidArgumentError("tensors", what, "must all have the same shape and element type")
