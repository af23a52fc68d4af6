"""`CudaEngine`: what a process group does with tensors on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from ringfort.collectives.arrays import ArrayView, as_view
from ringfort.collectives.work import Work
from ringfort.context import DistributedContext
from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch
from ringfort.torch.operations import Call
from ringfort.torch.staging import CHUNK_BYTES, Stage
from ringfort.torch.tensors import flatten, is_plain, to_array
from ringfort.torch.untraced import untraced
from ringfort.torch.work import RingfortWork, Several


class CudaDevice:
    """A GPU of this process as staging needs it: streams beside the caller's, events and pinned memory."""

    def __init__(self, device: Any) -> None:
        self.check()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def current(self) -> Any:
        """Return the caller's stream."""
        return torch.cuda.current_stream(self.device.index)  # torch takes microseconds to parse a device

    def check(self) -> None:
        """Raise `InvalidArgumentError` while the caller captures a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            why = "a CUDA graph cannot contain a collective over the network; call it outside torch.cuda.graph"
            raise InvalidArgumentError("tensor", "of a graph that is being captured", why)

    def stream(self) -> Any:
        """Return a stream beside the caller's."""
        return torch.cuda.Stream(self.device)

    def record(self, stream: Any) -> Any:
        """Return an event after all that is in `stream` now. A host thread that waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def pinned(self, size: int) -> Any:
        """Return host memory that the GPU reads and writes by itself."""
        # The device is given because a program may have set another default.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, into: Any, source: Any) -> None:
        """Copy in `stream`."""
        if stream == self.current():
            into.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def keep(self, tensor: Any, stream: Any) -> None:
        """Keep the memory of `tensor`, even after its last reference is gone, until `stream` has done what is in it by
        then."""
        tensor.record_stream(stream)

    def future(self) -> Any:
        """Return a future that knows about streams."""
        return torch.futures.Future(devices=[self.device])


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


class _Messages:
    """Point-to-point messages of tensors on one GPU. Each is one piece, so that the peer may have it in host memory.

    They have streams of their own: behind the copies of a collective, a message would wait for the kernels that the
    caller issued before that collective.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._down, self._up = device.stream(), device.stream()

    def outgoing(self, tensor: Any) -> tuple[Any, Callable[[], object], Callable[..., RingfortWork]]:
        device, source = self._device, flatten(tensor)
        device.check()
        copy = device.pinned(source.numel() * source.element_size()).view(source.dtype)
        self._down.wait_event(device.record(device.current()))
        device.keep(source, self._down)
        device.copy(self._down, copy, source)
        copied = device.record(self._down)
        return to_array(copy), copied.synchronize, partial(CudaWork, device, lambda: copied, [tensor])

    def incoming(self, tensor: Any) -> tuple[ArrayView, Callable[..., RingfortWork]]:
        device, place = self._device, flatten(tensor)
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
        as_work = partial(CudaWork, device, lambda: ended[0] if ended else None, [tensor])
        return ArrayView(view.flat, view.kind, finish=finish), as_work


class CudaEngine:
    """Serves the tensors of one group that are on GPUs."""

    def __init__(
        self, context: DistributedContext, *, chunk_bytes: int = CHUNK_BYTES, make: Callable[[Any], Any] = CudaDevice
    ) -> None:
        """With `chunk_bytes` 0 other ranks may have the same tensors in host memory. `make` opens a device."""
        self._context, self._chunk_bytes, self._make = context, chunk_bytes, make
        self._devices: dict[Any, tuple[Stage, _Messages]] = {}

    def issue(self, calls: Sequence[Call], seconds: float, *, is_async: bool) -> RingfortWork:
        """Begin the calls; unless `is_async`, return when the network has done its part. Raises what is wrong."""
        if not is_async:
            for call in calls:
                self.stage(call.device).run(call, seconds)
            return RingfortWork([tensor for call in calls for tensor in call.results])
        works: list[CudaWork] = []
        for call in calls:
            stage = self.stage(call.device)
            work, staged = stage.issue(call, seconds)
            works.append(CudaWork(stage.device, lambda staged=staged: staged.ended, call.results, work))
        return works[0] if len(works) == 1 else Several(works)

    def outgoing(self, tensor: Any) -> tuple[Any, Callable[[], object], Callable[..., RingfortWork]]:
        """Begin to copy `tensor` to the host. Return the copy, a function that blocks until it is complete, and one
        that makes torch's work of the one that sends it."""
        return self._open(tensor.device)[1].outgoing(tensor)

    def incoming(self, tensor: Any) -> tuple[ArrayView, Callable[..., RingfortWork]]:
        """Return a view to receive in, which copies itself to `tensor` when it is finished; and a function that makes
        torch's work of the one that receives."""
        return self._open(tensor.device)[1].incoming(tensor)

    def shutdown(self) -> None:
        """Release the pinned memory."""
        self._devices.clear()

    def stage(self, device: Any) -> Stage:
        """Return the stage of one GPU."""
        return self._open(device)[0]

    def _open(self, device: Any) -> tuple[Stage, _Messages]:
        if device not in self._devices:
            opened = self._make(device)
            stage = Stage(self._context, opened, chunk_bytes=self._chunk_bytes)
            self._devices[device] = stage, _Messages(opened)
        return self._devices[device]
