"""One GPU as staging needs it: streams beside the caller's, events and pinned memory."""

from __future__ import annotations

from typing import Any

from ringfort.errors import InvalidArgumentError
from ringfort.torch.names import torch


class CudaDevice:
    """A GPU of this process."""

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
