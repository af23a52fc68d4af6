"""`OuterOptimizer`: moves the global weights by the mean difference of a round. Pure.

    v <- momentum * v + difference
    w <- w - rate * (difference + momentum * v)

That is Nesterov's momentum (DiLoCo, arXiv:2311.08105); the difference is what the weights were at the beginning of the
round less what the local steps have made of them. With rate 1 and no momentum, the default, the new weights are the
plain mean. Momentum multiplies a lasting difference by rate / (1 - momentum), 6 with the constants of DiLoCo: with
learning rates that are right for one machine that overshoots for hundreds of rounds (docs/slow-links.md has figures).

Each operation rounds once and is NumPy's own (no sums, no fused ones): so every machine gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real
from typing import Any, Final, cast

import numpy as np

from ringfort.errors import InvalidArgumentError
from ringfort.transport.reducer import Array

_PIECE: Final = 1 << 16
"""Elements that are moved at a time: the scratch memory for them stays in the L2 cache."""


@dataclass(frozen=True)
class OuterSettings:
    """Rate and momentum of the outer step. Raises `InvalidArgumentError` for numbers that no run can use."""

    rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name, value, most in (("outer_rate", self.rate, 2.0), ("outer_momentum", self.momentum, 1.0)):
            number: Any = value
            is_number = not isinstance(number, bool) and isinstance(number, Real) and isfinite(float(number))
            if not is_number or not 0 <= value < most or (name == "outer_rate" and not value):
                least = "above 0" if name == "outer_rate" else "at least 0"
                raise InvalidArgumentError(name, value, f"must be a number {least} and below {most:g}")

    def of_round(self, every: int, codec: str) -> OuterSettings:
        """Return the settings for a round of so many steps. Single steps have their momentum in the optimizer, and
        `sparse` keeps what it has not sent, which is a momentum too: with both, weights overshoot."""
        return OuterSettings() if every == 1 or codec == "sparse" else self

    def __str__(self) -> str:
        return f"rate {float(self.rate)!r}, momentum {float(self.momentum)!r}"  # all digits: machines compare this


class OuterOptimizer:
    """The global weights, one flat array of float32 or float64, and their momentum."""

    def __init__(self, weights: Array) -> None:
        """Take over `weights`, which `step` changes in place."""
        self.weights = weights
        self.velocity = np.zeros_like(weights)

    def step(self, difference: Array, settings: OuterSettings, part: slice | None = None) -> None:
        """Move the weights, or a `part` of them, by the mean `difference` of a round."""
        part = part or slice(0, self.weights.size)
        of_type = self.weights.dtype.type
        rate, momentum = of_type(settings.rate), of_type(settings.momentum)
        scratch = np.empty(min(_PIECE, difference.size), of_type)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, difference.size, _PIECE):
                span = slice(begin, begin + _PIECE)
                moved, velocity, weights = difference[span], self.velocity[part][span], self.weights[part][span]
                change = scratch[: moved.size]
                np.multiply(velocity, momentum, out=velocity)
                np.add(velocity, moved, out=velocity)
                np.multiply(velocity, momentum, out=change)
                np.add(change, moved, out=change)
                np.multiply(change, rate, out=change)
                np.subtract(weights, change, out=weights)

    def state_dict(self) -> dict[str, Array]:
        """Return copies of weights and momentum."""
        return {"weights": self.weights.copy(), "velocity": self.velocity.copy()}

    def check(self, state: Any) -> None:
        """Raise `InvalidArgumentError` for anything but what `state_dict` has returned."""
        for name, mine in (("weights", self.weights), ("velocity", self.velocity)):
            theirs: Any = cast("dict[str, Any]", state).get(name) if isinstance(state, dict) else None
            if type(theirs) is not np.ndarray or theirs.shape != mine.shape or theirs.dtype.kind != "f":
                found = type(theirs).__name__
                raise InvalidArgumentError(name, found, f"must be {mine.size} numbers, as state_dict() returned them")

    def load_state_dict(self, state: Any) -> None:
        """Continue from what `state_dict` has returned. Raise `InvalidArgumentError` for anything else."""
        self.check(state)
        self.weights[...] = state["weights"]
        self.velocity[...] = state["velocity"]
