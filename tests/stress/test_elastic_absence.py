"""What takes long of tests/cluster/test_elastic_absence.py."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.absent_programs import Start, bus, ends_well, logind, start
from tests.helpers.elastic_programs import Program

__all__ = ["bus", "logind", "start"]


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


def test_a_machine_that_sleeps_in_the_middle_of_a_long_micro_batch_leaves_all_the_same(
    start: Start, bus: str, logind: Program, tmp_path: Path
) -> None:
    stays, sleeper = start(), start(bus=bus, slow=6.0)
    stays.members(2)
    sleeper.members(2)
    (tmp_path / "busy").touch()
    logind.type("sleep")
    asleep = logind.until(lambda line: "asleep" in line)
    print(f"left {asleep['seconds']:.2f} s after the signal")
    assert asleep["asleep"]
    stays.says("(its machine goes to sleep) left: 1 member from step")
    assert not sleeper.has_said("goes to sleep")  # its program is still in the micro-batch
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
