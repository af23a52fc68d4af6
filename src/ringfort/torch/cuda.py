"""`CudaEngine`: what a process group does with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from ringfort.collectives.work import Work
from ringfort.context import DistributedContext
from ringfort.torch.operations import Call
from ringfort.torch.staged_point_to_point import StagedMessages
from ringfort.torch.staging import CHUNK_BYTES, Stage
from ringfort.torch.streams import CudaDevice
from ringfort.torch.untraced import untraced
from ringfort.torch.work import RingfortWork, Several


@untraced
class CudaWork(RingfortWork):
    """A call whose result is there after an event of the device."""

    def __init__(
        self, device: Any, ended: Callable[[], Any], tensors: Sequence[Any], work: Work, source: int | None = None
    ) -> None:
        """`ended` returns the event after which nothing touches the tensors any more; None while the work is under
        way. `source` is the rank that a message comes from."""
        super().__init__(tensors, work, source)
        self._device, self._ended = device, ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the network has done its part, as with Gloo, and raise what it raised. Then the current stream
        waits for the rest."""
        try:
            return super().wait(timeout)
        finally:
            ended = self._ended()
            if ended is not None:
                self._device.current().wait_event(ended)

    def is_completed(self) -> bool:
        """Return whether the result is there, or an error."""
        return super().is_completed() and (self.exception() is not None or self._ended().query())

    def block_current_stream(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def _new_future(self) -> Any:
        """Return a future that knows about streams: whoever waits for it makes its current stream wait."""
        return self._device.future()


def issue(stage: Stage, call: Call, seconds: float) -> CudaWork:
    """Begin `call`. Raises what is wrong with it."""
    work, staged = stage.issue(call, seconds)
    return CudaWork(stage.device, lambda: staged.ended, call.results, work)


class CudaEngine:
    """Serves the tensors of one group that are on GPUs."""

    def __init__(
        self, context: DistributedContext, *, chunk_bytes: int = CHUNK_BYTES, make: Callable[[Any], Any] = CudaDevice
    ) -> None:
        """With `chunk_bytes` 0 other ranks may have the same tensors in host memory. `make` opens a device."""
        self._context, self._chunk_bytes, self._make = context, chunk_bytes, make
        self._devices: dict[Any, tuple[Stage, StagedMessages]] = {}

    def issue(self, calls: Sequence[Call], seconds: float, *, is_async: bool) -> RingfortWork:
        """Begin the calls; unless `is_async`, return when the network has done its part."""
        if is_async:
            works = [issue(self.stage(call.device), call, seconds) for call in calls]
            return works[0] if len(works) == 1 else Several(works)
        for call in calls:
            self.stage(call.device).run(call, seconds)
        return RingfortWork([tensor for call in calls for tensor in call.results])

    def outgoing(self, tensor: Any) -> tuple[Any, Callable[[], object], Callable[..., RingfortWork]]:
        """Begin to copy `tensor` to the host. Return the copy, a function that blocks until it is complete, and one
        that makes torch's work of the one that sends it."""
        messages = self._open(tensor.device)[1]
        array, copied = messages.outgoing(tensor)
        return array, copied.synchronize, partial(CudaWork, messages.device, lambda: copied, [tensor])

    def incoming(self, tensor: Any) -> tuple[Any, Callable[..., RingfortWork]]:
        """Return the array to receive `tensor` in, and a function that makes torch's work of the one that receives."""
        messages = self._open(tensor.device)[1]
        array, ended = messages.incoming(tensor)
        return array, partial(CudaWork, messages.device, ended, [tensor])

    def shutdown(self) -> None:
        """Release the pinned memory."""
        self._devices.clear()

    def stage(self, device: Any) -> Stage:
        """Return the stage of one GPU."""
        return self._open(device)[0]

    def _open(self, device: Any) -> tuple[Stage, StagedMessages]:
        if device not in self._devices:
            opened = self._make(device)
            stage = Stage(self._context, opened, chunk_bytes=self._chunk_bytes)
            self._devices[device] = stage, StagedMessages(opened)
        return self._devices[device]
