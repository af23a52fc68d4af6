"""The settings of a demo: the same on every rank, and in the single process that repeats the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ringfort.errors import InvalidArgumentError

Framework = Literal["numpy", "torch"]

BATCH: Final[dict[Framework, int]] = {"numpy": 256, "torch": 32}
"""Samples per step, over all ranks together. Not divisible by three, so that the default run has uneven shares. The
transformer learns from every character of a sample, the NumPy model only from the last one."""
STEPS: Final[dict[Framework, int]] = {"numpy": 1200, "torch": 400}
"""About ten seconds on two cores: long enough that the text contains words."""
RANKS = 3

TOLERANCE = 1e-4
"""Allowed relative difference between the two loss curves.

Both are float32 and differ in the order of additions: measured, that changes a loss by up to 1e-6 in 1,500 steps of the
NumPy model and in 400 steps of the transformer. The smallest mistake worth catching, an average that ignores that
shares are uneven (85, 85, 86 samples), changes it by 2e-4 within the first ten steps and by 7e-3 in a run. The
tolerance lies between the two, far from the first."""


@dataclass(frozen=True)
class Settings:
    """Raises `InvalidArgumentError` for invalid values."""

    ranks: int = RANKS
    steps: int = STEPS["numpy"]
    seed: int = 0
    framework: Framework = "numpy"

    def __post_init__(self) -> None:
        if self.framework not in BATCH:
            raise InvalidArgumentError("framework", self.framework, f"choose one of: {', '.join(BATCH)}")
        if not 1 <= self.ranks <= self.batch:
            raise InvalidArgumentError(
                "ranks", self.ranks, f"must be 1 to {self.batch}, so that every rank has a sample"
            )
        if self.steps < 1:
            raise InvalidArgumentError("steps", self.steps, "must be at least 1")
        if self.seed < 0:
            raise InvalidArgumentError("seed", self.seed, "must be at least 0")

    @property
    def batch(self) -> int:
        """Samples per step, over all ranks together."""
        return BATCH[self.framework]
