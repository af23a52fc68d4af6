"""Members of an elastic run that are away for a while: slow, asleep, frozen; and machines that come after its end."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.helpers.absent_programs import Start, bus, ends_well, logind, start
from tests.helpers.elastic_programs import Program

__all__ = ["bus", "logind", "start"]


def test_a_member_that_is_aside_is_not_slow(start: Start, tmp_path: Path) -> None:
    other, aside = start(), start(aside=0.4)
    other.members(2)
    aside.members(2)
    (tmp_path / "busy").touch()
    first = aside.members(2)["step"]
    aside.until(lambda line: line.get("step", 0) >= first + 10)
    (tmp_path / "busy").unlink()
    ends_well(tmp_path, other, aside)
    assert not other.has_said("slow")


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


def test_a_machine_leaves_before_it_sleeps_and_comes_back_when_it_is_awake(
    start: Start, bus: str, logind: Program, tmp_path: Path
) -> None:
    stays, sleeper = start(), start(bus=bus)
    logind.until(lambda line: line.get("lock") == ["sleep", "Ringfort", "delay"])
    stays.members(2)
    sleeper.members(2)
    logind.type("impostor")
    logind.until(lambda line: "impostor" in line)
    first = sleeper.members(2)["step"]
    sleeper.until(lambda line: line.get("step", 0) >= first + 10)
    assert not sleeper.has_said("goes to sleep")  # anybody may send such a signal; only logind's counts
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
    start: Start, bus: str, logind: Program, tmp_path: Path
) -> None:
    alone = start(bus=bus)
    alone.members(1)
    logind.until(lambda line: "lock" in line)
    logind.type("sleep")
    assert logind.until(lambda line: "asleep" in line)["asleep"]
    alone.says("This machine goes to sleep")
    logind.type("wake")
    alone.members(1)
    ends_well(tmp_path, alone)
