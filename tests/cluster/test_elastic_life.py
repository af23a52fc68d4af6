"""Members of an elastic run that leave, join, finish and fail, as processes on one machine."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringfort.identity.namespace import NetworkNamespace
from tests.helpers.elastic_programs import PATIENCE, Line, Program, Start, programs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with programs("tests.workers.elastic_life", tmp_path / "home") as begin:
        yield begin


def test_a_member_that_is_asked_to_end_leaves_after_its_step_and_nothing_is_computed_again(
    start: Start, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    leaving, *others = [start(total=60, hurry=str(hurry)) for _ in range(3)]
    begun = leaving.until(lambda line: line.get("computing", 0) >= 5 and line["members"] == 3)["computing"]
    leaving.process.send_signal(signal.SIGTERM)
    hurry.touch()
    leaving.end()
    assert leaving.process.returncode == 143
    last = leaving.last_step
    assert last >= begun
    ends = [other.end() for other in others]
    assert [other.process.returncode for other in others] == [0, 0]
    for end in ends:
        assert (end["done"], end["seen"]) == (60, [20])
        # A member that came later than the first two has begun with a copy of the state, and applied what came since.
        assert (end["applied"], end["copied"] or [0]) == (60 - end["began"], [end["began"]])
        assert any(f"(it leaves) left: 2 members from step {last + 1}" in line for line in end["events"])
    own = max(line.get("computed", 0) for line in leaving.lines)
    assert own > 0
    # Eight micro-batches a step, and two with which a member that came later has warmed up.
    late = sum(program.has_said("Copied the state of step") for program in (leaving, *others))
    assert own + sum(end["computed"] for end in ends) == 60 * 8 + 2 * late


def test_a_batch_per_member_grows_and_shrinks_with_the_members_and_counts_each_sample_once(
    start: Start, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    given: dict[str, Any] = {"total": 200, "batch_per_member": 10, "hurry": str(hurry)}

    def opened(program: Program, samples: int, since: int = 0) -> int:
        """Wait for a step with so many samples, of those after step `since`. Return its number."""
        return program.until(lambda line: line.get("step", 0) > since and line["samples"] == samples)["step"]

    first, second = [start(**given) for _ in range(2)]
    both = opened(first, 20)
    third = start(**given)
    three = opened(first, 30, both)
    assert opened(third, 30, both)
    second.process.kill()
    assert opened(first, 20, three)
    hurry.touch()
    ends = [program.end() for program in (first, third)]
    sizes: dict[int, int] = {}
    for program in (first, second, third):
        for line in program.lines:
            if "step" in line:
                assert sizes.setdefault(line["step"], line["samples"]) == line["samples"]
    assert sizes.keys() == set(range(1, 201))
    cursor = 0
    for number in sorted(sizes):
        cursor += sizes[number]
        assert sizes[number] in (20, 30) or cursor % 96 == 0  # the end of a pass
    passes, rest = divmod(cursor, 96)
    for end in ends:
        assert (end["done"], end["sum"]) == (200, cursor)
        assert end["seen"] == ([passes, passes + 1] if rest else [passes])


def test_a_run_below_its_minimum_waits_and_a_late_joiner_of_a_finished_one_gets_the_state(start: Start) -> None:
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


def test_what_is_not_finite_ends_the_run_at_all_members_or_is_skipped_by_all(start: Start) -> None:
    raising = [start(name="raises", total=30, nan_at=3 * (not number)) for number in range(2)]
    losing = [start(name="loses", total=30, nan_loss_at=3 * (not number)) for number in range(2)]
    skipping = [start(name="skips", total=30, nan_at=3 * (not number), nonfinite="skip") for number in range(2)]
    gradients = r"The gradients of step 3 contain infinite or NaN elements \(([^(),]+)\);"
    for pair, words in ((raising, gradients), (losing, r"The loss of step 3 is infinite or NaN \(([^(),]+)\);")):
        guilty = pair[0].step(1)["peer"]
        for program in pair:
            end = program.end()
            assert (program.process.returncode, end["failed"]) == (3, "NonFiniteStepError")
            named = re.match(words, end["why"])
            assert named, end["why"]
            assert guilty.startswith(named[1].rpartition("/")[2])
    for program in skipping:
        end = program.end()
        assert (end["done"], end["skipped"], sum(end["seen"]) > 0) == (30, 1, True)


def test_a_program_with_another_batch_or_choice_for_nans_is_told_what_differs(start: Start) -> None:
    runs = [start(total=2000) for _ in range(2)]
    runs[0].step(2)
    others = {
        "batch is 16 here and 32 there": start(total=2000, batch=16, nodes="1:4", timeout=2.0),
        "nonfinite is skip here and error there": start(total=2000, nonfinite="skip", nodes="1:4", timeout=2.0),
    }
    for words, other in others.items():
        end = other.end()
        assert end["failed"] == "InvalidArgumentError"
        assert words in end["why"]
        begun = next(line["at"] for line in other.lines if "begun" in line)
        told = next(line["at"] for line in other.lines if f"is another one: {words}" in line.get("log", ""))
        print(f"told after {told - begun:.2f} s")
    assert all(run.process.poll() is None for run in runs)


def test_a_run_leaves_the_checkpoints_of_another_one_alone_and_continues_with_its_own(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "run1"

    def trained(**settings: Any) -> Line:
        program = start(nodes="1:1", pause=0.0, checkpoint=str(folder), **settings)
        end = program.end()
        assert (program.process.returncode, end.get("done")) == (0, settings["total"]), program.lines[-3:]
        return end

    trained(total=20)
    own = {path.name for path in folder.glob("*.ringfort")}
    assert any("step-000000020-" in name for name in own)
    for batch in (16, 24):  # two, because one file of another branch stays in any case
        trained(total=60, batch=batch)
    assert own < {path.name for path in folder.glob("*.ringfort")}
    assert trained(total=30)["applied"] == 10
    assert trained(total=40, nonfinite="skip")["applied"] == 10  # how one gets past a NaN


def test_machines_that_join_and_runs_that_resume_get_what_was_created_in_the_loop(start: Start, tmp_path: Path) -> None:
    """As the momentum of an optimizer in its first step: a program that has just started does not have it."""
    folder, hurry = str(tmp_path / "run1"), tmp_path / "hurry"
    first = start(total=40, late_at=5, nodes="1:2", checkpoint=folder, hurry=str(hurry))
    first.step(6)
    joins = start(total=40, late_at=5, nodes="1:2", hurry=str(hurry))
    joins.step(7, members=2)
    hurry.touch()
    for program in (first, joins):
        end = program.end()
        assert (program.process.returncode, end["done"], end["late"]) == (0, 40, [36, 36, 36]), end
    assert joins.lines[-1]["began"] > 5
    ended = start(total=40, late_at=5, nodes="1:2", checkpoint=folder).end()
    assert (ended["done"], ended["applied"], ended["late"]) == (40, 0, [36, 36, 36])
    # The second has no checkpoint: it gets the state of the first one's when they found the branch.
    resumed = [start(total=60, late_at=5, nodes="2:2", checkpoint=where) for where in (folder, str(tmp_path / "run2"))]
    for program in resumed:
        end = program.end()
        assert (program.process.returncode, end["done"], end["late"], end["applied"]) == (0, 60, [56, 56, 56], 20), end


def test_a_checkpoint_folder_that_is_a_file_is_refused_before_the_first_step(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = start(nodes="1:1", checkpoint=str(tmp_path / "file"))
    end = program.end()
    assert (program.process.returncode, end["failed"]) == (3, "InvalidArgumentError")
    assert end["why"] == f"checkpoint='{tmp_path}/file': cannot be used: file exists; choose a folder, not a file"
    assert program.last_step == 0


def test_half_of_a_run_waits_for_the_rest_even_if_all_lost_power_a_year_ago(start: Start, tmp_path: Path) -> None:
    key = NetworkNamespace.generate("home").join_code()
    homes = [tmp_path / name for name in ("study", "shed")]

    def begin(home: Path, pause: float) -> Program:
        home.mkdir(0o700, exist_ok=True)
        variables = {"RINGFORT_HOME": str(home), "RINGFORT_KEY": key}
        return start(variables, total=42, nodes="1:2", pause=pause, checkpoint=str(home / "saved"))

    members = [begin(home, pause=0.03) for home in homes]
    for member in members:
        member.step(12, members=2)
    controls = [member.control for member in members]
    for member, control in zip(members, controls, strict=True):
        member.kill()
        control.wait(PATIENCE)  # it holds the lock of its votes
    a_year_ago = time.time() - 365 * 24 * 3600
    for home in homes:
        for path in (home / "votes").iterdir():
            os.utime(path, (a_year_ago, a_year_ago))
    half = begin(homes[0], pause=0.0)
    half.until(lambda line: "was in a group with" in line.get("log", ""))
    assert half.last_step == 0
    for program in (half, begin(homes[1], pause=0.0)):
        end = program.end()
        assert (program.process.returncode, end["done"], end["seen"]) == (0, 42, [14])


def test_a_machine_beyond_the_most_is_told_so_and_takes_the_place_of_one_that_leaves(start: Start) -> None:
    leaving, stays = [start(total=4000, nodes="1:2") for _ in range(2)]
    for member in (leaving, stays):
        member.step(2, members=2)
    third = start(total=4000, nodes="1:2")
    third.says("Waiting: the run has 2 members, as many as it may have (nodes). This machine takes the next place")
    leaving.process.send_signal(signal.SIGTERM)
    third.step(3, members=2)
    assert third.until(lambda line: "computed" in line and line["computed"] > 0)
    assert stays.process.poll() is None
