"""What the demo claims: no step was lost or applied twice, each sample counted once per pass, all peers have the same
bits, and the losses are those of one process, up to rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringfort.demo.settings import TOLERANCE, Settings
from ringfort.demo.story import Fault, Story

SCHEMA = 2
"""Of `Outcome.to_dict`; raised when a field changes its meaning or goes."""


class Claim(NamedTuple):
    """One thing that the demo proves."""

    holds: bool
    claim: str
    evidence: str


@dataclass(frozen=True)
class Training:
    """The result of one run (of one process or more)."""

    losses: list[float]
    """The loss of each step, over the whole batch."""
    validation: list[float]
    """The validation loss before and after the training."""
    digests: list[str]
    """SHA-256 of the whole state, per peer: weights, optimizer, losses and counters."""
    seconds: float
    sample: str
    applied: list[list[int]] = field(default_factory=list[list[int]])
    """How often the least and the most frequent step were applied, per peer."""
    whole_passes: list[int] = field(default_factory=list[int])
    """After how many passes each sample had counted exactly once per pass, per peer."""
    faults: list[Fault] = field(default_factory=list[Fault])

    @classmethod
    def of(cls, story: Story) -> Training:
        """Return the result of a run that has ended."""
        results = [story.results[number] for number in sorted(story.results)]
        first = results[0]
        return cls(
            losses=first["losses"],
            validation=first["validation"],
            digests=[result["digest"] for result in results],
            seconds=story.seconds,
            sample=first["sample"],
            applied=[result["applied"] for result in results],
            whole_passes=[result["whole_passes"] for result in results],
            faults=story.faults,
        )


@dataclass(frozen=True)
class Outcome:
    """Both trainings, and their comparison."""

    settings: Settings
    group: Training
    reference: Training

    @property
    def has_returned(self) -> bool:
        """Whether everybody who was killed came back, and somebody was if that was planned."""
        is_planned = self.settings.kill_at is not None
        return bool(self.group.faults) >= is_planned and all(fault.back_at for fault in self.group.faults)

    @property
    def steps_exact(self) -> bool:
        """Whether every step was applied exactly once to the state of every peer."""
        return self.group.applied == [[1, 1]] * self.settings.ranks

    @property
    def samples_exact(self) -> bool:
        """Whether every sample counted exactly once in every pass, at every peer."""
        return self.group.whole_passes == [self.settings.passes] * self.settings.ranks

    @property
    def weights_identical(self) -> bool:
        """Whether every peer ended with the same state, bit for bit."""
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
        """Whether all claims hold."""
        return all(claim.holds for claim in self.claims())

    def claims(self) -> list[Claim]:
        """What was to be shown, with the evidence."""
        settings, group = self.settings, self.group
        claims = list[Claim]()
        if settings.kill_at is not None or group.faults:
            told = "; ".join(
                f"peer {one.peer}: out at step {one.step}, in at step {one.back_at}" for one in group.faults
            )
            claims.append(Claim(self.has_returned, "a peer was killed and came back", told or "nobody was killed"))
        applied = f"{settings.steps:,} steps, each applied exactly once to the state of each peer"
        if not self.steps_exact:
            applied = f"applied (least, most), per peer: {group.applied}"
        claims.append(Claim(self.steps_exact, "no step lost, none applied twice", applied))
        counted = f"{settings.samples:,} samples, {settings.passes} passes: each counted once per pass"
        if not self.samples_exact:
            counted = f"complete passes per peer: {group.whole_passes} of {settings.passes}"
        claims.append(Claim(self.samples_exact, "no sample lost, none counted twice", counted))
        shown = f"{group.digests[0][:16]}..." if self.weights_identical else ", ".join(group.digests)
        what = "weights, optimizer and counters bit-identical at all peers"
        claims.append(Claim(self.weights_identical, what, f"SHA-256 {shown}"))
        difference = f"largest relative difference {self.largest_difference:.1e}, allowed {TOLERANCE:.0e}"
        curves = "loss as in one process without a fault"
        claims.append(Claim(self.curves_equal, curves, f"{difference}: rounding"))
        return claims

    def to_dict(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "has_returned": self.has_returned,
            "steps_exact": self.steps_exact,
            "samples_exact": self.samples_exact,
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
