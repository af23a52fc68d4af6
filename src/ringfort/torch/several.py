"""Calls with several tensors per rank, with tensors that share memory and with sparse tensors.

Torch had the first for processes with several GPUs, and its methods still take lists. They mean what Gloo makes of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, Final

from ringfort.backends.group import Group
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.errors import InvalidArgumentError, ProtocolError, UnsupportedOpError
from ringfort.torch import operations
from ringfort.torch.names import torch
from ringfort.torch.operations import ALL_GATHER, Call, Operation

_LOCALLY: Final[dict[Any, Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def all_reduce(tensors: Sequence[Any], op: Op) -> Call:
    """Describe an all-reduce after which each tensor of each rank is the reduction of all tensors of all ranks."""
    _check_alike(tensors)
    local = _LOCALLY.get(op)
    if local is None:
        raise UnsupportedOpError(str(op), str(tensors[0].dtype), "with several tensors per rank; pass one")
    total = _empty_like(tensors[0])

    @torch.inference_mode()  # inference tensors may not be used in place outside of it
    def reduce_locally() -> None:
        total.copy_(tensors[0])
        for tensor in tensors[1:]:
            local(total, tensor, out=total)

    copies = [(tensor, total) for tensor in tensors]
    return operations.all_reduce(total, op, result=tensors, before=reduce_locally, copies=copies)


def broadcast(tensors: Sequence[Any], root: int, index: int, *, is_root: bool) -> Call:
    """Describe a broadcast after which each tensor of each rank is the root's tensor number `index`."""
    _check_alike(tensors)
    source = tensors[index]
    copies = [(tensor, source) for place, tensor in enumerate(tensors) if place != index]
    return operations.broadcast(source, root, is_root=is_root, result=tensors, copies=copies)


def all_gather(outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], world_size: int) -> list[Call]:
    """Describe the all-gathers after which each list of outputs is the inputs of rank 0, then those of rank 1, ..."""
    count, length = len(inputs), len(inputs) * world_size
    if len(outputs) != count or any(len(places) != length for places in outputs):
        lengths = [len(places) for places in outputs]
        why = f"must be {count} lists of {length} tensors, for {count} inputs at each of {world_size} ranks"
        raise InvalidArgumentError("output", f"lists of {lengths}", why)
    first, *others = outputs
    calls = [Call(ALL_GATHER, [source], first[index::count]) for index, source in enumerate(inputs)]
    copies = [pair for places in others for pair in zip(places, first, strict=True)]
    result = [*calls[-1].outputs, *(into for into, _ in copies)]
    return [*calls[:-1], calls[-1]._replace(copies=copies, result=result)]


def all_reduce_each(tensors: Sequence[Any], op: Op) -> list[Call]:
    """Describe an all-reduce of each tensor. Where some share memory, all are read before one is written."""
    if not _overlap(tensors):
        return [operations.all_reduce(tensor, op) for tensor in tensors]
    apart = [_empty_like(tensor) for tensor in tensors]

    @torch.inference_mode()
    def copy_all() -> None:
        for tensor, own in zip(tensors, apart, strict=True):
            own.copy_(tensor)

    calls = [operations.all_reduce(own, op, result=[tensor]) for tensor, own in zip(tensors, apart, strict=True)]
    calls[0] = calls[0]._replace(before=copy_all)
    calls[-1] = calls[-1]._replace(copies=list(zip(tensors, apart, strict=True)))
    return calls


def _empty_like(tensor: Any) -> Any:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()


def _overlap(tensors: Sequence[Any]) -> bool:
    if len(tensors) == 1:
        return False
    ranges = sorted(_extent(tensor) for tensor in tensors if tensor.numel())
    return any(before[1] > after[0] for before, after in pairwise(ranges))


def _extent(tensor: Any) -> tuple[int, int]:
    """Return the address of the first element and the one after the last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _check_alike(tensors: Sequence[Any]) -> None:
    """Raise `InvalidArgumentError` unless all tensors have the same shape, element type and layout."""
    first = tensors[0]
    for tensor in tensors[1:]:
        if (tensor.shape, tensor.dtype, tensor.layout) != (first.shape, first.dtype, first.layout):
            what = f"{tensor.dtype}{list(tensor.shape)} beside {first.dtype}{list(first.shape)}"
            if tensor.layout != first.layout:
                what = f"{tensor.layout} beside {first.layout}"
            raise InvalidArgumentError("tensors", what, "must all have the same shape, element type and layout")


def all_reduce_sparse(group: Group, tensors: Sequence[Any], op: Op, timeout: float) -> Operation:
    """Prepare the operation that makes each of `tensors` the sum of all of them at all ranks: every rank gathers the
    indices and values of all ranks, and adds them up.

    All must have the layout `sparse_coo` and one shape.
    """
    _check_alike(tensors)
    if op is not ReduceOp.SUM:
        raise UnsupportedOpError(str(op), "sparse tensors", "sparse tensors can only be added")
    group.check_timeout(timeout)

    def gather(x: Any) -> Any:
        """Return every rank's `x`, along a new first axis."""
        found = x.new_empty(group.world_size, *x.shape)
        Call(ALL_GATHER, [x], list(found)).operation(group, timeout).run()
        return found

    def gather_rows(x: Any, counts: list[int]) -> Any:
        """Return the rows of every rank's `x`, of which rank r has `counts[r]`."""
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        return torch.cat([part[:number] for part, number in zip(gather(padded), counts, strict=True)])

    def run() -> None:
        own = reduce(torch.add, [tensor.detach() for tensor in tensors]).coalesce()
        indices, values = own.indices(), own.values().contiguous()
        shape = [own.sparse_dim(), *own.shape]
        for rank, other in enumerate(gather(torch.tensor(shape, device="cpu")).tolist()):
            if other != shape:
                why = f"sparse axes and shape differ: {shape} at this rank, {other} at rank {rank}"
                raise InvalidArgumentError("tensor", f"sparse tensor of shape {list(own.shape)}", why)
        counts = gather(torch.tensor(indices.shape[1], device="cpu")).tolist()
        every_index, every_value = gather_rows(indices.t(), counts), gather_rows(values, counts)
        try:  # torch would write outside its memory if a peer sent an index that is out of range
            total = torch.sparse_coo_tensor(every_index.t(), every_value, own.shape, check_invariants=True)
        except RuntimeError as exc:
            raise ProtocolError(f"Invalid indices in the sparse tensor of a peer: {exc}") from exc
        total = total.coalesce()
        with torch.inference_mode():  # inference tensors may not be written to outside of it
            for tensor in tensors:
                tensor.copy_(total)

    return Operation("all_reduce", sum(tensor._values().nbytes for tensor in tensors), run)
