"""One GPU as the staging of tensors needs it: streams beside the caller's, events and pinned memory."""

from __future__ import annotations

from typing import Any, Final

from ringfort.errors import BackendUnavailableError, InvalidArgumentError
from ringfort.torch import stream_wait
from ringfort.torch.names import torch

HOW: Final = (
    "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); "
    "tensors of the CPU go through the context's own all_reduce and broadcast"
)


class CudaDevice:
    """A GPU of this process. Raises `BackendUnavailableError` where there is none."""

    def __init__(self, device: Any) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailableError("CUDA", HOW)
        self.check()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def current(self) -> Any:
        """The caller's stream."""
        return torch.cuda.current_stream(self.device.index)  # torch takes microseconds to read a device

    def check(self) -> None:
        """Raises `InvalidArgumentError` while the caller records a CUDA graph, into which no network fits."""
        if torch.cuda.is_current_stream_capturing():
            why = "a CUDA graph cannot hold what goes over the network; call it outside torch.cuda.graph"
            raise InvalidArgumentError("tensor", "of a graph that is being captured", why)

    def stream(self) -> Any:
        """A stream beside the caller's."""
        return torch.cuda.Stream(self.device)

    def gated(self) -> tuple[Any, Any, stream_wait.Gate] | None:
        """Two streams that nobody else has and a gate to hold them; None if this device's streams cannot wait so."""
        if not stream_wait.can_hold(self.device):
            return None
        return stream_wait.new_stream(self.device), stream_wait.new_stream(self.device), stream_wait.Gate(self.device)

    def give_back(self, *streams: Any) -> None:
        """Lets others have streams of `gated`."""
        stream_wait.give_back(self.device, *streams)

    def record(self, stream: Any) -> Any:
        """An event that is over when all is done that is in `stream` now. Who waits for it on the host sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def pinned(self, size: int) -> Any:
        """Memory of the host that the GPU copies by itself."""
        # The device is said because a program may have set another one as the default.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, into: Any, source: Any) -> None:
        """Copies in `stream`."""
        if stream == self.current():
            into.copy_(source, non_blocking=True)
            return
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def keep(self, tensor: Any, stream: Any) -> None:
        """The memory of `tensor`, once nobody holds it, is not given to another before what is in `stream` by then is
        done."""
        tensor.record_stream(stream)

    def future(self) -> Any:
        """One of torch's that knows about streams."""
        return torch.futures.Future(devices=[self.device])

    def complete(self, future: Any, result: Any, stream: Any) -> None:
        """Gives `future` its result: who waits for it waits for what is in `stream` now."""
        with torch.cuda.stream(stream):
            future.set_result(result)
