"""Tensors of torch's that stay where they are: seen as arrays by engines that work on the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ringfort.collectives import reduction
from ringfort.collectives.arrays import ArrayView
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.collectives.reduction import element_type_named
from ringfort.errors import UnsupportedArrayError


class TensorView(ArrayView):
    """A tensor on any device; `flat` is a tensor too."""

    def __init__(self, x: Any) -> None:
        plain = x.detach()
        dense = plain.contiguous()

        def finish() -> Any:
            if dense is not plain:
                plain.copy_(dense)
            return x

        kind = element_type_named(str(x.dtype).removeprefix("torch."))
        super().__init__(dense.view(-1), kind, tuple(x.shape), finish=finish)
        self.tensor: Any = self.flat

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.tensor.numel() * self.kind.itemsize

    def new(self, shape: tuple[int, ...]) -> ArrayView:
        return TensorView(self.tensor.new_empty(shape))


def tensor_view(x: Any, device: str) -> TensorView | None:
    """`x`, if it is a tensor of torch's on `device`. Raises `UnsupportedArrayError` if it is a sparse one."""
    is_tensor = type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "detach")
    if not is_tensor or x.device.type != device:
        return None
    if str(x.layout) != "torch.strided":
        raise UnsupportedArrayError("x", f"tensor of {x.layout}", "must be dense; pass x.to_dense()")
    return TensorView(x)


def in_callers_stream(view: ArrayView, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`, whose kernels go to the stream that is the caller's now: it may run in another thread, where the current
    stream is another."""
    if not isinstance(view, TensorView) or view.tensor.device.type != "cuda":
        return run
    cuda = sys.modules["torch"].cuda
    stream = cuda.current_stream(view.tensor.device)

    def run_there() -> Any:
        with cuda.stream(stream):
            return run()

    return run_there


def scale_before(op: Op, view: ArrayView) -> None:
    """`reduction.scale_before`, also for tensors."""
    if not isinstance(view, TensorView):
        reduction.scale_before(op, view.kind, view.flat)
    elif isinstance(op, PremulSum):
        view.tensor.mul_(op.factor)


def scale_after(op: Op, view: ArrayView, world_size: int) -> None:
    """`reduction.scale_after`, also for tensors."""
    if not isinstance(view, TensorView):
        reduction.scale_after(op, view.kind, view.flat, world_size)
    elif op is ReduceOp.MEAN:
        view.tensor.div_(world_size, rounding_mode="trunc" if view.kind.kind in "iu" else None)
