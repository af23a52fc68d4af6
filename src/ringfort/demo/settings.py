"""What one run of the demo is given: the same on every rank, and on the single process it is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ringfort.errors import InvalidArgumentError

BATCH = 256
"""Samples a step, over all ranks together. Not divisible by three, so the default run also shows uneven shares."""
STEPS = 1200
"""About ten seconds on two cores: long enough that the text has words."""
RANKS = 3

TOLERANCE = 1e-4
"""Allowed relative difference between the two loss curves.

Both are float32 and differ in the order of additions: measured, that moves a loss by up to 1e-6 in 1,500 steps. The
smallest mistake worth catching, an average that forgets that shares are uneven (85, 85, 86 samples), moves it by 2e-4
within the first ten steps and by 7e-3 in a run. The tolerance lies between, far from the first."""


@dataclass(frozen=True)
class Settings:
    """Raises `InvalidArgumentError` for values that cannot work."""

    ranks: int = RANKS
    steps: int = STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= BATCH:
            raise InvalidArgumentError("ranks", self.ranks, f"must be 1 to {BATCH}, so that every rank has a sample")
        if self.steps < 1:
            raise InvalidArgumentError("steps", self.steps, "must be at least 1")
        if self.seed < 0:
            raise InvalidArgumentError("seed", self.seed, "must be at least 0")

    def to_json(self) -> str:
        """For the command line of a rank."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)
