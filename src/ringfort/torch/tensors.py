"""Convert tensors to arrays that share their memory, and torch's reductions and timeouts to Ringfort's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from ringfort.collectives.arrays import as_view, reader_of_tensors
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.collectives.reduction import ELEMENT_TYPES
from ringfort.config import DEFAULT_TIMEOUT
from ringfort.errors import InvalidArgumentError, UnsupportedArrayError, UnsupportedOpError
from ringfort.torch.names import dist, torch

_KNOWN: Final = {
    getattr(torch, kind.name): kind.name != "bfloat16" for kind in ELEMENT_TYPES if hasattr(torch, kind.name)
}
"""The element types that can be reduced, and whether NumPy has them."""
_STRIDED: Final = torch.strided
_read: Final = reader_of_tensors()


def to_array(tensor: Any, name: str = "tensor") -> Any:
    """Return `tensor` as the collectives take it: its own memory wherever possible."""
    _check_dense(tensor, name)
    if _KNOWN.get(tensor.dtype) and tensor.is_cpu and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj()):
        return _read(tensor)
    return as_view(tensor, name)


def to_moved(tensor: Any, name: str = "tensor") -> Any:
    """Return `tensor` for a collective that only moves it. Element types that cannot be reduced, such as 8-bit floats,
    become bytes."""
    if tensor.dtype in _KNOWN or tensor.layout is not _STRIDED or tensor.is_quantized:
        return to_array(tensor, name)
    if tensor.is_contiguous():
        return to_array(tensor.detach().view(-1).view(torch.uint8), name)
    raise InvalidArgumentError(name, f"tensor of {tensor.dtype}", "must be contiguous; pass tensor.contiguous()")


def is_plain(tensor: Any) -> bool:
    """Return whether the memory of `tensor` holds its elements one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flatten(tensor: Any, *, reduces: bool = False) -> Any:
    """Return the elements of `tensor`, on its device, as one contiguous axis: its own memory where it `is_plain`.

    Unless the elements are reduced, those of other types become bytes as in `to_moved`.
    """
    _check_dense(tensor, "tensor")
    plain = tensor.detach() if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1) if reduces or tensor.dtype in _KNOWN else plain.view(-1).view(torch.uint8)


def _check_dense(tensor: Any, name: str) -> None:
    if tensor.layout is not _STRIDED:
        raise UnsupportedArrayError(name, f"tensor of {tensor.layout}", "must be dense; pass tensor.to_dense()")


def split(tensor: Any, count: int, name: str, sizes: Sequence[int] = ()) -> list[Any]:
    """Split the memory of `tensor` into one part for each of `count` ranks: `sizes[r]` rows for rank r, or equal parts.

    Raises `InvalidArgumentError` if the tensor is not contiguous or cannot be split like this.
    """
    what = f"tensor of shape {tuple(tensor.shape)}"
    if not tensor.is_contiguous():
        raise InvalidArgumentError(name, what, "must be contiguous")
    flat = tensor.detach().view(-1)
    if not sizes:
        if flat.numel() % count:
            raise InvalidArgumentError(name, what, f"must have a multiple of {count} elements, not {flat.numel()}")
        return list(flat.split(flat.numel() // count)) if flat.numel() else [flat] * count
    length = tensor.shape[0] if tensor.dim() else 0
    if len(sizes) != count or sum(sizes) != length or min(sizes) < 0:
        why = f"must have one number for each of {count} ranks, {length} in all"
        raise InvalidArgumentError(f"{name}_split_sizes", list(sizes), why)
    row = flat.numel() // length if length else 0
    return list(flat.split([size * row for size in sizes]))


# --- options ----------------------------------------------------------------------------------------------------------

_KIND: Final[Any] = dist.ReduceOp.RedOpType
_OPS: Final[dict[Any, ReduceOp]] = {
    getattr(_KIND, op.name): op for op in ReduceOp if op not in (ReduceOp.MEAN, ReduceOp.PREMUL_SUM)
} | {_KIND.AVG: ReduceOp.MEAN}


def to_op(op: Any) -> Op:
    """Return Ringfort's reduction for torch's. Raises `UnsupportedOpError` if there is none."""
    found = _OPS.get(getattr(op, "op", op))
    if found is not None:
        return found
    # Torch gives the factor of a PREMUL_SUM only to pickle.
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else None
    if state is not None and state[0] == _KIND.PREMUL_SUM and state[1] is not None:
        return ReduceOp.premul_sum(float(state[1]))
    raise UnsupportedOpError(str(op), "any element type", "unknown reduction")


def to_seconds(timeout: timedelta | None, otherwise: float = DEFAULT_TIMEOUT) -> float:
    """Return torch's timeout in seconds, or `otherwise` if it is not set: None, zero or negative."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else otherwise
