"""The settings of a demo: the same at every peer, and in the single process that repeats the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ringfort import config
from ringfort.errors import InvalidArgumentError

Framework = Literal["numpy", "torch"]

BATCH: Final[dict[Framework, int]] = {"numpy": 256, "torch": 32}
"""Samples per step, over all peers together. The transformer learns from every character of a sample, the NumPy model
only from the last one."""
MICROBATCH: Final[dict[Framework, int]] = {"numpy": 32, "torch": 5}
"""Samples that are dealt together. A step has eight or seven micro-batches, so three peers have uneven shares."""
STEPS: Final[dict[Framework, int]] = {"numpy": 600, "torch": 180}
"""Together with the single process that repeats it, under a minute on two cores that others use too."""
RANKS = 3
PASSES = 3
"""Passes over the data set in a run."""
MAX_SAMPLES = 100_000
"""The longest data set; a run of more steps makes more passes."""
FEWEST_STEPS = 40
"""With fewer steps nobody is killed: the run would be over before the peer is back."""
FEWEST_RANKS = 3
"""With fewer peers nobody is killed: the rest must be a majority."""
ABSENCE = 30.0
"""Seconds that a whole run takes at least while a peer is missing, so that the peer is back before the end."""

TOLERANCE = 1e-4
"""Allowed relative difference between the two loss curves.

Both are float32 and differ in the order of additions, which depends on who computed which micro-batch: measured, that
changes a loss by up to 5e-7 in 1,200 steps of the NumPy model and by 3e-7 in 180 steps of the transformer. The smallest
mistake worth catching, a mean that ignores that shares are uneven, changes it by 2e-4 within the first ten steps even
if the shares are 85, 85 and 86 samples. The tolerance lies between the two, far from the first."""


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
        """Samples per step, over all peers together."""
        return BATCH[self.framework]

    @property
    def microbatch(self) -> int:
        """Samples that are dealt together."""
        return MICROBATCH[self.framework]

    @property
    def samples(self) -> int:
        """The length of the data set. The last step of a pass is short."""
        return min(MAX_SAMPLES, max(1, self.steps // PASSES) * self.batch - self.batch // 3)

    @property
    def steps_per_pass(self) -> int:
        """The number of steps that cover the data set."""
        return -(-self.samples // self.batch)

    @property
    def passes(self) -> int:
        """Passes that the run completes."""
        return self.steps // self.steps_per_pass

    @property
    def kill_at(self) -> int | None:
        """The step after which a peer is killed; None if nobody is."""
        return self.steps // 3 if self.ranks >= FEWEST_RANKS and self.steps >= FEWEST_STEPS else None

    @property
    def nodes(self) -> str:
        """How many members the run needs, as `MIN:MAX`. Where nobody is killed it needs all."""
        fewest = self.ranks if self.kill_at is None else self.ranks - 1
        return f"{fewest}:{self.ranks}"
