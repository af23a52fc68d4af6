"""The settings of a demo: the same on every rank, and in the single process that repeats the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ringfort import config
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
class Settings(config.Settings):
    """Raises `InvalidArgumentError` for invalid values."""

    ranks: int = RANKS
    steps: int = config.setting(STEPS["numpy"], config.whole(1))
    seed: int = config.setting(0, config.whole(0))
    framework: Framework = config.setting("numpy", config.one_of(*BATCH))  # noqa: RUF009  # it makes a field

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.ranks <= self.batch:
            raise InvalidArgumentError(
                "ranks", self.ranks, f"must be 1 to {self.batch}, so that every rank has a sample"
            )

    @property
    def batch(self) -> int:
        """Samples per step, over all ranks together."""
        return BATCH[self.framework]
