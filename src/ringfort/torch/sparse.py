"""All-reduce of sparse tensors: every rank gathers the indices and values of all, and adds what is at one place."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringfort.backends.base import Backend
from ringfort.collectives import landing, movements
from ringfort.collectives.operation import Operation
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.errors import InvalidArgumentError, ProtocolError, UnsupportedOpError
from ringfort.torch.names import torch
from ringfort.torch.tensors import to_array


def is_sparse(tensor: Any) -> bool:
    """Whether it is a sparse tensor that can be reduced here."""
    return tensor.layout is torch.sparse_coo


def all_reduce(backend: Backend, tensor: Any, op: Op, timeout: float) -> Operation:
    """`tensor`, in the layout `sparse_coo`, becomes the sum of those of all ranks, which must have one shape.

    Every rank takes memory for the values of all ranks."""
    if op is not ReduceOp.SUM:
        raise UnsupportedOpError(str(op), "sparse tensors", "they can only be added")
    backend.check_timeout(timeout)

    def run() -> None:
        own = tensor.detach().coalesce()
        indices, values = own.indices(), own.values().contiguous()
        what = np.array([own.sparse_dim(), *own.shape], np.int64)
        for rank, other in enumerate(movements.all_gather(backend, what, timeout=timeout).run()):
            if other.tolist() != what.tolist():
                why = f"this rank has {what.tolist()} sparse axes and shape, rank {rank} {other.tolist()}"
                raise InvalidArgumentError("tensor", f"sparse tensor of shape {list(own.shape)}", why)
        count = np.array([indices.shape[1]], np.int64)
        counts = movements.all_gather(backend, count, timeout=timeout).run()[:, 0].tolist()
        every_index = _gather(backend, indices.t(), counts, timeout)
        every_value = _gather(backend, values, counts, timeout)
        try:  # the indices of others are not to be trusted: torch would add beside its memory
            total = torch.sparse_coo_tensor(every_index.t(), every_value, own.shape, check_invariants=True)
        except RuntimeError as exc:
            raise ProtocolError(f"Invalid indices in the sparse tensor of a peer: {exc}") from exc
        total = total.coalesce()
        with torch.inference_mode():  # the tensor may be one that only this may write to
            tensor.copy_(total)

    return Operation("all_reduce", tensor._values().nbytes, run)


def _gather(backend: Backend, x: Any, counts: list[int], timeout: float) -> Any:
    """The rows of all ranks' `x`, of which rank r has `counts[r]`."""
    most = max(counts)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    found = x.new_empty(len(counts), most, *x.shape[1:])
    landing.all_gather(backend, to_array(padded), [to_array(part) for part in found], timeout=timeout).run()
    return torch.cat([part[:number] for part, number in zip(found, counts, strict=True)])
