"""Provoke the five pictures of docs/watching.md, and check that the sentence on top is right about each of them.

    python -m benchmarks.watching [--seconds 14] [--only NAME] [--json FILE] [--pictures DIR]

Three machines, which are network namespaces on this one, train a small model. One of them has a slow link, or computes
slowly, or loads data slowly. A viewer on one of them says who makes everyone wait, and what would help. Then the advice
is followed, and what it saves is measured. Needs root. Exits with 1 if a cause or a culprit is wrong, or if a
prediction is off by more than 30%.

Computing is mostly sleep, and each step is about half a second or longer: so results hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.watching_run import Machine, Setup, look
from ringfort.telemetry.step_model import StepModel, slowest_link
from ringfort.telemetry.view import RunView
from tests.helpers.namespaces import why_not

SECONDS = 14.0
"""How long to look: means are over the last 10 seconds, and in the first ones links are still measured."""
RIGHT = 0.7, 1.3
"""Measured savings, divided by the predicted ones."""
SLOW_LINK = 100.0
"""Megabits per second."""
MEDIUM, LARGE = 600_000, 1_000_000
"""Parameters: without compression, the gradients of the larger model take half a second on the slow link."""

HOME = Setup((Machine("study"), Machine("laptop"), Machine("attic")))


@dataclass(frozen=True)
class Scenario:
    """A typical picture: what to provoke, what must be said about it, and what to do."""

    setup: Setup
    cause: str
    culprit: str = ""
    words: str = ""
    """What the sentence must contain."""
    remedy: Callable[[Setup, RunView], Setup] | None = None


def shares_by_speed(setup: Setup, view: RunView) -> Setup:
    """Return the same with as many samples in all, dealt in proportion to the speed that was seen."""
    seen = {rank.name: rank.samples_per_second / rank.steps_per_second / rank.split.compute for rank in view.ranks}
    total = sum(machine.samples for machine in setup.machines)
    for machine in setup.machines:
        setup = setup.changed(machine.name, samples=round(total * seen[machine.name] / sum(seen.values())))
    return setup


SCENARIOS = {
    "slow-link": Scenario(
        replace(HOME, parameters=LARGE).changed("laptop", megabits=SLOW_LINK),
        "slow_link", "laptop", "compression int8 would save about",
        lambda setup, _: replace(setup, compression="int8"),
    ),
    "slow-machine": Scenario(
        HOME.changed("laptop", compute=1.2),
        "slow_machine", "laptop", "batches in proportion to speed would save about",
        shares_by_speed,
    ),
    "data-loading": Scenario(
        HOME.changed("attic", load=0.6),
        "data", "attic", "more loader workers would save up to",
        lambda setup, _: setup.changed("attic", load=0.0),
    ),
    "compression-pays": Scenario(
        Setup(tuple(replace(machine, compute=1.2) for machine in HOME.machines), MEDIUM, "int8")
        .changed("laptop", megabits=SLOW_LINK),
        "well", "", "compression int8 saves about",
        lambda setup, _: replace(setup, compression=None),
    ),
    "all-well": Scenario(HOME, "well", "", "All well: 3 ranks compute"),
}  # fmt: skip
"""By name, as in the document."""


@dataclass
class Outcome:
    """What was seen of a scenario."""

    name: str
    view: RunView
    is_right: bool
    """Whether cause, culprit and words are."""
    step: float
    """Seconds, as provoked."""
    step_after: float | None = None
    """Seconds, when the advice was followed."""
    predicted: float | None = None
    """Seconds that it would save; for a compression in use, that it saves."""

    @property
    def measured(self) -> float | None:
        """Seconds that it has saved."""
        return None if self.step_after is None else abs(self.step - self.step_after)

    @property
    def ratio(self) -> float | None:
        """What was measured, divided by what was predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted

    def figures(self) -> dict[str, Any]:
        """What is written to a file."""
        verdict = self.view.verdict
        said = {"name": self.name, "sentence": verdict.sentence, "cause": verdict.cause, "culprit": verdict.culprit}
        seconds = {name: getattr(self, name) for name in ("step", "step_after", "predicted", "measured", "ratio")}
        return {**said, "holds": self.holds, **seconds}

    @property
    def holds(self) -> bool:
        """Whether the sentence is right."""
        return self.is_right and (self.ratio is None or RIGHT[0] <= self.ratio <= RIGHT[1])


def step_of(view: RunView) -> float:
    """The seconds of a step."""
    return 1 / view.verdict.steps_per_second


def prediction(view: RunView) -> float | None:
    """What the sentence says: the saving that it predicts, or the one of the compression in use."""
    slow = slowest_link(view.ranks, view.links)
    gained = StepModel(view.ranks).gained_by_compression(None if slow is None else slow.link)
    return view.verdict.saving or gained or None


def provoke(name: str, seconds: float) -> Outcome:
    """Provoke a picture, follow its advice, and compare."""
    scenario = SCENARIOS[name]
    view = look(scenario.setup, seconds)
    verdict = view.verdict
    is_right = (verdict.cause, verdict.culprit) == (scenario.cause, scenario.culprit) and (
        scenario.words in verdict.sentence
    )
    found = Outcome(name, view, is_right, step_of(view))
    if scenario.remedy is not None:
        found.predicted = prediction(view)
        found.step_after = step_of(look(scenario.remedy(scenario.setup, view), seconds))
    return found


# --- results ----------------------------------------------------------------------------------------------------------


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.0f} ms"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| picture | step | then | predicted saving | measured | measured / predicted |", "| --- " * 6 + "|"]
    for one in outcomes:
        figures = (_ms(one.step), _ms(one.step_after), _ms(one.predicted), _ms(one.measured))
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        lines.append(f"| {' | '.join((one.name, *figures, ratio))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each look; default {SECONDS:g}")
    parser.add_argument("--only", choices=SCENARIOS, help="one picture")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw page and terminal of each (Chromium)")
    given = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for name in [given.only] if given.only else SCENARIOS:
        found = provoke(name, given.seconds)
        outcomes.append(found)
        print(f"{name}: {found.view.verdict.sentence}{'' if found.is_right else ' WRONG'}", flush=True)
    print(table(outcomes))
    if given.json is not None:
        given.json.write_text(json.dumps([one.figures() for one in outcomes], indent=1) + "\n", encoding="utf-8")
    if given.pictures is not None:
        from benchmarks.watching_pictures import draw  # needs Playwright and Chromium

        draw({one.name: one.view for one in outcomes}, given.pictures)
    return 0 if all(one.holds for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
