"""One GPU as the staging of tensors needs it: side streams, events, pinned memory, and a gate in a stream.

A gate is how the host does not have to wait: the stream itself waits until another thread says that the network has
done its part. The CUDA driver calls `sem_wait` of the C library in a thread of its own; no Python runs there, so no
lock of the interpreter can be in the way. Everything behind the gate is in the stream already, ordered by plain events.
"""

from __future__ import annotations

import atexit
import ctypes
from functools import cache
from typing import Any, Final

from ringfort.errors import BackendUnavailableError, InvalidArgumentError, TransportError
from ringfort.torch.names import torch

HOW: Final = (
    "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); "
    "tensors of the CPU go through the context's own all_reduce and broadcast"
)
_SEMAPHORE_BYTES: Final = 64
"""Room for a `sem_t`, which is 32 bytes or fewer wherever there is CUDA."""
_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for the default stream, nor the default stream for it."""
_spare: Final[dict[Any, list[Any]]] = {}
_gates: Final[list[Gate]] = []
"""All that were ever made: the driver may look at one for as long as the process lives."""


class CudaDevice:
    """A GPU of this process. Raises `BackendUnavailableError` where there is none."""

    def __init__(self, device: Any) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailableError("CUDA", HOW)
        self.check()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.can_hold = _driver() is not None
        """Whether a stream of this device can wait for a gate."""

    def current(self) -> Any:
        """The caller's stream."""
        return torch.cuda.current_stream(self.device)

    def check(self) -> None:
        """Raises `InvalidArgumentError` while the caller records a CUDA graph, into which no network fits."""
        if torch.cuda.is_current_stream_capturing():
            why = "a CUDA graph cannot hold what goes over the network; call it outside torch.cuda.graph"
            raise InvalidArgumentError("tensor", "of a graph that is being captured", why)

    def stream(self) -> Any:
        """A stream beside the caller's, which nobody else has: torch's own are lent to several at a time, and behind a
        gate the others would wait."""
        spare = _spare.get(self.device)
        if spare:
            return spare.pop()
        if not self.can_hold:
            return torch.cuda.Stream(self.device)
        made = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # so that the driver has a context for this thread
            failed = _driver().cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
        if failed:
            raise TransportError(f"the CUDA driver refused a stream (error {failed})")
        return torch.cuda.ExternalStream(made.value, device=self.device)

    def give_back(self, *streams: Any) -> None:
        """For the next who asks: torch may look at a stream for as long as there is memory that was used in it."""
        _spare.setdefault(self.device, []).extend(streams)

    def record(self, stream: Any) -> Any:
        """An event that is over when all is done that is in `stream` now. Who waits for it on the host sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def pinned(self, size: int) -> Any:
        """Memory of the host that the GPU copies by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, stream: Any, into: Any, source: Any) -> None:
        """Copies in `stream`."""
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)

    def keep(self, tensor: Any, stream: Any) -> None:
        """The memory of `tensor` is not given to another before what is in `stream` now is done."""
        tensor.record_stream(stream)

    def hold(self, stream: Any, gate: Gate) -> None:
        """What comes into `stream` after this waits until `gate` is opened, once for each time that it holds."""
        driver = _driver()
        with torch.cuda.device(self.device):
            failed = driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), gate.wait, gate.place)
        if failed:
            raise TransportError(f"the CUDA driver refused to call back (error {failed}); set RINGFORT_CUDA_WAIT=host")
        gate.shut()

    def gate(self) -> Gate:
        """A new one, shut."""
        return Gate()

    def future(self) -> Any:
        """One of torch's that knows about streams."""
        return torch.futures.Future(devices=[self.device])


class Gate:
    """A semaphore of the C library. Whatever holds a stream when the process ends is let through, for the driver waits
    for its streams."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._memory = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self.place = ctypes.c_void_p(ctypes.addressof(self._memory))
        self.wait = ctypes.cast(library.sem_wait, ctypes.c_void_p)
        self._post = library.sem_post
        library.sem_init(self.place, 0, 0)
        self._shut = self._opened = 0
        _gates.append(self)

    def shut(self) -> None:
        """One more waits."""
        self._shut += 1

    def open(self) -> None:
        """Lets one through, the first that waits or will."""
        self._post(self.place)
        self._opened += 1

    def open_all(self) -> None:
        """Lets all through."""
        for _ in range(self._shut - self._opened):
            self.open()


@atexit.register
def _open_all() -> None:
    for gate in _gates:
        gate.open_all()


@cache
def _driver() -> Any:
    """The CUDA driver, if it has what gates need."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuStreamCreate.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return driver
