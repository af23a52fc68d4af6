"""The figures of benchmarks/elastic_compared.py, from lines that are written here by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compared import figures as of
from benchmarks.compared.history import doubled, history, samples
from benchmarks.compared.records import NEVER, Process, Record, read
from benchmarks.compared.storm import timetable
from benchmarks.elastic_compared import cores_of


def process(member: int, *lines: dict[str, Any], died: float = NEVER, ready: float = 0.0) -> Process:
    made = Process(member, started=ready - 1, died=died, ready=ready)
    for line in lines:
        made.take(line)
    return made


def drew(at: float, *drawn: int, number: int = 0) -> dict[str, Any]:
    return {"at": at, "drew": list(drawn), "number": number}


def step(at: float, number: int, *applied: int, group: int = 1, **more: Any) -> dict[str, Any]:
    usual = {"members": 2, "loss": None, "before": number - 1, "weights": number, "leads": False}
    return {"at": at, "step": number, "applied": list(applied), "group": group, **usual, **more}


def test_a_step_counts_once_and_from_the_first_member_that_has_applied_it() -> None:
    one = process(0, step(1.0, 1, 10, 11), step(2.0, 2, 12, 13))
    other = process(1, step(1.1, 1, 10, 11), step(1.9, 2, 12, 13))
    assert [(found.number, found.at) for found in history([one, other])] == [(1, 1.0), (2, 1.9)]


def test_a_step_that_died_with_its_only_member_is_not_in_the_history() -> None:
    dead = process(0, drew(0.5, 10), step(1.0, 1, 10, weights=77), died=1.1)
    alive = process(1, drew(0.5, 20), {"at": 1.5, "gave_up": 1}, drew(2.0, 21), step(2.5, 1, 21, weights=1))
    steps = history([dead, alive])
    assert [found.applied for found in steps] == [(21,)]
    assert doubled([dead, alive]) == 1
    became = samples([dead, alive], steps)
    assert became.sealed == [2.5]
    assert sorted(became.lost) == [0.5, 0.5]


def test_the_history_follows_the_digests_and_not_the_majority() -> None:
    many = [process(member, step(1.0, 1, 5, weights=50)) for member in range(3)]
    few = process(3, step(1.0, 1, 6, weights=60), step(2.0, 2, 7, before=60))
    assert [found.applied for found in history([*many, few])] == [(6,), (7,)]


def test_after_all_have_begun_again_what_was_before_is_lost() -> None:
    before = process(0, drew(0.1, 1), step(1.0, 1, 1), drew(1.1, 2), step(2.0, 2, 2), died=2.5)
    new = process(0, drew(9.0, 3), step(10.0, 1, 3, weights=99, before=0))
    steps = history([before, new])
    assert [found.applied for found in steps] == [(3,)]
    assert samples([before, new], steps).lost == [0.1, 1.1]


def test_a_sample_that_another_member_computes_again_is_not_lost() -> None:
    dead = process(0, drew(1.0, 1, 2), died=1.5)
    other = process(1, drew(1.0, 3, 4), drew(2.0, 1, 2), step(3.0, 1, 1, 2, 3, 4))
    became = samples([dead, other], history([dead, other]))
    assert (len(became.sealed), became.lost, became.twice, became.again) == (4, [], [], [2.0, 2.0])


def test_a_sample_may_come_once_in_each_pass() -> None:
    one = process(0, drew(1.0, 1), step(2.0, 1, 1), drew(3.0, 1, number=1), step(4.0, 2, 1))
    became = samples([one], history([one]))
    assert (became.sealed, became.twice, became.lost) == ([2.0, 4.0], [], [])


def test_members_in_different_passes_may_have_the_same_sample_in_one_step() -> None:
    one = process(0, drew(1.0, 1, number=0), step(2.0, 1, 1, 1))
    other = process(1, drew(1.1, 1, number=1), step(2.0, 1, 1, 1))
    became = samples([one, other], history([one, other]))
    assert (became.sealed, became.twice, became.lost) == ([2.0, 2.0], [], [])


def test_a_sample_that_is_in_one_step_twice_is_applied_twice() -> None:
    one = process(0, drew(1.0, 1), step(2.0, 1, 1, 1))
    became = samples([one], history([one]))
    assert (became.sealed, became.twice) == ([2.0], [2.0])


def test_a_sample_that_comes_back_in_its_pass_is_applied_twice() -> None:
    one = process(0, drew(1.0, 1), step(2.0, 1, 1), drew(3.0, 1), step(4.0, 2, 1))
    became = samples([one], history([one]))
    assert (became.sealed, became.twice) == ([2.0], [4.0])


def test_what_is_still_computed_in_the_end_is_not_lost() -> None:
    one = process(0, drew(1.0, 1), step(2.0, 1, 1), drew(3.0, 2))
    assert samples([one], history([one])).lost == []


def test_a_recovery_ends_with_a_step_of_another_group() -> None:
    one = process(0, step(1.0, 1, 1), step(2.1, 2, 2), step(4.0, 3, 3, group=2))
    steps = history([one])
    assert of.after(steps, 2.0) == 2.0  # the step at 2.1 had been reduced before the kill
    assert of.after(steps, 5.0) == NEVER


def test_gaps_reach_to_the_ends_of_the_phase() -> None:
    steps = history([process(0, step(1.0, 1, 1), step(2.0, 2, 2))])
    assert of.gaps(steps, 0.5, 7.0) == [5.0, 1.0, 0.5]


def test_spread_leaves_out_what_never_came() -> None:
    assert of.spread([1.0, 3.0, NEVER]) == {"median_s": 2.0, "worst_s": 3.0, "count": 2, "never": 1}
    assert of.spread([])["median_s"] is None


def test_the_figures_of_a_storm() -> None:
    killed = process(1, drew(0.1, 2), step(1.0, 1, 1, 2), drew(1.1, 4), died=5.0)
    back = process(1, drew(8.0, 4), step(9.0, 3, 5, 4, group=3), ready=7.0)
    alive = process(
        0, drew(0.1, 1), step(1.0, 1, 1, 2), drew(1.1, 3), {"at": 6.0, "gave_up": 2}, drew(6.1, 6),
        step(6.5, 2, 6, group=2), drew(6.6, 5), step(9.0, 3, 5, 4, group=3),
    )  # fmt: skip
    events = [
        {"event": "kill", "at": 5.0, "had_joined": True},
        {"event": "beginning of phase", "name": "storm", "at": 0.0},
        {"event": "end of phase", "name": "storm", "at": 10.0},
    ]
    found = of.phase_figures(Record([killed, back, alive], events), "storm", rate=1.0)
    assert found is not None
    assert (found["sealed"], found["lost"], found["twice"], found["computed_again"]) == (5, 1, 0, 1)
    assert found["recovery"]["median_s"] == 1.5
    assert found["join"]["median_s"] == 2.0
    assert found["longest_gap_s"] == 5.5
    assert found["present"] == pytest.approx(1.8)  # 10 s, 5 s and 3 s of 10
    assert found["goodput"] == pytest.approx(5 / 18)
    assert of.phase_figures(Record([], events), "calm", 1.0) is None


def test_what_is_lost_after_a_phase_is_not_lost_in_it() -> None:
    one = process(0, drew(0.1, 1), step(1.0, 1, 1), drew(1.1, 2), died=3.0)
    new = process(0, drew(9.0, 3), step(10.0, 1, 3, weights=99, before=0), ready=5.0)
    events = [
        {"event": "beginning of phase", "name": "calm", "at": 0.0},
        {"event": "end of phase", "name": "calm", "at": 2.0},
        {"event": "beginning of phase", "name": "coordinator", "at": 2.5},
        {"event": "coordinator killed", "at": 2.5, "what": "the lighthouse"},
        {"event": "end of phase", "name": "coordinator", "at": 11.0},
    ]
    found = of.all_figures(Record([one, new], events), 1.0)
    assert (found["calm"]["sealed"], found["calm"]["lost"]) == (1, 0)
    assert not found["coordinator"]["weights_survived"]


def test_a_phase_that_goes_on_ends_with_the_last_line() -> None:
    events = [{"event": "beginning of phase", "name": "storm", "at": 0.5}]
    assert Record([process(0, step(1.0, 1, 1), step(2.0, 2, 2))], events).phase("storm") == (0.5, 2.0)
    assert Record([], events).phase("storm") == (0.5, 0.5)


def test_the_death_of_a_lighthouse() -> None:
    one = process(0, step(1.0, 1, 1), step(20.0, 2, 2))
    events = [
        {"event": "coordinator killed", "at": 2.0, "what": "the lighthouse"},
        {"event": "coordinator started", "at": 12.0},
        {"event": "beginning of phase", "name": "coordinator", "at": 2.0},
        {"event": "end of phase", "name": "coordinator", "at": 30.0},
    ]
    found = of.coordinator_figures(Record([one], events))
    assert found is not None
    assert (found["steps_meanwhile"], found["seconds_after_its_return"], found["longest_gap_s"]) == (0, 8.0, 18.0)


def test_a_folder_is_read_and_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    lines = [{"at": 1.0, "ready": True}, drew(2.0, 1), step(3.0, 1, 1)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "lines.jsonl").write_text(text + '{"at": 4.0, "st')
    events = [
        {"event": "start", "at": 0.5, "member": 2, "file": "lines.jsonl"},
        {"event": "kill", "at": 3.5, "file": "lines.jsonl"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    [found] = read(tmp_path).processes
    assert (found.member, found.ready, found.joined, found.died, found.was_killed) == (2, 1.0, 3.0, 3.5, True)


def test_the_timetable_is_the_same_for_all_and_leaves_time_in_the_end() -> None:
    kills = timetable(120.0, 29.0, 4, seed=1)
    assert kills == timetable(120.0, 29.0, 4, seed=1)
    assert [kill.after for kill in kills] == [29.0, 58.0, 87.0]
    assert {kill.member for kill in timetable(1200.0, 29.0, 4, seed=1)} == {0, 1, 2, 3}


def test_systems_at_the_same_time_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    shares = cores_of(3, together=True)
    assert [len(share) for share in shares] == [5, 5, 5]
    assert len({core for share in shares for core in share}) == 15
    assert cores_of(2, together=False) == [list(range(16))] * 2
    assert cores_of(2, together=True, waits=True) == [list(range(16))] * 2
