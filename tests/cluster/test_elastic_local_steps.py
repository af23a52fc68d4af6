"""Elastic runs of arrays with local steps, as processes on one machine: members die, join, and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.elastic_programs import Start, programs
from tests.workers.elastic_rounds import SAMPLES


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs("tests.workers.elastic_rounds", tmp_path / "home") as begin:
        yield begin


@pytest.mark.parametrize("options", [{"codec": "int4"}, {"sync": "auto", "every": None}], ids=["local", "auto"])
def test_rounds_with_a_kill_and_a_join_end_with_the_same_weights_everywhere(
    start: Start, tmp_path: Path, options: dict[str, Any]
) -> None:
    hurry = tmp_path / "hurry"
    given = {"total": 60, "hurry": str(hurry), "outer_rate": 0.8, "outer_momentum": 0.3, "grow_at": 12, **options}
    first, second = [start(**given) for _ in range(2)]
    first.step(4, members=2)
    second.until(lambda line: line.get("computing", 0) > 4)  # in the middle of a round
    second.kill()
    third = start(**given)
    third.step(6, members=2)
    hurry.touch()
    ends = [program.end() for program in (first, third)]
    assert [program.process.returncode for program in (first, third)] == [0, 0]
    assert ends[0]["w"] == ends[1]["w"]
    assert ends[0]["half"] == ends[1]["half"]
    assert (ends[0]["done"], ends[0]["rounds"], ends[1]["rounds"]) == (60, 60, 60)
    assert ends[0]["error"] < 0.2
    seen: dict[int, tuple[str, int]] = {}
    for program in (first, second, third):
        for line in program.lines:
            if "step" in line:  # every member that has sealed a round has the same weights, and the same samples
                assert seen.setdefault(line["step"], (line["w"], line["samples"])) == (line["w"], line["samples"])
    assert seen.keys() == set(range(1, 61))
    if given.get("sync") != "auto":
        assert {size for _, size in seen.values()} == {40}
    cursor = sum(size for _, size in seen.values())
    assert cursor >= 60 * 5
    assert SAMPLES % 40 == 0


def test_a_run_with_planned_rounds_continues_with_its_checkpoint(start: Start, tmp_path: Path) -> None:
    given: dict[str, Any] = {"nodes": "2", "sync": "auto", "every": None}
    folders = [str(tmp_path / f"disk-{number}") for number in range(2)]
    before = [start(**given, total=400, pause=0.004, checkpoint=folder) for folder in folders]
    sizes = {line["step"]: line["samples"] for line in (before[0].step(number) for number in (1, 30))}
    assert len(set(sizes.values())) == 2  # the plan is not the first one any more
    for program in before:
        program.kill()
    after = [start(**given, total=60, checkpoint=folder) for folder in folders]
    line = after[0].until(lambda line: "step" in line)
    assert line["step"] > 20
    assert line["samples"] != sizes[1]
    ends = [program.end() for program in after]
    assert ends[0]["w"] == ends[1]["w"]
    assert ends[0]["done"] == 60


def test_a_member_with_other_rounds_is_told_what_differs(start: Start) -> None:
    first = start(nodes="1:4", total=10**6)
    first.step(2)
    other = start(nodes="1:4", total=10**6, codec="sparse")
    end = other.end()
    assert end["failed"] == "InvalidArgumentError"
    assert "codec sparse" in end["why"]
    assert "codec int8" in end["why"]
