"""Tensors of torch's that stay where they are: seen as arrays by engines that work on the device."""

from __future__ import annotations

from typing import Any

from ringfort.collectives import kernels
from ringfort.collectives.arrays import ArrayView
from ringfort.collectives.kernels import element_type_named
from ringfort.collectives.ops import Op, PremulSum, ReduceOp


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
    """`x`, if it is a tensor of torch's on `device`."""
    is_tensor = type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "detach")
    return TensorView(x) if is_tensor and x.device.type == device else None


def scale_before(op: Op, view: ArrayView) -> None:
    """`kernels.scale_before`, also for tensors."""
    if not isinstance(view, TensorView):
        kernels.scale_before(op, view.kind, view.flat)
    elif isinstance(op, PremulSum):
        view.tensor.mul_(op.factor)


def scale_after(op: Op, view: ArrayView, world_size: int) -> None:
    """`kernels.scale_after`, also for tensors."""
    if not isinstance(view, TensorView):
        kernels.scale_after(op, view.kind, view.flat, world_size)
    elif op is ReduceOp.MEAN:
        view.tensor.div_(world_size, rounding_mode="trunc" if view.kind.kind in "iu" else None)
