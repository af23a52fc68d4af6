"""All-reduce of sparse tensors: every rank gathers the indices and values of all ranks, and adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ringfort.backends.group import Group
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.errors import InvalidArgumentError, ProtocolError, UnsupportedOpError
from ringfort.torch.names import torch
from ringfort.torch.operations import ALL_GATHER, Call, Operation
from ringfort.torch.several import check_alike


def is_sparse(tensor: Any) -> bool:
    """Return whether `tensor` is sparse, in the layout that can be reduced."""
    return tensor.layout is torch.sparse_coo


def all_reduce(group: Group, tensors: Sequence[Any], op: Op, timeout: float) -> Operation:
    """Prepare the operation that makes each of `tensors` the sum of all of them at all ranks.

    All must have the layout `sparse_coo` and one shape. Every rank takes memory for the values of all ranks.
    """
    check_alike(tensors)
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
