"""Training over slow links with uneven machines: which way reaches a loss first, and with how many bytes?

    sudo python -m benchmarks.slow_links --folder out              (hours on one core; may be stopped and continued)
    sudo python -m benchmarks.slow_links --folder out --quick      (some 15 minutes: one seed, short runs)
    python -m benchmarks.slow_links --folder out --page            writes the tables and pictures of docs/slow-links.md

It has two halves. `slow_links_learning` trains in one process and counts time in units, steps of the fast machine; it
says after how many units a way has which loss. `slow_links_timing` measures on a wire of 100 and of 10 Mbit/s, between
two network namespaces, what a unit of each way takes there, and how many bytes it sends. The product is the time to a
loss. Only the order of the samples is not that of a real run.
"""

from __future__ import annotations

import argparse
import json
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
            (5, "none", 1), (10, "none", 1), (20, "none", 1), (5, "int8", 1), (5, "int4", 4), (10, "int4", 4),
            (5, "sparse", 1), (20, "sparse", 1), (20, "sparse", 4),
        )
        for name in (f"local, {every}, {codec}, {parts}",)
    ),
)  # fmt: skip


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


def outcome(row: Row, runs: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, float]]) -> Outcome:
    """Return what the two halves say about a way."""
    unit = times[row.way]
    ones, target = runs[row.arm], mean(one["loss"] for one in runs["DDP"])
    units, curve = _mean_curve(ones)
    reached = _first_below(units, curve, target)
    loss = mean(one["loss"] for one in ones)
    alone = mean(one["units"] for one in runs["alone"]) * _times_as_long(loss, runs) * times["alone"]["seconds"]
    total = mean(one["units"] for one in ones)
    seconds = None if reached is None else reached * unit["seconds"]
    return Outcome(loss, seconds, alone / (total * unit["seconds"]), total * unit["bytes"])


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


def _times_as_long(loss: float, runs: dict[str, list[dict[str, Any]]]) -> float:
    """Return how many times as long the fast machine alone trains to end with a loss: on the line through its runs of
    several lengths, and on that line's ends beyond them."""
    lengths = [1.0, *learning.LENGTHS]
    names = [learning.ALONE, *(f"alone, {longer} times as long" for longer in learning.LENGTHS)]
    losses = [mean(one["loss"] for one in runs[name]) for name in names]
    pairs = list(zip(losses, lengths, strict=True))
    (one, short), (two, long) = pairs[:2] if loss > losses[1] else pairs[-2:]
    return max(0.0, short + (long - short) * (one - loss) / (one - two))


def tables(found: dict[str, Any]) -> str:
    """Return the tables of the page."""
    runs = learning.runs_of(found["runs"])
    seeds = len(runs["alone"])
    spread = max(float(np.std([one["loss"] for one in ones])) for ones in runs.values())
    lines = [
        (
            f"{next(iter(runs['alone']))['parameters']:,} parameters, {found['scale']['units']} units, seeds: {seeds}; "
            f"standard deviation of a loss over the seeds at most {spread:.3f}. {found['machine']}"
        ),
        "",
    ]
    for rate, times in found["times"].items():
        lines += [
            f"**{rate}**:",
            "",
            "| | validation loss at the end | time to DDP's loss | against the fast machine alone | bytes sent |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in ROWS:
            if row.arm in runs and row.way in times:
                one = outcome(row, runs, times)
                time = "never" if one.seconds is None else f"{one.seconds:.0f} s"
                size = "none" if row.way == "alone" else f"{one.nbytes / 1e6:,.0f} MB"
                lines.append(f"| {row.title} | {one.loss:.3f} | {time} | {one.gain:.2f} | {size} |")
        lines.append("")
    return "\n".join(lines)


def write_page(found: dict[str, Any]) -> None:
    """Write the tables and the picture of docs/slow-links.md."""
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{tables(found)}\n{END}{after}")
    runs = learning.runs_of(found["runs"])
    shown = [row for row in ROWS if row.arm in runs and row.way in next(iter(found["times"].values()))]
    lines = {row.title.replace("`", ""): (*_mean_curve(runs[row.arm]), row.way) for row in shown}
    draw_slow_links(lines, found["times"], IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training over slow links with uneven machines.")
    parser.add_argument("--folder", type=Path, required=True, help="where the results are kept")
    parser.add_argument("--quick", action="store_true", help="one seed, short runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--units", type=int, default=learning.Scale().units)
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
            learning.learn(learned, scale, 1 if options.quick else options.seeds, lambda text: print(text, flush=True))
    if learned.exists() and timed.exists():
        found = {**json.loads(learned.read_text()), "times": json.loads(timed.read_text()), "machine": options.machine}
        print(tables(found))
        if options.page:
            RESULTS.write_text(json.dumps(found))
            write_page(found)


if __name__ == "__main__":
    main()
