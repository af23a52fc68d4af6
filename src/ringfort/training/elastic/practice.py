"""`Practice`: the micro-batches that a learner computes before it is seated, for nobody but itself. Pure.

In its first micro-batch a program compiles and allocates, and the members would wait for that. So a learner does it
before it is ready, while the state comes if it is new (state_copy.py), and the second one tells its speed to the first
deal. A learner that was set aside as slow (slow_members.py) goes on practising, and is fit when it needs no longer for
one micro-batch than the members for a step.
"""

from __future__ import annotations

from math import inf
from typing import Final

EVERY: Final = 5.0
"""Seconds between two tries of one that was slow: its machine has other things to do."""
STEPS: Final = 3
"""Steps of the members between two tries: fewer do not tell how long a step takes."""
STANDSTILL: Final = 60.0
"""Seconds after which it tries again in any case: if the members seal nothing, they do not wait for it either."""
IN_A_ROW: Final = 2
"""Tries that must be fast enough."""


class Practice:
    """Says when a learner computes a micro-batch, and whether it is fit to be seated."""

    def __init__(self, *, was_slow: bool, is_measured: bool) -> None:
        """`is_measured`: its speed is known, because it was a member before."""
        self._was_slow = was_slow
        self._left = 0 if is_measured else 2
        """Micro-batches for warming up and measuring that are left."""
        self._last: tuple[float, int] = (-inf, 0)
        """The time of the last try, and the step at which the members were."""
        self._fast = 0

    @property
    def is_fit(self) -> bool:
        """Whether it may be seated."""
        return not self._left and (not self._was_slow or self._fast >= IN_A_ROW)

    def is_due(self, now: float, step: int) -> bool:
        """Return whether it computes a micro-batch now, when the members are at `step`."""
        at, before = self._last
        has_moved = now >= at + EVERY and step >= before + STEPS
        return not self.is_fit and (bool(self._left) or has_moved or now >= at + STANDSTILL)

    def done(self, now: float, step: int, seconds: float) -> None:
        """It has computed a micro-batch, and needs so many seconds for a step with one."""
        if self._left:
            self._left -= 1
            return
        (at, before), self._last = self._last, (now, step)
        if at > -inf:
            interval = (now - at) / (step - before) if step > before else inf
            self._fast = self._fast + 1 if seconds <= interval else 0
