"""How long a program waits for futures of collectives, which torch does in C++ (DistributedDataParallel, for example).

Nobody tells Python when that wait begins and ends, so this is an approximation. DDP issues the reduction of a bucket as
soon as its gradients are there, and waits for all buckets when the backward pass has ended. The last bucket has the
gradients that are computed last. So the wait begins about when the last collective of the step is issued, and ends with
the last that is done; what was reduced before, while gradients were computed, cost nothing. Of several backward passes
in one step that each reduce, only the last one's wait is known. If a collective is still under way when the step ends,
nobody has waited for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Final

from ringfort.telemetry.step_time import Exchanged, is_service_thread


class FutureWaits:
    """The futures of the collectives of one step. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step = 0
        self._pending = 0
        self._issued_at: float | None = None
        self._ended_at = 0.0

    def issued(self) -> Callable[[], None]:
        """A collective was issued, of which the program has a future. Return what to call when it is done."""
        with self._lock:
            step = self._step
            self._pending += 1
            if not is_service_thread():  # a callback of another future, for which the program waits already
                self._issued_at = self._clock()
        return lambda: self._ended(step)

    def ready(self) -> None:
        """The arrays of a collective are complete now: until then the program has waited for its own GPU."""
        with self._lock:
            if self._issued_at is not None:
                self._issued_at = self._clock()

    def _ended(self, step: int) -> None:
        with self._lock:
            if step == self._step:
                self._pending -= 1
                self._ended_at = self._clock()

    def exchanged(self) -> Exchanged:
        """Return how long the program has waited in the step that ends now."""
        with self._lock:
            issued_at, self._issued_at = self._issued_at, None
            pending, self._pending = self._pending, 0
            self._step += 1
            if issued_at is None or pending:
                return Exchanged()
            return Exchanged(max(0.0, self._ended_at - issued_at))


future_waits: Final = FutureWaits()
