"""Runs to look at, for tests of what people see: three machines that train, and a source that gives their views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringfort.dashboard.known import Reported
from ringfort.dashboard.recording_file import Recorder
from ringfort.telemetry.view import LinkView, RunView
from tests.helpers.telemetry import Rank, SimulatedRun

VITALS = {
    "cpu": 0.85,
    "memory": 11.8e9,
    "memory_total": 32e9,
    "gpu": 0.97,
    "gpu_memory": 20e9,
    "gpu_memory_total": 24e9,
    "temperature": 71.0,
}
ON_BATTERY = {"cpu": 0.35, "memory": 15.6e9, "memory_total": 16e9, "temperature": 88.0, "battery": 0.15, "plugged": 0.0}
NAMES = ("study", "laptop", "attic")


def three_machines(seconds: float = 30.0) -> SimulatedRun:
    """A run of three machines, of which the laptop is slow and on Wi-Fi, after some seconds of training."""
    links = [
        LinkView(a, b, measured=84e6 / 8, round_trip=0.0021, kind="Wi-Fi")
        if "laptop" in (a, b)
        else LinkView(a, b, measured=940e6 / 8, round_trip=0.0003, kind="Ethernet")
        for a in NAMES
        for b in NAMES
        if a != b
    ]
    ranks = [
        Rank("study", 0.21, data=0.02, vitals=VITALS),
        Rank("laptop", 0.35, codec=0.03, vitals=ON_BATTERY),
        Rank("attic", 0.25, vitals=VITALS),
    ]
    run = SimulatedRun(ranks, wire=0.12, links=links, run="night", total_steps=5000)
    run.advance(seconds)
    return run


def record(path: Path, seconds: int) -> None:
    """Write a recording of the three machines."""
    run = three_machines(0.0)
    recorder = Recorder(path)
    for _ in range(seconds):
        steps = run._steps_until(run.now + 1.0)
        run.now += 1.0
        for rank, made in zip(run.ranks, steps, strict=True):
            recorder.write(Reported(run.report(rank, made)), run.now)
    recorder.close()


class ViewSource:
    """A `dashboard.source.Source` that gives what a test puts into it."""

    def __init__(self, view: RunView, log: Sequence[str] = ()) -> None:
        self.now = view
        self.lines = list(log)
        self.error: Exception | None = None
        self.asked: list[tuple[int, str | None]] = []
        """The ranks and runs whose output was asked for."""
        self.wanted: list[str | None] = []
        """The runs that were asked for."""

    def view(self, run: str | None = None) -> RunView:
        self.wanted.append(run)
        if self.error is not None:
            raise self.error
        return self.now

    def log(self, rank: int, run: str | None = None) -> list[str]:
        self.asked.append((rank, run))
        return self.lines

    def close(self) -> None:
        pass

    def __enter__(self) -> ViewSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
