"""Messages between two ranks of tensors on a GPU: each in one piece, so that it can be sent to the host's memory too.

They have streams of their own: behind the copies of a collective a message would wait for what the caller did before
that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.work import Work
from ringfort.torch.tensors import to_array
from ringfort.torch.transfers import flat, is_plain


class StagedMessages:
    """The messages of one GPU. Each call returns the work, and what gives the event after which all is done with the
    tensor, once the work is done."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._down, self._up = device.stream(), device.stream()

    def send(self, tensor: Any, start: Callable[[Any, Callable[[], object]], Work]) -> tuple[Work, Callable[[], Any]]:
        """`start` sends an array, once what it is given with it has returned."""
        device, source = self._device, flat(tensor, moved=True)
        device.check()
        copy = device.pinned(source.numel() * source.element_size()).view(source.dtype)
        self._down.wait_event(device.record(device.current()))
        device.keep(source, self._down)
        device.copy(self._down, copy, source)
        landed = device.record(self._down)
        return start(to_array(copy), landed.synchronize), lambda: landed

    def recv(self, tensor: Any, start: Callable[[ArrayView], Work]) -> tuple[Work, Callable[[], Any]]:
        """`start` receives into an array."""
        device, place = self._device, flat(tensor, moved=True)
        device.check()
        memory = device.pinned(place.numel() * place.element_size()).view(place.dtype)
        begun = device.record(device.current())
        for one in (tensor, place):
            device.keep(one, self._up)
        ended: list[Any] = []

        def finish() -> None:
            """In the thread that has received it."""
            self._up.wait_event(begun)
            device.copy(self._up, place, memory)
            if not is_plain(tensor):
                device.copy(self._up, tensor.detach(), place.view(tensor.dtype).view(tensor.shape))
            ended.append(device.record(self._up))

        view = as_view(to_array(memory))
        return start(ArrayView(view.flat, view.kind, finish=finish)), lambda: ended[0] if ended else None
