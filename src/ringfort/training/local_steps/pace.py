"""How many local steps each member makes in a round, and how its difference counts. Pure.

Members of unequal speed arrive together if each makes as many steps as it can in the time of the round (uneven steps,
arXiv:2401.09135).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Final, Literal, get_args

from ringfort.errors import InvalidArgumentError

Weighting = Literal["samples", "uniform", "normalized"]
_MOVES: Final = 0.1
"""How far the moving average follows a new measurement, once there are ten."""
_LONGEST: Final = 4.0
"""How many times the average a measurement counts at most: a step in which a checkpoint is written, or the computer
sleeps, must not leave its rank with one step per round for dozens of rounds."""


class Pace:
    """The time that a local step takes here: a moving average. The first step of a program compiles, and is left
    out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """0 until a step was measured."""
        self._count = -1

    def took(self, seconds: float) -> None:
        """A local step has taken so many seconds."""
        self._count += 1
        if self._count > 0 and isfinite(seconds) and seconds >= 0:
            seconds = min(seconds, _LONGEST * self.seconds) if self.seconds else seconds
            self.seconds += max(_MOVES, 1 / self._count) * (seconds - self.seconds)


def steps_of(every: int, seconds: Sequence[float]) -> list[int]:
    """Return the local steps of each member in a round: `every` of the fastest, and as many of each other one as it
    makes in that time. `seconds` is what a step takes at each; 0 if unknown, which counts as the fastest."""
    known = [one for one in seconds if one > 0]
    if not known:
        return [every] * len(seconds)
    time = every * min(known)
    # A member that is just as fast must not lose a step to rounding.
    return [max(1, min(every, int(time / one * (1 + 1e-9)))) if one > 0 else every for one in seconds]


def check_weighting(weighting: object) -> Weighting:
    """Return a weighting. Raise `InvalidArgumentError` if it is unknown."""
    if weighting not in get_args(Weighting):
        raise InvalidArgumentError("weighting", weighting, f"must be one of: {', '.join(get_args(Weighting))}")
    return weighting  # pyright: ignore[reportReturnType]


def shares(weighting: Weighting, steps: Sequence[int], samples: Sequence[float]) -> list[float]:
    """Return what the difference of each member is multiplied by before they are added.

    The difference of a member grows with the number of its steps. By `samples`, members count as much as they have
    learned from, so speed counts twice; `normalized` divides by the number of steps first, and multiplies by their
    mean; `uniform` counts all alike. A member that has made no step counts nothing.
    """
    busy = [count > 0 for count in steps]
    if weighting == "uniform" or not sum(samples):
        return [is_busy / max(1, sum(busy)) for is_busy in busy]
    total = sum(samples)
    parts = [one / total for one in samples]
    if weighting == "samples":
        return parts
    mean = sum(part * count for part, count in zip(parts, steps, strict=True))
    return [part * mean / count if count else 0.0 for part, count in zip(parts, steps, strict=True)]
