"""`StagedView`: a tensor on another device than the CPU, as a view whose memory is a copy on the host."""

from __future__ import annotations

from typing import Any

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.errors import UnsupportedArrayError
from ringfort.torch.names import torch
from ringfort.transport.reducer import Array


class StagedView(ArrayView):
    """A tensor of a device. Its elements are copied down when they are first asked for, and up again by `finish`: those
    that nobody asks for stay where they are. From and to a GPU through pinned memory, which it copies by itself."""

    def __init__(self, tensor: Any, name: str) -> None:
        """Raise `UnsupportedArrayError` for a tensor that cannot be copied, such as one on `meta`."""
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            raise UnsupportedArrayError(
                name, f"{tensor.layout} tensor on {tensor.device}", "must be dense, with memory"
            )
        self._tensor, self._host = tensor, None
        like = as_view(torch.empty(0, dtype=tensor.dtype, device="cpu"), name)
        self.kind, self.size, self.shape = like.kind, tensor.numel(), tuple(tensor.shape)
        self.device = str(tensor.device)
        self.finish = self._copy_up

    @property
    def flat(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The elements on the host."""
        if self._host is None:
            source = self._tensor.detach()
            host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
            host.copy_(source)  # waits for the kernels before, as every read of a tensor does
            self._host, self._read = host, as_view(host)
        return self._read.flat

    def _copy_up(self) -> Any:
        if self._host is not None:
            # A GPU copies in the caller's stream; torch keeps the pinned memory until then.
            self._tensor.detach().copy_(self._host, non_blocking=self._tensor.is_cuda)
        return self._tensor


def staged_view(x: Any, name: str = "x", *, writable: bool = False) -> ArrayView:
    """Do what `as_view` does, and return tensors of other devices as a `StagedView`."""
    if isinstance(x, torch.Tensor) and not x.is_cpu:
        return StagedView(x, name)
    return as_view(x, name, writable=writable)
