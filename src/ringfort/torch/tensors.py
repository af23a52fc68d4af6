"""Tensors as arrays that share their memory, and torch's reductions as Ringfort's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from ringfort.collectives.arrays import as_view
from ringfort.collectives.kernels import ELEMENT_TYPES
from ringfort.collectives.ops import Op, ReduceOp
from ringfort.config import DEFAULT_TIMEOUT
from ringfort.errors import InvalidArgumentError, UnsupportedOpError
from ringfort.torch.names import dist, torch

_KNOWN: Final = {
    getattr(torch, kind.name): kind.name != "bfloat16" for kind in ELEMENT_TYPES if hasattr(torch, kind.name)
}
"""The element types that can be reduced, and whether NumPy knows them."""


def to_array(tensor: Any, name: str = "tensor") -> Any:
    """What the collectives take for `tensor`: its memory, wherever that can be."""
    if _KNOWN.get(tensor.dtype) and not tensor.requires_grad and tensor.is_cpu:
        try:
            return tensor.numpy()
        except (TypeError, RuntimeError):  # sparse, or conjugate: as_view knows what to do or says what is wrong
            pass
    return as_view(tensor, name)


def to_moved(tensor: Any, name: str = "tensor") -> Any:
    """`to_array` for what is only moved: of element types that are not known, such as the 8-bit floats, the bytes."""
    if tensor.dtype in _KNOWN or tensor.layout is not torch.strided or tensor.is_quantized:
        return to_array(tensor, name)
    if tensor.is_contiguous():
        return to_array(tensor.detach().view(-1).view(torch.uint8), name)
    raise InvalidArgumentError(name, f"tensor of {tensor.dtype}", "is not contiguous; pass tensor.contiguous()")


def rows(tensor: Any, count: int, name: str) -> list[Any]:
    """`tensor` cut into `count` equal parts along its memory. Raises `InvalidArgumentError` if that cannot be."""
    if not tensor.is_contiguous():
        raise InvalidArgumentError(name, f"tensor of shape {tuple(tensor.shape)}", "must be contiguous")
    if tensor.numel() % count:
        why = f"its {tensor.numel()} elements cannot be divided by {count} ranks"
        raise InvalidArgumentError(name, f"tensor of shape {tuple(tensor.shape)}", why)
    return cut(tensor, [tensor.numel() // count] * count, name)


def cut(tensor: Any, sizes: Sequence[int], name: str) -> list[Any]:
    """The memory of `tensor` in parts of so many elements."""
    flat = tensor.detach().view(-1)
    parts: list[Any] = []
    start = 0
    for size in sizes:
        parts.append(to_moved(flat[start : start + size], name))
        start += size
    return parts


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
