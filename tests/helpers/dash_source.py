"""Runs that never happened, as `ringfort dash` shows them: for tests of the page, and for looking at it.

`python -m tests.helpers.dash_source [three|many|ended|empty]` serves one and prints its link.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from msgspec.structs import replace

from ringfort.telemetry.view import (
    Curve,
    LinkView,
    RankView,
    RunView,
    ShownEvent,
    ShownStep,
    Split,
    Verdict,
)


@dataclass
class ShownSource:
    """A `Source` that shows what a function of the time returns."""

    make: Callable[[float], RunView]
    logs: Mapping[int, list[str]] = field(default_factory=dict[int, list[str]])
    clock: Callable[[], float] = time.time
    asked: list[str | None] = field(default_factory=list[str | None])
    """The runs that views were asked of."""

    def view(self, run: str | None = None) -> RunView:
        self.asked = [*self.asked[-99:], run]
        return self.make(self.clock())

    def log(self, rank: int, run: str | None = None) -> list[str]:
        return self.logs.get(rank, [])

    def close(self) -> None:
        pass

    def __enter__(self) -> ShownSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


BEGUN = 1_700_000_000.0
"""When all of these runs began."""
MACHINES = ("study", "attic", "laptop")
VITALS = (
    {"cpu": 0.34, "memory": 21e9, "memory_total": 64 * 2**30, "gpu": 0.97, "gpu_memory": 19e9,
     "gpu_memory_total": 24 * 2**30, "temperature": 71.0},
    {"cpu": 0.93, "memory": 9.1e9, "memory_total": 16 * 2**30, "temperature": 62.0},
    {"cpu": 0.88, "memory": 12.9e9, "memory_total": 16 * 2**30, "temperature": 84.0, "battery": 0.62, "plugged": 0.0},
)  # fmt: skip

Value = Callable[[int, random.Random], float]


@dataclass(frozen=True)
class Pace:
    """How far a run is: its steps have the same length."""

    now: float
    length: float

    @property
    def step(self) -> int:
        return self.at(self.now)

    def at(self, moment: float) -> int:
        return max(0, int((moment - BEGUN) / self.length))

    def curve(self, name: str, value: Value, points: int = 400, seconds: float = 5400.0) -> Curve:
        gap = seconds / points
        last = math.floor(self.now / gap) * gap
        at = [round(last - gap * back, 3) for back in reversed(range(points))]
        steps = [self.at(moment) for moment in at]
        values: list[float | None] = [value(step, random.Random(step)) for step in steps]
        return Curve(name, at, steps, values)

    def timeline(self, split: Split, most: int = 60) -> tuple[ShownStep, ...]:
        shown: list[ShownStep] = []
        for number in range(self.step - most, self.step):
            noise = random.Random(number).uniform(0.85, 1.15)
            wait = max(0.0, split.waiting + split.compute * (1 - noise))
            jittered = Split(split.compute * noise, split.data, wait, split.wire, split.codec, split.seal)
            shown.append(ShownStep(number, BEGUN + number * self.length, jittered))
        return tuple(shown)


def three_machines(now: float) -> RunView:
    """Three machines of which one has a slow link."""
    pace, last = Pace(now, 0.56), 40_000
    step = pace.step % last
    splits = (
        Split(0.19, 0.004, 0.155, 0.17, 0.012, 0.006),
        Split(0.31, 0.012, 0.03, 0.17, 0.012, 0.006),
        Split(0.337, 0.008, 0.0, 0.17, 0.012, 0.006),
    )
    rate = 1 / pace.length
    ranks = tuple(
        RankView(f"{name}:1", index, name, name, "training", 4000 + index, step, splits[index], rate, 64 * rate, 0.4,
                 VITALS[index], 1.9e7, 1.9e7)
        for index, name in enumerate(MACHINES)
    )  # fmt: skip
    links = (
        *_both("study", "attic", 4.7e6, 1.17e8, 0.0004, "Ethernet"),
        *_both("study", "laptop", 4.6e6, 1.05e7, 0.0031, "Wi-Fi"),
        *_both("attic", "laptop", 4.6e6, 9.8e6, 0.0036, "Wi-Fi"),
    )
    sentence = "study waits 28% of each step for laptop (Wi-Fi, 84 Mbit/s); compression int8 would save about 130 ms."
    loss = _loss(pace.step, random.Random(step))
    verdict = Verdict(
        sentence, "slow_link", "laptop", 0.13, step, last, loss, 192 * rate, rate, (last - step) * pace.length, 1.87
    )
    curves = (
        pace.curve("loss", _loss),
        pace.curve("lr", lambda at, _: 3e-4 * 0.9999 ** (at % 20_000)),
        pace.curve("samples/s", lambda _, noise: 192 * rate * noise.uniform(0.95, 1.03)),
    )
    timeline = {rank: pace.timeline(split) for rank, split in enumerate(splits)}
    runs = ("language-model", "vision")
    return RunView(now, runs[0], "train.py", verdict, ranks, links, _events(now), curves, timeline, runs)


def many_ranks(now: float, ranks: int = 32) -> RunView:
    """Many machines, after a day, in a ring."""
    pace, last = Pace(now, 0.21), 2_000_000_000
    rate, noise = 1 / pace.length, random.Random(int(now * 2))
    names = [f"node-{index:02}" for index in range(ranks)]
    splits = [
        Split(0.1 + late, 0.003, 0.05 - late, 0.04, 0.004, 0.003) for late in (0.002 * (n % 16) for n in range(ranks))
    ]
    views = tuple(
        RankView(name, index, name, name, "training", 100 + index, pace.step, splits[index], rate,
                 32 * rate * noise.uniform(0.9, 1.1), noise.uniform(0, 1), VITALS[index % 3], 9e7, 9e7, "int8")
        for index, name in enumerate(names)
    )  # fmt: skip
    links = tuple(
        LinkView(a, b, 9e7 * noise.uniform(0.5, 1) if (j - i) % ranks == 1 else 0.0, 1.17e8, 2e-4, "Ethernet")
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    )
    sentence = "All well: 32 ranks compute 62% of each step, 21.4 times as fast as the fastest alone."
    left = (last - pace.step) * pace.length
    verdict = Verdict(
        sentence, "well", "", 0.0, pace.step, last, _loss(pace.step, noise), 32 * ranks * rate, rate, left, 21.4
    )
    curves = tuple(pace.curve(name, _loss, 600, 86400.0) for name in ("loss", "lr", "accuracy", "samples/s"))
    timeline = {rank: pace.timeline(split, 128) for rank, split in enumerate(splits)}
    return RunView(
        now, "pretraining", "train.py", verdict, views, links, _events(now, 200), curves, timeline, ("pretraining",)
    )


def has_ended(now: float) -> RunView:
    """The three machines, five minutes after the end: one was lost, the others have finished."""
    view = three_machines(now - 300)
    states = ("lost", "ended", "ended")
    ranks = tuple(
        replace(rank, state=state, steps_per_second=0.0, samples_per_second=0.0, sent=0.0, received=0.0, heard=300.0)
        for rank, state in zip(view.ranks, states, strict=True)
    )
    verdict = Verdict("All ranks have ended.", step=view.verdict.step, total_steps=40_000, loss=view.verdict.loss)
    return replace(view, now=now, ranks=ranks, verdict=verdict, links=())


def nothing_yet(now: float) -> RunView:
    """What is seen before anything was found."""
    return RunView(now, verdict=Verdict("No rank has been seen yet."), notice="Nobody else was found on this network.")


def _both(a: str, b: str, used: float, measured: float, trip: float, kind: str) -> tuple[LinkView, LinkView]:
    return LinkView(a, b, used, measured, trip, kind), LinkView(b, a, used * 0.97, measured, trip, kind)


def _loss(step: int, noise: random.Random) -> float:
    return 1.9 + 8.6 / math.sqrt(1 + (step % 200_000) / 60) + noise.gauss(0, 0.03)


def _events(now: float, number: int = 6) -> tuple[ShownEvent, ...]:
    kinds = (
        ("joined", "rank 2 on laptop is here", "laptop", 2),
        ("epoch", "epoch 7: study, attic and laptop", "study", 0),
        ("checkpoint", "checkpoint of step 12,000 written in 0.8 s", "study", 0),
        ("lost", "rank 2 on laptop has ended", "laptop", 2),
        ("connections", "2 connections to laptop instead of 1", "attic", 1),
        ("compression", "compression switched off: the wire is faster", "attic", 1),
    )
    minute = int(now / 60) * 60
    return tuple(ShownEvent(minute - 61.0 * (number - index), *kinds[index % len(kinds)]) for index in range(number))


LOGS = {
    rank: [f"step {step}: loss {_loss(step, random.Random(step)):.4f}" for step in range(12_000, 12_400, 10)]
    for rank in range(3)
}

SCENES: Mapping[str, Callable[[float], RunView]] = {
    "three": three_machines,
    "many": many_ranks,
    "ended": has_ended,
    "empty": nothing_yet,
}


def main() -> None:
    from ringfort.dashboard.web.server import DashServer

    scene = sys.argv[1] if len(sys.argv) > 1 else "three"
    with ShownSource(SCENES[scene], LOGS) as source, DashServer(source) as server:
        while True:
            print(server.new_link(), flush=True)
            input()


if __name__ == "__main__":
    main()
