"""Point-to-point messages of tensors on a GPU. Each is one piece, so that the peer may have it in host memory.

They have streams of their own: behind the copies of a collective, a message would wait for the kernels that the caller
issued before that collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.torch.tensors import flatten, is_plain, to_array


class StagedMessages:
    """The messages of one GPU."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._down, self._up = device.stream(), device.stream()

    def outgoing(self, tensor: Any) -> tuple[Any, Any]:
        """Begin to copy `tensor` to the host. Return the copy, and the event after which it is complete."""
        device, source = self.device, flatten(tensor)
        device.check()
        copy = device.pinned(source.numel() * source.element_size()).view(source.dtype)
        self._down.wait_event(device.record(device.current()))
        device.keep(source, self._down)
        device.copy(self._down, copy, source)
        return to_array(copy), device.record(self._down)

    def incoming(self, tensor: Any) -> tuple[ArrayView, Callable[[], Any]]:
        """Return a view to receive in, which copies itself to `tensor` when it is finished; and a function that returns
        the event of that copy, once there is one."""
        device, place = self.device, flatten(tensor)
        device.check()
        memory = device.pinned(place.numel() * place.element_size()).view(place.dtype)
        issued = device.record(device.current())
        for one in (tensor, place):
            device.keep(one, self._up)
        ended: list[Any] = []

        def finish() -> None:
            """Copy to the device, in the thread that has received the message."""
            self._up.wait_event(issued)
            device.copy(self._up, place, memory)
            if not is_plain(tensor):
                device.copy(self._up, tensor.detach(), place.view(tensor.dtype).view(tensor.shape))
            ended.append(device.record(self._up))

        view = as_view(to_array(memory))
        return ArrayView(view.flat, view.kind, finish=finish), lambda: ended[0] if ended else None
