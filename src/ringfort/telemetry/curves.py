"""`Points`: a value over any time, in bounded memory. Pure."""

from __future__ import annotations

from math import isfinite
from typing import Final

from ringfort.telemetry.view import Curve

MAX_POINTS: Final = 600
"""Of one curve: more than a screen has columns for."""


class Points:
    """Keeps at most `MAX_POINTS` points of a curve: when there are too many, every second one is dropped, and from then
    on half as many are taken. The newest point is always kept."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._steps: list[int] = []
        self._values: list[float] = []
        self._every = 1
        self._skipped = 0
        self._newest: tuple[float, int, float] | None = None

    def __len__(self) -> int:
        return len(self._at)

    @property
    def newest(self) -> float | None:
        """The newest value."""
        return None if self._newest is None else self._newest[2]

    def add(self, at: float, step: int, value: float) -> None:
        """Add a point, which is newer than those before. Older ones are ignored: a report may come twice. Times never
        go back, even if a clock does: an axis cannot."""
        if self._newest is not None:
            if step < self._newest[1] and at < self._newest[0]:
                return
            at = max(at, self._newest[0])
        self._newest = at, step, value
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._at.append(at)
        self._steps.append(step)
        self._values.append(value)
        if len(self._at) > MAX_POINTS:
            for kept in (self._at, self._steps, self._values):
                del kept[1::2]
            self._every *= 2

    def curve(self, name: str) -> Curve:
        """Return all points."""
        at, steps, values = list(self._at), list(self._steps), list(self._values)
        if self._newest is not None and (not at or at[-1] != self._newest[0]):
            at.append(self._newest[0])
            steps.append(self._newest[1])
            values.append(self._newest[2])
        return Curve(name, at, steps, [value if isfinite(value) else None for value in values])
