"""`SpeedMeter`: how many samples per second this member computes. Pure but for the clock that it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_FADING: Final = 0.8
"""How much of earlier micro-batches stays in the measured speed after each step."""


class SpeedMeter:
    """Measures from the moment that the program is given a micro-batch until it adds the gradients."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_at = 0.0
        self.samples = 0
        """The samples of the current micro-batch."""
        self._computed: tuple[float, float] = (0.0, 0.0)
        """Samples and the seconds that they took."""

    def begin(self, samples: int) -> None:
        """The program is given a micro-batch."""
        self.samples, self._started_at = samples, self._clock()

    def end(self) -> None:
        """It has added the gradients of the micro-batch."""
        samples, seconds = self._computed
        self._computed = (samples + self.samples, seconds + self._clock() - self._started_at)

    def aside(self, seconds: float) -> None:
        """It has used so many seconds for something else."""
        self._started_at += seconds

    def speed(self) -> int:
        """Return the speed at the end of a step; 0 if it is unknown. Earlier steps count less and less."""
        samples, seconds = self._computed
        self._computed = (samples * _FADING, seconds * _FADING)
        return max(1, int(samples / seconds)) if seconds > 0 else 0
