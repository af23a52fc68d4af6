"""`Gate`: where a stream of a GPU waits for the network, so that the host does not have to.

A gate is a word in pinned memory that counts. A stream waits until it has counted far enough: the GPU's front end looks
at the word, no kernel spins and no thread sleeps. CUDA knows nothing of what a gate waits for, so two laws hold:

**Who opens a gate makes no call of the driver on the way, except to wait for an event.** A call that waits for the
device (a copy to or from memory that is not pinned, as in `.tolist()`; `cudaFree`; a launch into a full queue) holds a
lock which every other thread needs that puts something into a stream, or frees an event. If such a call waits behind a
gate, whoever would first have to copy something to open it waits for ever. (What the garbage collector frees of the
program's own in that thread is beyond us.)

**What opens a gate is in the streams before it.** The GPU has few queues (8 for kernels and copies up, fewer for copies
down, whatever the streams' priorities): once as many streams wait at gates, nothing that comes later gets through.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from functools import cache
from typing import Any, Final

import numpy as np

from ringfort.errors import TransportError
from ringfort.torch.names import torch

_AT_LEAST: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until the word is at least the value, counted round 2**32."""
_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: it does not wait for the default stream, nor the default stream for it."""
_gates: Final[list[Gate]] = []
"""All that were ever made: the GPU may look at one for as long as the process lives."""
_spare: Final[dict[Any, list[Any]]] = {}


class Gate:
    """Counts how often it was opened, and holds a stream until that is often enough."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._memory = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        self._word = self._memory.numpy().view(np.uint32)
        self._held = self._opened = 0
        self._lock = threading.Lock()
        _gates.append(self)

    def hold(self, stream: Any) -> None:
        """What comes into `stream` after this waits until the gate was opened once more than it has held before."""
        with torch.cuda.device(self._device):
            failed = _wait(stream, self._memory.data_ptr(), (self._held + 1) & 0xFFFFFFFF)
        if failed:
            raise TransportError(f"the CUDA driver refused to wait (error {failed}); set RINGFORT_CUDA_WAIT=host")
        self._held += 1

    def open(self) -> None:
        """Lets one through, the first that waits or will."""
        with self._lock:  # which also orders memory: what was written before is seen before
            self._opened += 1
            self._word[0] = self._opened & 0xFFFFFFFF

    def open_all(self) -> None:
        """Lets all through that it holds."""
        while self._opened < self._held:
            self.open()


@atexit.register
def _open_all() -> None:
    """The driver waits for its streams when the process ends."""
    for gate in _gates:
        gate.open_all()


def new_stream(device: Any) -> Any:
    """A stream that nobody else has: torch's own are lent to several at a time, who would all wait at our gate."""
    spare = _spare.get(device)
    if spare:
        return spare.pop()
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # so that the driver has a context for this thread
        failed = _driver().cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
    if failed:
        raise TransportError(f"the CUDA driver refused a stream (error {failed})")
    return torch.cuda.ExternalStream(made.value, device=device)


def give_back(device: Any, *streams: Any) -> None:
    """For the next who asks: torch may look at a stream for as long as there is memory that was used in it."""
    _spare.setdefault(device, []).extend(streams)


@cache
def can_hold(device: Any) -> bool:
    """Whether streams of `device` can wait at gates: tried with an open one. (Windows' drivers refuse.)"""
    if _driver() is None:
        return False
    # Torch makes its streams when the first is asked for, a call that waits for the device and keeps the interpreter's
    # lock: behind a shut gate, for ever.
    least, most = torch.cuda.Stream.priority_range()
    for priority in range(most, least + 1):
        torch.cuda.Stream(device, priority=priority)
    gate = Gate(device)
    gate.open()
    stream = new_stream(device)
    try:
        gate.hold(stream)
    except TransportError:
        return False
    stream.synchronize()
    give_back(device, stream)
    return True


def _wait(stream: Any, place: int, value: int) -> int:
    return _driver().cuStreamWaitValue32_v2(ctypes.c_void_p(stream.cuda_stream), place, value, _AT_LEAST)


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
