"""Members of an elastic run that are away for a while: slow, asleep, frozen; and machines that come after its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0
"""Seconds for something that takes one on an idle machine."""

Line = dict[str, Any]
Start = Callable[..., "Program"]


class Program:
    """A process that prints lines of JSON."""

    def __init__(self, module: str, *arguments: str, **variables: str) -> None:
        self.lines: list[Line] = []
        self._changed = threading.Condition()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RINGFORT_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, **variables},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(json.loads(line))
                self._changed.notify_all()

    def until(self, wanted: Callable[[Line], object], since: int = 0) -> Line:
        """Return the first line that is `wanted`, of those after the first `since`."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while True:
                for line in self.lines[since:]:
                    if wanted(line):
                        return line
                since = len(self.lines)
                assert (self._reader.is_alive(), time.monotonic() < deadline) == (True, True), self.lines[-12:]
                self._changed.wait(0.1)

    def members(self, number: int) -> Line:
        """Wait for a step with so many members from now on."""
        return self.until(lambda line: line.get("members") == number, len(self.lines))

    def says(self, text: str) -> Line:
        """Wait until it has said something."""
        return self.until(lambda line: text in line.get("log", ""))

    def type(self, text: str) -> None:
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def end(self) -> Line:
        """Wait for its end, and return its last line."""
        assert self.process.wait(PATIENCE) == 0
        self._reader.join(PATIENCE)
        return self.lines[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stdout.close()
        self.process.stdin.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "home").mkdir(0o700)
    made = list[Program]()

    def begin(module: str = "tests.workers.elastic_absence", bus: str = "unix:path=/nowhere", **given: Any) -> Program:
        arguments = [json.dumps({"folder": str(tmp_path), **given})]
        home = str(tmp_path / "home")
        made.append(Program(module, *arguments, RINGFORT_HOME=home, DBUS_SYSTEM_BUS_ADDRESS=bus))
        return made[-1]

    try:
        yield begin
    finally:
        for program in made:
            program.kill()


def ends_well(folder: Path, *programs: Program) -> None:
    """Stop the run. All have applied each sample equally often."""
    (folder / "stop").touch()
    ends = [program.end() for program in programs]
    assert len({end["done"] for end in ends}) == 1
    assert [end["seen"] for end in ends] == [[ends[0]["done"] // 3]] * len(ends)


def said(program: Program, text: str) -> bool:
    """Return whether it has said something so far."""
    return any(text in line.get("log", "") for line in program.lines)


def test_a_member_that_is_too_slow_follows_as_a_learner_and_comes_back_when_it_is_faster(
    start: Start, tmp_path: Path
) -> None:
    fast, slow = start(), start(slow=1.5)
    fast.members(2)
    slow.members(2)
    (tmp_path / "busy").touch()
    for program in (fast, slow):
        line = program.says("is too slow and follows as a learner until it is faster: a step with it takes at least")
        assert line["level"] == "WARNING"
    fast.says("(it is too slow for now) left: 1 member from step")
    # It follows: it applies steps that it does not compute.
    slow.until(lambda line: line.get("members") == 0, len(slow.lines))
    (tmp_path / "busy").unlink()
    slow.says("This machine is fast enough again and asks for its place in the run")
    fast.members(2)
    ends_well(tmp_path, fast, slow)


def test_a_member_that_is_aside_is_not_slow(start: Start, tmp_path: Path) -> None:
    other, aside = start(), start(aside=0.4)
    other.members(2)
    aside.members(2)
    (tmp_path / "busy").touch()
    first = aside.members(2)["step"]
    aside.until(lambda line: line.get("step", 0) >= first + 10)
    (tmp_path / "busy").unlink()
    ends_well(tmp_path, other, aside)
    assert not said(other, "slow")


def test_a_newcomer_warms_up_first_and_comes_back_if_it_is_frozen_for_longer_than_the_patience(
    start: Start, tmp_path: Path
) -> None:
    stays, other = start(patience=2), start(patience=2)
    stays.members(2)
    frozen = start(patience=2)  # of two members, the one with the lower id would go on
    stays.members(3)
    seated = frozen.lines.index(frozen.members(3))
    assert sum("practice" in line for line in frozen.lines[:seated]) >= 2
    assert not any("practice" in line for line in frozen.lines[seated:])
    frozen.process.send_signal(signal.SIGSTOP)
    stays.says("left: 2 members from step")
    frozen.process.send_signal(signal.SIGCONT)
    stays.members(3)
    ends_well(tmp_path, stays, other, frozen)


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[str]:
    """The address of a private bus."""
    if shutil.which("dbus-daemon") is None or find_spec("jeepney") is None:
        pytest.skip("needs dbus-daemon and jeepney")
    address = f"unix:path={tmp_path}/bus"
    command = ["dbus-daemon", "--session", "--nofork", "--nopidfile", "--print-address", f"--address={address}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout.readline().startswith(address)
            yield address
        finally:
            daemon.kill()


def test_a_machine_leaves_before_it_sleeps_and_comes_back_when_it_is_awake(
    start: Start, bus: str, tmp_path: Path
) -> None:
    logind = start("tests.workers.fake_logind", bus)
    logind.until(lambda line: "ready" in line)
    stays, sleeper = start(), start(bus=bus)
    logind.until(lambda line: line.get("lock") == ["sleep", "Ringfort", "delay"])
    stays.members(2)
    sleeper.members(2)
    logind.type("impostor")
    logind.until(lambda line: "impostor" in line)
    first = sleeper.members(2)["step"]
    sleeper.until(lambda line: line.get("step", 0) >= first + 10)
    assert not said(sleeper, "goes to sleep")  # anybody may send such a signal; only logind's counts
    logind.type("sleep")
    asleep = logind.until(lambda line: "asleep" in line)
    print(f"left {asleep['seconds']:.2f} s after the signal")
    assert asleep["asleep"]
    assert asleep["seconds"] < 4.0  # logind waits for 5 s
    stays.says("(its machine goes to sleep) left: 1 member from step")
    sleeper.says("This machine goes to sleep: it has left the run")
    steps = len(sleeper.lines)
    stays.members(1)
    assert len(sleeper.lines) == steps
    logind.type("wake")
    stays.members(2)
    logind.until(lambda line: "lock" in line, len(logind.lines) - 1)
    ends_well(tmp_path, stays, sleeper)


def test_the_only_member_continues_where_it_was_when_its_machine_is_awake(
    start: Start, bus: str, tmp_path: Path
) -> None:
    logind = start("tests.workers.fake_logind", bus)
    logind.until(lambda line: "ready" in line)
    alone = start(bus=bus)
    alone.members(1)
    logind.until(lambda line: "lock" in line)
    logind.type("sleep")
    assert logind.until(lambda line: "asleep" in line)["asleep"]
    alone.says("This machine goes to sleep")
    logind.type("wake")
    alone.members(1)
    ends_well(tmp_path, alone)


def test_a_machine_that_sleeps_in_the_middle_of_a_long_micro_batch_leaves_all_the_same(
    start: Start, bus: str, tmp_path: Path
) -> None:
    logind = start("tests.workers.fake_logind", bus)
    logind.until(lambda line: "ready" in line)
    stays, sleeper = start(), start(bus=bus, slow=6.0)
    stays.members(2)
    sleeper.members(2)
    (tmp_path / "busy").touch()
    logind.type("sleep")
    asleep = logind.until(lambda line: "asleep" in line)
    print(f"left {asleep['seconds']:.2f} s after the signal")
    assert asleep["asleep"]
    stays.says("(its machine goes to sleep) left: 1 member from step")
    assert not said(sleeper, "goes to sleep")  # its program is still in the micro-batch
    (tmp_path / "busy").unlink()
    logind.type("wake")
    stays.members(2)
    ends_well(tmp_path, stays, sleeper)


def test_after_the_end_of_a_run_its_checkpoint_is_its_result_and_a_machine_without_one_waits(
    start: Start, tmp_path: Path
) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for program in [start(nodes="2:4", total=30, checkpoint=folder) for folder in folders]:
        assert program.end()["seen"] == [10]
    again = start(nodes="2:4", total=30, checkpoint=folders[0])
    end = again.end()
    assert (end["done"], end["seen"], end["applied"]) == (30, [10], 0)
    again.says("The run has finished with step 30; its final state is from")
    late = start(nodes="2:4", total=30, checkpoint=str(tmp_path / "three"))
    late.says("Waiting: 0 of at least 1 other peers are here")
    again = start(nodes="2:4", total=30, checkpoint=folders[1])
    for program in (again, late):
        end = program.end()
        assert (end["done"], end["seen"], end["applied"]) == (30, [10], 0)
