"""What happens to programs in elastic runs: bugs, threads, forks, killed control processes, clocks, power cuts. The
gradients are whole numbers, so the state in the end must be that of a plain loop, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.elastic_programs import Start, check_end, programs

PROMPT = 1.5
"""Seconds within which the others continue if they are told of a death; silence would take `PATIENT`."""
PATIENT = 20.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs("tests.workers.elastic_cases", tmp_path / "home") as begin:
        yield begin


def test_bugs_other_threads_and_clocks_that_jump_harm_nobody_else(start: Start, tmp_path: Path) -> None:
    hurry, has_meddled = tmp_path / "hurry", tmp_path / "has meddled"
    common = {"total": 160, "hurry": str(hurry)}
    meddler = start(**common, at=4, in_thread=True, do={"jump": {"seconds": 3600}, "meddle": {}})
    slow = start(**common, at=4, do={"jump": {"seconds": -3600}, "wait": {"file": str(has_meddled)}})
    meddled = meddler.until(lambda line: "meddled" in line)["meddled"]
    assert "another thread is in the loop of this run" in meddled
    has_meddled.touch()
    failing = start(**common, own=9, do={"fail": {}})  # a step has eight micro-batches: not in its first
    assert failing.end()["failed"] == "ZeroDivisionError"
    hurry.touch()
    for program in (meddler, slow):
        end = check_end(program, 160)
        assert "a run has one loop" in end["late"][0]
        assert "belongs into `for part in step`" in end["late"][1]
        assert "it is over" in end["late"][2]
        assert any("(its program has failed with ZeroDivisionError) left" in line for line in end["events"])


def test_whichever_process_of_a_member_is_killed_the_others_continue_at_once_despite_its_forks(
    start: Start, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    common = {"total": 200, "hurry": str(hurry), "nodes": "1:3", "patience": PATIENT}
    forking, stays, other = [start(**common, at=3, do={"fork": {}} if number == 0 else {}) for number in range(3)]
    child = forking.until(lambda line: "child" in line)
    try:
        assert child["results"] == [1, 2]
        assert "This process was forked from the one that is in the run" in child["why"]
        at = stays.step(1, members=3)["step"]
        other.control.kill()
        end = other.end()
        assert (end["failed"], other.process.returncode) == ("ControlLostError", 3)
        assert "was killed by SIGKILL" in end["why"]
        stays.until(lambda line: line.get("step", 0) > at and line["members"] == 2)
        before = stays.lines[-1]
        forking.process.kill()
        after = stays.until(lambda line: line.get("step", 0) > before["step"] and line["members"] == 1)
        print(f"continues {after['at'] - before['at']:.2f} s after the step before the kill")
        assert after["at"] - before["at"] < PROMPT
    finally:
        os.kill(child["child"], signal.SIGKILL)
    hurry.touch()
    check_end(stays, 200)


def test_after_a_power_cut_in_the_middle_of_a_checkpoint_the_run_continues_with_the_one_before(
    start: Start, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    folders = [tmp_path / "one", tmp_path / "two"]
    common = {"total": 60, "hurry": str(hurry), "every": 4}
    members = [start(**common, checkpoint=str(folder), slow_disk=0.3) for folder in folders]
    members[0].until(lambda line: any(_written(folder) for folder in folders) and list(folders[0].glob("*.new")))
    for process in (*[member.control for member in members], *[member.process for member in members]):
        process.kill()  # the control processes first, so that nobody can say a word
    for member in members:
        member.kill()
    newest = max((file for folder in folders for file in _written(folder)), key=lambda file: file.name)
    unfinished = next(folders[0].glob("*.new"))
    lost = unfinished.with_name("step-000000050" + unfinished.name[14:]).with_suffix(".ringfort")
    lost.write_bytes(newest.read_bytes()[:100])  # its name was written, its content was not
    hurry.touch()
    members = [start(**common, checkpoint=str(folder)) for folder in folders]
    for member in members:
        check_end(member, 60)
    lines = [line.get("log", "") for member in members for line in member.lines]
    assert any(f"The run continues with {newest}" in line for line in lines)
    assert any(str(lost) in line and "damaged or cut short. The one before it is tried" in line for line in lines)


def _written(folder: Path) -> list[Path]:
    return list(folder.glob("*.ringfort"))
