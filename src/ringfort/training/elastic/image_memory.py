"""`ImageMemory`: memory for images of the state, which is there before it is needed and is used again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Final

from ringfort.training.elastic.sample_order import Array
from ringfort.training.elastic.spare_memory import SpareMemory

_KEPT: Final = 60.0
"""Seconds for which memory is kept that no image needs: machines often come one after the other."""
_PAGE: Final = 4096
"""Bytes that the system clears at once, at least, when they are written for the first time."""


class ImageMemory:
    """Hands out memory for images. An image is copied while all members wait, and the system would have to find and
    clear each of its pages then: 100 MB take 10 ms to copy, and in a virtual machine whose host has to find them first
    0.2 to 0.8 s. All methods are thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._memory = SpareMemory(keeps_all=True)
        self._used_at = clock()

    def reserve(self, nbytes: int, images: int) -> None:
        """Have memory for so many images ready. Those that are ready already can be taken soon, meanwhile."""
        with suppress(MemoryError):  # the image itself will say so
            with self._lock:
                arrays = deque(self._take(nbytes) for _ in range(images))  # those that were used before come first
            while arrays:
                arrays.popleft()[::_PAGE] = 0

    def take(self, nbytes: int) -> Array:
        """Return memory for an image, with any content."""
        with self._lock:
            return self._take(nbytes)

    def trim(self) -> None:
        """Give memory back that was not needed for a while."""
        if self._clock() > self._used_at + _KEPT and self._lock.acquire(blocking=False):
            try:
                self._memory.trim()
            finally:
                self._lock.release()

    def _take(self, nbytes: int) -> Array:
        self._used_at = self._clock()
        return self._memory.take("uint8", nbytes)
