"""Members of an elastic run that leave, join, finish and fail, as processes on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0
"""Seconds for something that takes one on an idle machine."""


class Program:
    """A process of `tests.workers.elastic_life`."""

    def __init__(self, home: Path, **arguments: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.elastic_life", json.dumps(arguments)],
            stdout=subprocess.PIPE, text=True, env={**_environment(), "RINGFORT_HOME": str(home)},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first line that is `wanted`."""
        deadline, seen = time.monotonic() + PATIENCE, 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    if wanted(line):
                        return line
                seen = len(self.lines)
                is_over = self.process.poll() is not None and not self._reader.is_alive()
                assert (is_over, time.monotonic() > deadline) == (False, False), self.lines[-12:]
                self._changed.wait(0.1)

    def step(self, number: int) -> None:
        """Wait until it has applied a step."""
        self.until(lambda line: line.get("step", 0) >= number)

    def end(self) -> dict[str, Any]:
        """Wait for its end, and return its last line."""
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return self.lines[-1]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    home = tmp_path / "home"
    home.mkdir(0o700)
    programs = list[Program]()

    def begin(**arguments: Any) -> Program:
        programs.append(Program(home, **arguments))
        return programs[-1]

    with _ending(programs):
        yield begin


@contextmanager
def _ending(programs: list[Program]) -> Iterator[None]:
    try:
        yield
    finally:
        for program in programs:
            program.process.kill()
            program.process.wait(PATIENCE)
            program._reader.join(PATIENCE)
            program.process.stdout.close()


def test_a_member_that_is_asked_to_end_leaves_after_its_step_and_nothing_is_computed_again(
    start: Callable[..., Program],
) -> None:
    leaving, *others = [start(total=60) for _ in range(3)]
    leaving.step(5)
    leaving.process.send_signal(signal.SIGTERM)
    leaving.end()
    assert leaving.process.returncode == 143
    last = max(line.get("step", 0) for line in leaving.lines)
    ends = [other.end() for other in others]
    assert [other.process.returncode for other in others] == [0, 0]
    for end in ends:
        assert (end["done"], end["seen"]) == (60, [20])
        assert any(f"(it leaves) left: 2 members from step {last + 1}" in line for line in end["events"])
    # Eight micro-batches a step; those of the leaving one are what is missing in the others' count, at most its share.
    assert 8 * (60 - last) <= sum(end["computed"] for end in ends) < 8 * 60


def test_a_run_below_its_minimum_waits_and_a_late_joiner_of_a_finished_one_gets_the_state(
    start: Callable[..., Program],
) -> None:
    stays, killed = [start(total=30, learner_at=29) for _ in range(2)]
    stays.step(10)
    killed.process.kill()
    line = stays.until(lambda line: "Waiting with the state" in line.get("log", ""))
    assert line["level"] == "WARNING"
    assert "1 of at least 2 members are here" in line["log"]
    returned = start(total=30, learner_at=29)
    stays.step(29)  # then both wait for a learner
    late = start(total=30)
    for program in (stays, returned, late):
        end = program.end()
        assert (program.process.returncode, end["done"], end["seen"]) == (0, 30, [10])
    assert (late.lines[-1]["applied"], stays.lines[-1]["applied"]) == (0, 30)


def test_gradients_that_are_not_finite_end_the_run_at_all_members_or_are_skipped_by_all(
    start: Callable[..., Program],
) -> None:
    raising = [start(name="raises", total=30, nan_at=3 * (not number)) for number in range(2)]
    skipping = [start(name="skips", total=30, nan_at=3 * (not number), nonfinite="skip") for number in range(2)]
    for program in raising:
        end = program.end()
        assert (program.process.returncode, end["failed"]) == (3, "NonFiniteStepError")
        assert end["why"].startswith("The gradients of step 3 contain infinite or NaN elements (")
    for program in skipping:
        end = program.end()
        assert (end["done"], end["skipped"], sum(end["seen"]) > 0) == (30, 1, True)


def test_a_program_with_another_batch_is_told_what_differs(start: Callable[..., Program]) -> None:
    runs = [start(total=2000) for _ in range(2)]
    runs[0].step(2)
    other = start(total=2000, batch=16, nodes="1:4", timeout=2.0)
    end = other.end()
    assert end["failed"] == "InvalidArgumentError"
    assert "batch is 16 here and 32 there" in end["why"]
    begun = next(line["at"] for line in other.lines if "begun" in line)
    told = next(line["at"] for line in other.lines if "is another one: batch is 16" in line.get("log", ""))
    print(f"told after {told - begun:.2f} s")
    assert all(run.process.poll() is None for run in runs)
