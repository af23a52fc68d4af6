"""What the demo claims at its end, as data: the ranks agree to the bit, and with one process up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringfort.demo.settings import TOLERANCE, Settings

SCHEMA = 1
"""Of `Outcome.to_dict`; raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class Training:
    """What one group (of one rank or more) reported."""

    losses: list[float]
    """Of each step, over the whole batch."""
    validation: list[float]
    """Before and after."""
    digests: list[str]
    """SHA-256 of the weights of each rank."""
    seconds: float
    sample: str


@dataclass(frozen=True)
class Outcome:
    """Both trainings, and what comparing them shows."""

    settings: Settings
    group: Training
    reference: Training

    @property
    def weights_identical(self) -> bool:
        """Every rank ended with the same weights, bit for bit."""
        return len(self.group.digests) == self.settings.ranks and len(set(self.group.digests)) == 1

    @property
    def largest_difference(self) -> float:
        """The largest relative difference between the two loss curves at any step."""
        return max(relative_differences(self.group.losses, self.reference.losses))

    @property
    def curves_equal(self) -> bool:
        """The loss curves agree up to rounding."""
        return self.largest_difference <= TOLERANCE

    @property
    def passed(self) -> bool:
        """Both claims hold."""
        return self.weights_identical and self.curves_equal

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "settings": asdict(self.settings),
            "group": asdict(self.group),
            "reference": asdict(self.reference),
            "weights_identical": self.weights_identical,
            "largest_relative_difference": self.largest_difference if math.isfinite(self.largest_difference) else None,
            "tolerance": TOLERANCE,
            "passed": self.passed,
        }


def relative_differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """|a - b| / |b| for each pair; infinite where that is no number, or where one curve is shorter than the other."""
    if len(ours) != len(theirs):
        return [math.inf]
    return [_relative_difference(a, b) for a, b in zip(ours, theirs, strict=True)]


def _relative_difference(a: float, b: float) -> float:
    if a == b:
        return 0.0
    difference = abs(a - b) / abs(b) if b else math.inf
    return math.inf if math.isnan(difference) else difference  # a NaN would hide from `max`
