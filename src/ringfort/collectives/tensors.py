"""What every collective begins and ends with: `view_for` the caller's array, and the `operation` that runs its plan.

Tensors on a device stay there: engines that work on the device see them as arrays."""

from __future__ import annotations

import sys
from typing import Any, cast

import numpy as np

from ringfort.backends.group import Group
from ringfort.collectives import reduction
from ringfort.collectives.arrays import ArrayView, Finish, as_view
from ringfort.collectives.ops import Op, PremulSum, ReduceOp
from ringfort.collectives.parts import Parts
from ringfort.collectives.plan import Operation, Plan
from ringfort.collectives.reduction import ElementType, element_type_named
from ringfort.errors import UnsupportedArrayError
from ringfort.transport.reducer import Array


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
        self.size, self.device = int(x.numel()), str(x.device)

    def new(self, shape: tuple[int, ...]) -> ArrayView:
        return TensorView(self.tensor.new_empty(shape))


def tensor_view(x: Any, device: str, name: str = "x") -> TensorView | None:
    """`x`, if it is a tensor of torch's on `device`. Raises `UnsupportedArrayError` if it is a sparse one."""
    is_tensor = type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "detach")
    if not is_tensor or x.device.type != device:
        return None
    if str(x.layout) != "torch.strided":
        raise UnsupportedArrayError(name, f"tensor of {x.layout}", "must be dense; pass x.to_dense()")
    return TensorView(x)


def operation(
    group: Group, name: str, x: ArrayView | Parts, plan: Plan, finish: Finish, timeout: float | None, *arrays: Any
) -> Operation:
    """Return the operation that runs `plan` with `arrays` and returns what `finish` does. `x` is this rank's array.

    Kernels go to the stream that is the caller's now: the operation may run in another thread, where the current stream
    is another."""
    group.check_timeout(timeout)

    def run() -> Any:
        plan.run(*arrays, timeout=timeout)
        return finish()

    if not isinstance(x, TensorView) or x.tensor.device.type != "cuda":
        return Operation(name, x.nbytes, run)
    cuda = sys.modules["torch"].cuda
    stream = cuda.current_stream(x.tensor.device)

    def run_there() -> Any:
        with cuda.stream(stream):
            return run()

    return Operation(name, x.nbytes, run_there)


def scale_before(op: Op, kind: ElementType, flat: Any) -> None:
    """`reduction.scale_before`, also for tensors."""
    if isinstance(flat, np.ndarray):
        reduction.scale_before(op, kind, cast("Array", flat))
    elif isinstance(op, PremulSum):
        flat.mul_(op.factor)


def scale_after(op: Op, kind: ElementType, flat: Any, world_size: int) -> None:
    """`reduction.scale_after`, also for tensors."""
    if isinstance(flat, np.ndarray):
        reduction.scale_after(op, kind, cast("Array", flat), world_size)
    elif op is ReduceOp.MEAN:
        flat.div_(world_size, rounding_mode="trunc" if kind.kind in "iu" else None)


def view_for(group: Group, x: Any, name: str = "x", *, writable: bool = False) -> ArrayView:
    """Return `x`, the argument `name`, as the group's collectives take it: a tensor on a device stays there, if the
    group's engine can work on it."""
    native = group.native
    on_device = tensor_view(x, native.tensors_on, name) if native is not None and native.tensors_on else None
    return on_device or as_view(x, name, writable=writable)
