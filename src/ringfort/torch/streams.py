"""One GPU as the staging of tensors needs it: side streams, events, pinned memory, and a gate in a stream.

A gate is how the host does not have to wait: the stream itself waits until a word in pinned memory has counted so far,
and the thread that serves the network counts. The GPU's front end looks at the word; no kernel spins and no thread of
the driver sleeps. (A callback in the stream could wait too, but the driver calls back one at a time: of two groups,
each rank might wait for another one.)

CUDA cannot see what a gate waits for, and may put two streams into one queue. So whatever opens a gate must need only
what was put into the streams before it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from functools import cache
from typing import Any, Final

import numpy as np

from ringfort.errors import BackendUnavailableError, InvalidArgumentError, TransportError
from ringfort.torch.names import torch

HOW: Final = (
    "it needs an NVIDIA GPU and a torch built for CUDA (pip install torch, on Linux); "
    "tensors of the CPU go through the context's own all_reduce and broadcast"
)
_AT_LEAST: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until the word is at least the value, counted round 2**32."""
_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for the default stream, nor the default stream for it."""
_spare: Final[dict[Any, list[Any]]] = {}
_gates: Final[list[Gate]] = []
"""All that were ever made: the GPU may look at one for as long as the process lives."""


class CudaDevice:
    """A GPU of this process. Raises `BackendUnavailableError` where there is none."""

    def __init__(self, device: Any) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailableError("CUDA", HOW)
        self.check()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.can_hold = _can_hold(self.device)
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
        driver = _driver()
        if driver is None:
            return torch.cuda.Stream(self.device)
        made = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # so that the driver has a context for this thread
            failed = driver.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
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

    def gate(self) -> Gate:
        """A new one."""
        return Gate()

    def hold(self, stream: Any, gate: Gate) -> None:
        """What comes into `stream` after this waits until `gate` was opened once more than it has held before."""
        with torch.cuda.device(self.device):
            failed = _wait_value(stream, gate.place, gate.next_ticket())
        if failed:
            gate.take_back()
            raise TransportError(f"the CUDA driver refused to wait (error {failed}); set RINGFORT_CUDA_WAIT=host")

    def future(self) -> Any:
        """One of torch's that knows about streams."""
        return torch.futures.Future(devices=[self.device])


class Gate:
    """A word in pinned memory that counts how often it was opened. What it holds when the process ends is let through,
    for the driver waits for its streams."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._word = self._memory.numpy().view(np.uint32)
        self.place: int = self._memory.data_ptr()
        self._held = self._opened = 0
        self._lock = threading.Lock()
        _gates.append(self)

    def next_ticket(self) -> int:
        """What the word must have counted to let the next one through."""
        with self._lock:
            self._held += 1
            return self._held & 0xFFFFFFFF

    def take_back(self) -> None:
        """Nobody waits with the last ticket."""
        with self._lock:
            self._held -= 1

    def open(self) -> None:
        """Lets one through, the first that waits or will."""
        with self._lock:  # which also orders memory: what was written before is seen before
            self._opened += 1
            self._word[0] = self._opened & 0xFFFFFFFF

    def open_all(self) -> None:
        """Lets all through."""
        while self._opened < self._held:
            self.open()


@atexit.register
def _open_all() -> None:
    for gate in _gates:
        gate.open_all()


def _wait_value(stream: Any, place: int, value: int) -> int:
    return _driver().cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), place, value, _AT_LEAST)


@cache
def _can_hold(device: Any) -> bool:
    """Tries it with a gate that is open. (Windows' drivers refuse, also under Linux there.)"""
    if _driver() is None:
        return False
    gate = Gate()
    ticket = gate.next_ticket()
    gate.open()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.query()
        failed = _wait_value(stream, gate.place, ticket)
        stream.synchronize()
    return not failed


@cache
def _driver() -> Any:
    """The CUDA driver, if it has what gates need."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuStreamCreate.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        driver.cuStreamWaitValue32_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    except (OSError, AttributeError):
        return None
    return driver
