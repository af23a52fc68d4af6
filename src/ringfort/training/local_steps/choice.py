"""How often to reduce, and with which codec: decided from what a local step and a reduction take. Pure.

If an exact reduction takes at most a tenth of a step, every step is reduced. Otherwise a round has as many local steps
as keep the reduction below a share of it, and as few as possible: ranks that train apart for long learn less from each
other (docs/slow-links.md has figures). `int8` and `int4` with error feedback cost no learning, `sparse` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Final

EVERY_STEP: Final = 0.1
"""The reduction of every step may take this share of a step."""
SHARE: Final = 0.1
"""The reduction of a round, for which the program waits, may take this share of the local steps."""
HIDDEN_SHARE: Final = 0.5
"""The same where the program trains meanwhile: the rest is for what was measured wrongly."""
FEWEST: Final = 6
"""Local steps of a round: fewer gained nothing in our measurements. Halves and thirds of it are whole, so members of
half the speed lose nothing to rounding: of 5 steps they would make 2."""
MOST: Final = 100
CODECS: Final = ("int8", "int4", "sparse")
"""From the most exact one to the smallest."""
STAGES: Final = (
    ("int8", FEWEST),
    ("int4", FEWEST),
    ("int8", 10),
    ("int4", 10),
    ("sparse", FEWEST),
    ("int8", 30),
    ("int4", 30),
    ("sparse", 30),
    ("int8", MOST),
    ("int4", MOST),
    ("sparse", MOST),
)
"""Codecs, and the most local steps of a round with them, from what costs the least learning to what costs the most."""
DECIDE_AFTER: Final = 20
"""Rounds after which everything is measured and decided again."""
SLACK: Final = 1.25
"""A decision stays as long as it would be made for times that differ by this factor: measurements err."""


@dataclass(frozen=True)
class Costs:
    """What was measured. All members have the same numbers: the slowest counts for `reductions`."""

    step: float
    """Seconds of a local step of the fastest member."""
    reductions: Mapping[str, float]
    """Seconds of a reduction by codec; `none` is exact."""


@dataclass(frozen=True)
class Decision:
    """How often to reduce, and how."""

    every: int
    codec: str
    why: str = ""

    def __str__(self) -> str:
        how = "without compression" if self.codec == "none" else f"with {self.codec}"
        return f"reduce every step {how}" if self.every == 1 else f"reduce every {self.every} steps {how}"


def decide(
    costs: Costs,
    last: Decision | None = None,
    *,
    every: int | None = None,
    codec: str | None = None,
    share: float = SHARE,
) -> Decision:
    """Return how often to reduce, and how. `every` and `codec` are what the program has fixed. The `last` decision
    stays if the costs have hardly changed. A reduction may take this `share` of the local steps."""
    if last is not None and any(
        _is_same(_rule(costs, factor, every, codec, share), last) for factor in _latest(costs, last, share)
    ):
        return last
    return _rule(costs, 1.0, every, codec, share)


def _latest(costs: Costs, last: Decision, share: float) -> list[float]:
    """Return the factors, within the slack, of which one leads to the last decision if any factor does. Reductions that
    take longer rule out what comes earlier in `STAGES`, so only the largest factor that its steps allow needs a look:
    where they are just enough, or the end of the slack."""
    allowed = EVERY_STEP if last.every == 1 and last.codec == "none" else share * last.every
    seconds = costs.reductions.get(last.codec, 0.0)
    enough = allowed * costs.step / seconds * (1 - 1e-9) if seconds > 0 else SLACK
    return [SLACK, *([enough] if 1 / SLACK <= enough < SLACK else [])]


def _is_same(one: Decision, other: Decision) -> bool:
    return (one.every, one.codec) == (other.every, other.codec)


def _rule(costs: Costs, factor: float, every: int | None, codec: str | None, share: float) -> Decision:
    step = costs.step if isfinite(costs.step) and costs.step > 0 else 0.0
    times = {name: seconds * factor for name, seconds in costs.reductions.items()}
    exact = times["none"]
    if every is None and codec in (None, "none") and exact <= EVERY_STEP * step:
        return Decision(1, "none", f"{_ms(exact)} for a step of {_ms(step)}")
    needed = {name: _steps(times[name], share * step) for name in ((codec,) if codec is not None else CODECS)}
    if every is not None:
        best = next((name for name, steps in needed.items() if steps <= every), list(needed)[-1])
        return Decision(every, best, _why(times, best, step, every))
    for name, most in STAGES if codec is None else ((codec, MOST),):
        if needed[name] <= most:
            made = max(FEWEST, needed[name])
            return Decision(made, name, _why(times, name, step, made))
    name = list(needed)[-1]
    return Decision(MOST, name, f"nothing is fast enough: {_why(times, name, step, MOST)}")


def _steps(seconds: float, allowed: float) -> int:
    """Return how many steps keep a reduction below its share, which is `allowed` for each. A link that measures as zero
    makes its time infinite."""
    needed = seconds / allowed if allowed else MOST + 1
    return ceil(needed) if isfinite(needed) and needed <= MOST else MOST + 1


def _why(times: Mapping[str, float], name: str, step: float, every: int) -> str:
    return f"{_ms(times[name])} for {every} steps of {_ms(step)}; exact, it would take {_ms(times['none'])}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if isfinite(seconds) else "forever"
