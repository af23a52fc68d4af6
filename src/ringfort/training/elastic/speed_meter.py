"""`SpeedMeter`: how fast the program of this member computes, and what else it does in a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_FADING: Final = 0.8
"""How much of earlier steps stays in the measurement after each step."""
_HOPE: Final = 20
"""A member that is dealt nothing cannot be measured. In so many seconds it takes itself to be faster by one second per
micro-batch, until it is dealt one: so at most a twentieth of the time is lost if it is as slow as before."""
_LONG: Final = 2
"""Times the usual period that a step without work counts at most."""
_LEAST: Final = 1e-3
"""The part of its last measured time that it hopes for at the utmost."""


class SpeedMeter:
    """Measures the time between the calls of the program: `begin` to `end` is the computing of a micro-batch, and what
    is left between `resume` and `called` is its overhead: applying, loading, printing."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.samples = 0
        """The samples of the current micro-batch."""
        self._begun_at = 0.0
        self._resumed_at: float | None = None
        self._ended_at: float | None = None
        self._aside = 0.0
        """Seconds of this step that the program has used for something else."""
        self._in_program = 0.0
        """Seconds of this step in the program outside micro-batches."""
        self._has_computed = False
        self._without_work = 0.0
        """Seconds of the steps since it was dealt something."""
        # These fade:
        self._computed = 0.0
        """Samples."""
        self._computing = 0.0
        """Seconds."""
        self._overheads = 0.0
        self._periods = 0.0
        self._steps = 0.0

    # --- what the program does ----------------------------------------------------------------------------------------

    def begin(self, samples: int) -> None:
        """The program is given a micro-batch."""
        self.samples, self._begun_at = samples, self._clock()

    def end(self) -> None:
        """It has added the gradients of the micro-batch."""
        seconds = self._clock() - self._begun_at
        if self._without_work:  # what was measured before is too old
            self._computed = self._computing = self._without_work = 0.0
        self._computed += self.samples
        self._computing += seconds
        self._in_program -= seconds
        self._has_computed = True

    def resume(self) -> None:
        """The program is given something to do."""
        self._resumed_at = self._clock()

    def called(self) -> None:
        """The program has done it."""
        if self._resumed_at is not None:
            self._in_program += self._clock() - self._resumed_at
            self._resumed_at = None

    def aside(self, seconds: float) -> None:
        """It has used so many seconds for something else, in which it is not measured."""
        self._begun_at += seconds
        self._in_program -= seconds
        self._aside += seconds

    # --- steps --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """An epoch begins: what was before it is no step."""
        self._ended_at = None

    def end_step(self, *, is_replayed: bool = False) -> None:
        """The micro-batches of a step are computed, or it was replayed. Earlier steps count less and less."""
        now = self._clock()
        if self._ended_at is not None:
            period = max(0.0, now - self._ended_at - self._aside)
            if self._has_computed:
                self._computed *= _FADING
                self._computing *= _FADING
            elif not is_replayed:  # a step that was long for once, because a member was aside, is no reason to hope
                self._without_work += min(period, _LONG * self._periods / self._steps if self._steps else period)
            self._overheads = (self._overheads + max(0.0, self._in_program)) * _FADING
            self._periods = (self._periods + period) * _FADING
            self._steps = (self._steps + 1) * _FADING
        self._ended_at, self._aside, self._in_program, self._has_computed = now, 0.0, 0.0, False

    def forget(self) -> None:
        """Forget what was computed: it was the first micro-batch, in which programs compile and allocate, or is too old
        to count."""
        self._computed = self._computing = self._in_program = self._without_work = 0.0

    @property
    def speed(self) -> int:
        """Samples per second while it computes; 0 if that is unknown."""
        if self._computing <= 0:
            return 0
        measured = self._computing / self._computed
        hoped = measured - self._without_work / _HOPE / max(self.samples, 1)
        return max(1, int(1 / max(hoped, _LEAST * measured)))

    @property
    def overhead(self) -> int:
        """Microseconds of a step that its program takes outside micro-batches."""
        return int(1e6 * self._overheads / self._steps) if self._steps else 0

    @property
    def period(self) -> int:
        """Microseconds from step to step."""
        return int(1e6 * self._periods / self._steps) if self._steps else 0
