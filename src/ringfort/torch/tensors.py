"""Tensors as arrays that share their memory, and torch's reductions as Ringfort's."""

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
"""The element types that can be reduced, and whether NumPy knows them."""
_STRIDED: Final = torch.strided
_read: Final = reader_of_tensors()


def to_array(tensor: Any, name: str = "tensor") -> Any:
    """What the collectives take for `tensor`: its memory, wherever that can be."""
    if tensor.layout is not _STRIDED:
        how = "only dense tensors travel; pass tensor.to_dense()"
        raise UnsupportedArrayError(name, f"tensor of layout {tensor.layout}", how)
    if _KNOWN.get(tensor.dtype) and tensor.is_cpu and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj()):
        return _read(tensor)
    return as_view(tensor, name)


def to_moved(tensor: Any, name: str = "tensor") -> Any:
    """`to_array` for what is only moved: of element types that are not known, such as the 8-bit floats, the bytes."""
    if tensor.dtype in _KNOWN or tensor.layout is not torch.strided or tensor.is_quantized:
        return to_array(tensor, name)
    if tensor.is_contiguous():
        return to_array(tensor.detach().view(-1).view(torch.uint8), name)
    raise InvalidArgumentError(name, f"tensor of {tensor.dtype}", "is not contiguous; pass tensor.contiguous()")


def pieces(tensor: Any, sizes: Sequence[int], count: int, name: str) -> list[Any]:
    """The memory of `tensor` in a part for each of `count` ranks: `sizes[r]` rows for rank r, or all the same.
    Raises `InvalidArgumentError` if that cannot be."""
    what = f"tensor of shape {tuple(tensor.shape)}"
    if not tensor.is_contiguous():
        raise InvalidArgumentError(name, what, "must be contiguous")
    flat = tensor.detach().view(-1)
    if not sizes:
        if flat.numel() % count:
            raise InvalidArgumentError(name, what, f"its {flat.numel()} elements cannot be divided by {count} ranks")
        return list(flat.split(flat.numel() // count)) if flat.numel() else [flat] * count
    length = tensor.shape[0] if tensor.dim() else 0
    if len(sizes) != count or sum(sizes) != length or min(sizes) < 0:
        why = f"must have one number for each of {count} ranks, {length} in all"
        raise InvalidArgumentError(f"{name}_split_sizes", list(sizes), why)
    row = flat.numel() // length if length else 0
    return list(flat.split([size * row for size in sizes]))


def rows(tensor: Any, count: int, name: str, sizes: Sequence[int] = ()) -> list[Any]:
    """`pieces` as the collectives take them."""
    return [to_moved(piece, name) for piece in pieces(tensor, sizes, count, name)]


# --- options ----------------------------------------------------------------------------------------------------------

_KIND: Final[Any] = dist.ReduceOp.RedOpType
_OPS: Final[dict[Any, ReduceOp]] = {
    _KIND.SUM: ReduceOp.SUM,
    _KIND.AVG: ReduceOp.MEAN,
    _KIND.PRODUCT: ReduceOp.PRODUCT,
    _KIND.MIN: ReduceOp.MIN,
    _KIND.MAX: ReduceOp.MAX,
    _KIND.BAND: ReduceOp.BAND,
    _KIND.BOR: ReduceOp.BOR,
    _KIND.BXOR: ReduceOp.BXOR,
}


def to_op(op: Any) -> Op:
    """Ringfort's name of torch's reduction. Raises `UnsupportedOpError` for what has none."""
    found = _OPS.get(getattr(op, "op", op))
    if found is not None:
        return found
    # The factor of a PREMUL_SUM can be had only where torch would write it to a file.
    state = op.__getstate__() if isinstance(op, dist.ReduceOp) else None
    if state is not None and state[0] == _KIND.PREMUL_SUM and state[1] is not None:
        return ReduceOp.premul_sum(float(state[1]))
    raise UnsupportedOpError(str(op), "any element type", "Ringfort has no such reduction")


def to_seconds(timeout: timedelta | None, otherwise: float = DEFAULT_TIMEOUT) -> float:
    """Torch's timeout in seconds; where it was not set, which torch writes as a negative or zero time, `otherwise`."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else otherwise
