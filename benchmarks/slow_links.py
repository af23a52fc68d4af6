"""Training over slow links with uneven machines: which way reaches a loss first, and with how many bytes?

    sudo python -m benchmarks.slow_links --folder out              (hours on one core; may be stopped and continued)
    sudo python -m benchmarks.slow_links --folder out --quick      (some 15 minutes: one seed, short runs)
    python -m benchmarks.slow_links --folder out --page            writes the tables and pictures of docs/slow-links.md

It has two halves. `slow_links_learning` trains in one process and counts time in units, steps of the fast machine; it
says after how many units a way has which loss. `slow_links_timing` finds on a wire of 100 and of 10 Mbit/s, between two
network namespaces, what a unit of each way takes there with a model of ten times the size, and how many bytes it sends.
The product is the time to a loss. Then all is compared with what it should be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from benchmarks import slow_links_learning as learning, slow_links_timing as timing
from benchmarks.namespaces import why_not
from benchmarks.pictures import draw_slow_links

RATES = {"100 Mbit/s": 100_000_000, "10 Mbit/s": 10_000_000}
QUICK = learning.Scale(units=480)
PAGE = Path(__file__).parent.parent / "docs" / "slow-links.md"
IMAGE = PAGE.parent / "images" / "slow-links.png"
RESULTS = Path(__file__).parent / "results" / "slow-links.json"
BEGIN, END = "<!-- written by python -m benchmarks.slow_links -->", "<!-- end of what it has written -->"


AUTO = "auto"
ROUND_TRIP = 0.1
"""Seconds that are added, for one row of the judgement."""
MESSAGES = 3
"""That a reduction between two ranks waits for, one after the other: what both have done, the parts, and the sums."""
_LEARNED = (
    ("the fast machine alone", learning.ALONE),
    ("the same, for 1.25 times as long", "alone, 1.25 times as long"),
    ("the same, for 1.5 times as long", "alone, 1.5 times as long"),
    ("exact synchronous steps, batches by speed", "every step"),
    ("`LocalSteps`, every 6, `none`", "local, 6, none, 1"),
    ("`LocalSteps`, every 6, `sparse`, 3 fragments", "local, 6, sparse, 3"),
    ("`LocalSteps`, every 10, `none`", "local, 10, none, 1"),
)
_ROUNDS = (
    ("`LocalSteps`, every 6, `none`", "local, 6, none, 1"),
    ("the same, outer rate 1.2", "local, 6, outer rate 1.2"),
)
_WEIGHTINGS = (
    ("`LocalSteps`, every 10, `none`, weighting `samples`", "local, 10, none, 1"),
    ("the same, weighting `uniform`", "local, 10, weighting uniform"),
    ("the same, weighting `normalized`", "local, 10, weighting normalized"),
    ("`LocalSteps`, every 20, `none`", "local, 20, none, 1"),
    ("the same, Nesterov's outer momentum as in DiLoCo (0.6, 0.9)", "local, 20, Nesterov 0.6, 0.9"),
)
_MACHINES = (
    ("two fast machines, every 6, `int4`, 3 fragments", learning.TWO_FAST),
    ("the same, for 1.25 times as long", f"{learning.TWO_FAST}, 1.25 times as long"),
    ("two fast machines and two of half their speed, likewise", learning.FOUR),
)
"""Arms whose learning is compared, each kind with the seeds that all of it have."""


class Row(NamedTuple):
    """A row of the table: a way to train."""

    title: str
    arm: str
    """How it learns: the name of an arm."""
    way: str
    """What it takes: the name of a way."""


ROWS = (
    Row("the fast machine alone", "alone", "alone"),
    Row("DDP over Gloo", "DDP", "DDP"),
    Row("the same with torch's fp16 hook, as if that lost nothing", "DDP", "DDP, fp16 hook"),
    Row("the same with torch's PowerSGD hook (rank 4), as if that lost nothing", "DDP", "DDP, PowerSGD hook"),
    Row("DDP over Gloo, an update for each 4 batches", "DDP, accumulation 4", "DDP, accumulation 4"),
    Row("DDP over Gloo, an update for each 16 batches", "DDP, accumulation 16", "DDP, accumulation 16"),
    Row("DDP over Gloo, an update for each 64 batches", "DDP, accumulation 64", "DDP, accumulation 64"),
    Row("torch's PostLocalSGD, every 16 steps", "PostLocalSGD, 16", "PostLocalSGD, 16"),
    Row("ours, every step, batches by speed", "every step", "every step"),
    Row("the same with `int8`, as if that lost nothing", "every step", "every step, int8"),
    *(
        Row(f"`LocalSteps`, every {every}, `{codec}`" + (f", {parts} fragments" if parts > 1 else ""), name, name)
        for every, codec, parts in (
            (6, "none", 1), (6, "int8", 1), (6, "int4", 3), (6, "sparse", 3), (10, "none", 1), (10, "int4", 4),
            (10, "sparse", 4), (20, "none", 1),
        )
        for name in (f"local, {every}, {codec}, {parts}",)
    ),
    Row("`LocalSteps`, `auto` in 3 fragments", AUTO, AUTO),
)  # fmt: skip


_FAST = (learning.TWO_FAST, f"{learning.TWO_FAST}, 1.25 times as long")
_DDP = next(row for row in ROWS if row.way == "DDP")


class Outcome(NamedTuple):
    """What came of a way to train, on one wire."""

    loss: float
    seconds: float | None
    """To DDP's final loss; None if it was not reached."""
    gain: float
    """How many times as fast as the fast machine alone: the time in which that, with a longer run, reaches the final
    loss of this way, by the time of this way."""
    nbytes: float
    """Sent by a machine in the whole run."""


class Judgement(NamedTuple):
    """A row of the plan: what must be reached, what should be, and what was, by `auto` and by the best of our ways."""

    what: str
    must: float
    aim: float
    auto: float | None
    best: float | None
    way: str
    """The best of ours."""
    is_share: bool = False
    """A loss or a time in comparison, of which less is better; else a factor, of which more is."""

    def keeps(self, value: float | None) -> bool:
        """Return whether a value is what must be reached."""
        return value is not None and (value <= self.must if self.is_share else value >= self.must)


class Outcomes:
    """What the two halves say, on one wire."""

    def __init__(self, runs: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, Any]]) -> None:
        self.runs, self.times = runs, times
        self.rows = [row for row in ROWS if self.arm(row) in runs and row.way in times]
        self.target = self.loss("DDP")

    def loss(self, arm: str) -> float:
        """Return the mean loss of an arm at its end."""
        return mean(one["loss"] for one in self.runs[arm])

    def units(self, arm: str) -> float:
        """Return how long an arm trains."""
        return mean(one["units"] for one in self.runs[arm])

    def arm(self, row: Row) -> str:
        """Return the arm that says how a row learns: for `auto`, the one that is the most like what it has chosen."""
        if row.arm != AUTO or AUTO not in self.times:
            return row.arm
        codec, every = self.times[AUTO]["codec"], self.times[AUTO]["every"]
        alike = [arm for arm in learning.ARMS if arm.name in self.runs and arm.name.startswith(f"local, {arm.every}, ")]
        same = [arm for arm in alike if arm.codec == codec and arm.name.split(", ")[3:] == [str(arm.fragments)]]
        return min(same, key=lambda arm: (abs(log(arm.every / every)), -arm.fragments)).name if same else ""

    def until(self, row: Row, loss: float) -> float | None:
        """Return the seconds until a way has a loss; None if it never has."""
        reached = _first_below(*_mean_curve(self.runs[self.arm(row)]), loss)
        return None if reached is None else reached * self.times[row.way]["seconds"]

    def of(self, row: Row) -> Outcome:
        """Return what came of a way."""
        arm, unit = self.arm(row), self.times[row.way]
        loss, total = self.loss(arm), self.units(arm)
        alone = self.units(learning.ALONE) * self.longer_alone(loss) * self.times["alone"]["seconds"]
        return Outcome(loss, self.until(row, self.target), alone / (total * unit["seconds"]), total * unit["bytes"])

    def longer_alone(self, loss: float) -> float:
        """Return how many times as long the fast machine alone trains to end with a loss."""
        names = [learning.ALONE, *(f"alone, {longer} times as long" for longer in learning.LENGTHS)]
        return self.longer(loss, names, [1.0, *learning.LENGTHS])

    def longer(self, loss: float, names: list[str], lengths: list[float]) -> float:
        """Return how many times as long some machines train to end with a loss: on the line through their runs of
        several lengths, and on that line's ends beyond them."""
        pairs = list(zip(map(self.loss, names), lengths, strict=True))
        (one, short), (two, long) = pairs[:2] if loss > pairs[1][0] else pairs[-2:]
        return max(0.0, short + (long - short) * (one - loss) / (one - two))

    def judge(self) -> list[Judgement]:
        """Return the rows of the plan."""
        seeds = len(self.runs[learning.ALONE])
        ours = [row for row in self.rows if row.title.startswith(("`LocalSteps`", "ours"))]
        ours = [row for row in ours if len(self.runs[self.arm(row)]) == seeds]
        hooks = [row for row in self.rows if "hook" in row.title or "PostLocalSGD" in row.title]
        gathered = [row for row in self.rows if row.arm.startswith("DDP") and "hook" not in row.title]

        def against(rivals: list[Row], row: Row) -> float | None:
            """How many times as fast a way reaches the final loss of each rival; the least of them."""
            found = [self.until(row, self.loss(rival.arm)) for rival in rivals]
            took = [self.units(rival.arm) * self.times[rival.way]["seconds"] for rival in rivals]
            ratios = [theirs / own if own else None for own, theirs in zip(found, took, strict=True)]
            return None if not ratios or None in ratios else min(ratio for ratio in ratios if ratio is not None)

        def fewer(row: Row) -> float | None:
            reached = _first_below(*_mean_curve(self.runs[self.arm(row)]), self.target)
            bytes_of_ddp = self.units("DDP") * self.times["DDP"]["bytes"]
            return None if reached is None else bytes_of_ddp / (reached * self.times[row.way]["bytes"])

        def delayed(row: Row) -> float | None:
            arm = next(arm for arm in learning.ARMS if arm.name == self.arm(row))
            if arm.kind != "local":
                return None
            every = self.times[AUTO]["every"] if row.arm == AUTO else arm.every
            seconds, turn = self.times[row.way]["seconds"], every / arm.fragments
            waits = MESSAGES * ROUND_TRIP / 2
            hidden = turn * self.times["alone"]["seconds"] if arm.fragments > 1 else 0.0
            return max(0.0, waits - hidden) / (turn * seconds)

        rows: list[tuple[str, float, float, Callable[[Row], float | None], bool]] = [
            ("time to the final loss of DDP over Gloo", 10, 18, lambda row: against([_DDP], row), False),
            ("the same for DDP with each accumulation, the least", 2, 4, lambda row: against(gathered, row), False),
            ("the same for each of torch's hooks, the least", 1.5, 2.5, lambda row: against(hooks, row), False),
            ("against the fast machine alone (limit 1.5)", 1.25, 1.4, lambda row: self.of(row).gain, False),
            (
                "loss at equal tokens, against exact synchronous steps", 0.015, 0.005,
                lambda row: self.loss(self.arm(row)) / self.loss("every step") - 1, True,
            ),
            ("bytes until DDP's final loss, times fewer", 200, 2000, fewer, False),
            ("100 ms added round trip (modelled): slower by", 0.05, 0.0, delayed, True),
        ]  # fmt: skip
        found: list[Judgement] = []
        for what, must, aim, value, is_share in rows:
            of = {row: one for row in ours if (one := value(row)) is not None}
            best = (min if is_share else max)(of, key=of.__getitem__, default=None)
            auto = next((one for row, one in of.items() if row.arm == AUTO), None)
            title = "" if best is None else best.title
            found.append(Judgement(what, must, aim, auto, None if best is None else of[best], title, is_share))
        if learning.FOUR in self.runs:
            gain = self.longer(self.loss(learning.FOUR), list(_FAST), [1.0, 1.25])
            what = "two more of half the speed, against two fast ones (limit 1.5; wire not counted)"
            found.append(Judgement(what, 1.25, 1.4, None, gain, "every 6, `int4`, 3 fragments"))
        return found


def _mean_curve(ones: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    curves = np.array([one["curve"] for one in ones])
    return curves[0, :, 0], curves[:, :, 1].mean(axis=0)


def _first_below(units: np.ndarray, curve: np.ndarray, target: float) -> float | None:
    """Return when a curve first reaches a loss."""
    below = np.flatnonzero(curve <= target)
    if not below.size:
        return None
    place = int(below[0])
    if place == 0:
        return float(units[0])
    share = (curve[place - 1] - target) / (curve[place - 1] - curve[place])
    return float(units[place - 1] + share * (units[place] - units[place - 1]))


def tables(found: dict[str, Any]) -> str:
    """Return the tables of the page."""
    runs = _complete(learning.runs_of(found["runs"]))
    spread = max(float(np.std([one["loss"] for one in ones])) for ones in runs.values())
    lines = [
        (
            f"Learned with {runs['alone'][0]['parameters']:,} parameters in {found['scale']['units']} units; standard "
            f"deviation of a loss over the seeds at most {spread:.3f}. {found['machine']}"
        ),
        "",
    ]
    for rate, times in found["times"].items():
        here = Outcomes(runs, times)
        lines += [
            f"**{rate}**:",
            "",
            "| | loss at the end | seeds | time to DDP's loss | against the fast machine alone | bytes sent |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in here.rows:
            one = here.of(row)
            time = "never" if one.seconds is None else f"{one.seconds:.0f} s"
            size = "none" if row.way == "alone" else f"{one.nbytes / 1e6:,.1f} MB"
            seeds = len(runs[here.arm(row)])
            lines.append(f"| {row.title} | {one.loss:.3f} | {seeds} | {time} | {one.gain:.2f} | {size} |")
        if AUTO in times:
            chosen, way = times[AUTO], here.arm(ROWS[-1])
            lines += [
                "",
                (
                    f"`auto` chose: every {chosen['every']} with `{chosen['codec']}` ({chosen['why']}); "
                    f'its learning is that of "{way}".'
                ),
            ]
        lines += ["", "| | must | aim | `auto` | kept | best of ours | kept |", "| --- |" + " --- |" * 6]
        for one in here.judge():
            values = [_said(one, one.auto), _kept(one, one.auto), _said(one, one.best), _kept(one, one.best)]
            best = f"{values[2]} ({one.way})" if one.way else values[2]
            must, aim = _said(one, one.must), _said(one, one.aim)
            lines.append(f"| {one.what} | {must} | {aim} | {values[0]} | {values[1]} | {best} | {values[3]} |")
        lines.append("")
    here = Outcomes(runs, next(iter(found["times"].values())))
    lines += ["**Learning alone**, without the wire:", "", "| | loss | each seed | against the fast machine alone |"]
    lines += ["| --- | --- | --- | --- |"]
    for arms in (_LEARNED, _ROUNDS, _WEIGHTINGS, _MACHINES):
        known = {title: runs[arm] for title, arm in arms if arm in runs}
        seeds = set.intersection(*({one["seed"] for one in ones} for ones in known.values())) if known else set()
        for title, ones in known.items():
            losses = [one["loss"] for one in ones if one["seed"] in seeds]
            gain = f"{here.longer_alone(mean(losses)):.2f}" if arms in (_LEARNED, _ROUNDS) else ""
            lines.append(f"| {title} | {mean(losses):.3f} | {', '.join(f'{loss:.3f}' for loss in losses)} | {gain} |")
    return "\n".join([*lines, ""])


def _said(one: Judgement, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f}%" if one.is_share else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"


def _kept(one: Judgement, value: float | None) -> str:
    return "" if value is None else "yes" if one.keeps(value) else "**no**"


def _complete(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each arm: of those that are compared most, with the seeds that all of them have."""
    found = dict(runs)
    for names in ([arm.name for arm in learning.CORE], [*_FAST, learning.FOUR]):
        seeds = set.intersection(*({one["seed"] for one in runs.get(name, [])} for name in names))
        found |= {name: [one for one in runs.get(name, []) if one["seed"] in seeds] for name in names}
    return {name: ones for name, ones in found.items() if ones}


def write_page(found: dict[str, Any]) -> None:
    """Write the tables and the picture of docs/slow-links.md."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(found)}\n{END}{after}")
    runs = _complete(learning.runs_of(found["runs"]))
    shown = [row for row in Outcomes(runs, next(iter(found["times"].values()))).rows if row.arm != AUTO]
    lines = {row.title.replace("`", ""): (*_mean_curve(runs[row.arm]), row.way) for row in shown}
    draw_slow_links(lines, found["times"], IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training over slow links with uneven machines.")
    parser.add_argument("--folder", type=Path, required=True, help="where the results are kept")
    parser.add_argument("--quick", action="store_true", help="one seed, short runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--units", type=int, default=learning.Scale().units)
    parser.add_argument("--processes", type=int, default=1, help="of the learning half; each is busy on one core")
    parser.add_argument("--only", choices=("learning", "timing"), help="one half")
    parser.add_argument("--page", action="store_true", help="write docs/slow-links.md from the results in the folder")
    parser.add_argument("--machine", default="", help="what it was measured on, for the page")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    scale = QUICK if options.quick else learning.Scale(units=options.units)
    learned, timed = options.folder / "learning.json", options.folder / "timing.json"
    if not options.page:
        if options.only != "learning":
            if (why := why_not()) is not None:
                raise SystemExit(why)
            names = list(timing.ways(options.quick))
            wanted = {row.way for row in ROWS}
            names = [name for name in names if name in wanted]
            times = {rate: timing.measured(bits, names, quick=options.quick) for rate, bits in RATES.items()}
            timed.write_text(json.dumps(times))
        if options.only != "timing":
            seeds = 1 if options.quick else options.seeds
            learning.learn(learned, scale, seeds, lambda text: print(text, flush=True), options.processes)
    if learned.exists() and timed.exists():
        found = {**json.loads(learned.read_text()), "times": json.loads(timed.read_text()), "machine": options.machine}
        print(tables(found))
        if options.page:
            RESULTS.write_text(json.dumps(found))
            write_page(found)


if __name__ == "__main__":
    main()
