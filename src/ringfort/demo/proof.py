"""What the demo claims: all ranks have the same weights, and the losses of one process, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ringfort.demo.settings import TOLERANCE, Settings

SCHEMA = 1
"""Of `Outcome.to_dict`; raised when a field changes its meaning or goes."""


@dataclass(frozen=True)
class Training:
    """The result of one group (of one rank or more)."""

    losses: list[float]
    """The loss of each step, over the whole batch."""
    validation: list[float]
    """The validation loss before and after the training."""
    digests: list[str]
    """SHA-256 of the weights, per rank."""
    seconds: float
    sample: str


@dataclass(frozen=True)
class Outcome:
    """Both trainings, and their comparison."""

    settings: Settings
    group: Training
    reference: Training

    @property
    def weights_identical(self) -> bool:
        """Whether every rank ended with the same weights, bit for bit."""
        return len(self.group.digests) == self.settings.ranks and len(set(self.group.digests)) == 1

    @property
    def largest_difference(self) -> float:
        """The largest relative difference between the two loss curves at any step."""
        return max(relative_differences(self.group.losses, self.reference.losses))

    @property
    def curves_equal(self) -> bool:
        """Whether the loss curves agree up to rounding."""
        return self.largest_difference <= TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether both claims hold."""
        return self.weights_identical and self.curves_equal

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "weights_identical": self.weights_identical,
            "largest_relative_difference": self.largest_difference if math.isfinite(self.largest_difference) else None,
            "tolerance": TOLERANCE,
            "passed": self.passed,
        }


def relative_differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """|a - b| / |b| per pair; infinite where that is undefined, or if the curves have different lengths."""
    if len(ours) != len(theirs):
        return [math.inf]
    a, b = np.array(ours), np.array(theirs)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(a == b, 0.0, np.abs(a - b) / np.abs(b))
    return np.where(np.isnan(found), math.inf, found).tolist()  # `max` would ignore a NaN
