"""What the storms of benchmarks/elastic.py compute from what members said."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.elastic import KILL, Report
from benchmarks.elastic_member import SEED, STEPS_PER_PASS, known_weight
from benchmarks.elastic_storms import (
    Fault,
    Gap,
    Steps,
    alive_throughout,
    join_figures,
    seconds_alive,
    seconds_joining,
    target_of,
)
from ringfort.training.elastic.dealing import Data

NEVER = float("inf")


def member(*lines: tuple[float, int], branch: str = "one", ready: float = 0.0, died: float = NEVER) -> Any:
    said = [{"at": at, "step": step, "branch": branch} for at, step in lines]
    joined = said[0]["at"] if said else NEVER
    return SimpleNamespace(lines=said, started=ready, ready=ready, died=died, joined=joined)


def test_the_known_weight_is_what_a_plain_loop_over_the_data_of_a_run_has() -> None:
    batch, weight, cursor = 8, 0, 0
    data = Data(batch * STEPS_PER_PASS, batch, 4, SEED)
    for step in range(1, 2 * STEPS_PER_PASS + 3):
        span = data.span(cursor)
        weight += sum(int((data.part(span, part) % 2).sum()) for part in range(data.parts(span)))
        cursor += span.samples
        assert known_weight(step, batch) == weight
    assert known_weight(STEPS_PER_PASS, batch) == batch * STEPS_PER_PASS // 2  # each sample once per pass


def test_a_weight_that_float32_cannot_count_to_is_an_error() -> None:
    with pytest.raises(OverflowError, match="not exact in float32"):
        known_weight(1 << 20, 64)


def test_a_step_is_sealed_when_the_first_member_says_so_and_gaps_reach_to_both_ends() -> None:
    quick, slow = member((0.9, 1), (2.0, 2), (6.0, 3)), member((1.5, 1), (2.4, 2), (6.1, 3), (11.0, 4))
    steps = Steps.of([quick, slow], 1.0, 10.0)
    assert (steps.first, steps.last, steps.count, steps.again) == (1, 3, 2, 0)
    assert steps.times == [2.0, 6.0]
    assert [gap.seconds for gap in steps.gaps] == [4.0, 4.0, 1.0]


def test_steps_of_a_new_branch_that_were_sealed_before_count_once_and_are_told() -> None:
    before = member((1.0, 1), (2.0, 2), (3.0, 3))
    after = member((6.0, 2), (7.0, 3), (8.0, 4), branch="two")
    steps = Steps.of([before, after], 0.5, 9.0)
    assert (steps.count, steps.again) == (4, 2)
    assert steps.gaps[0] == Gap(3.0, 6.0)  # a step that is done again is a sign of life


def test_members_count_from_their_imports_to_their_death() -> None:
    members = [member((1.0, 1)), member((6.0, 2), ready=4.0), member(ready=8.0), member((2.0, 1), died=3.0)]
    assert seconds_alive(members, 1.0, 10.0) == 9.0 + 6.0 + 2.0 + 2.0
    assert seconds_joining(members, 1.0, 10.0) == 0.0 + 2.0 + 2.0 + 1.0
    found = join_figures([*members, member(ready=5.0, died=6.0)], 1.0, 10.0)
    assert (found["starts"], found["joins"], found["killed_before_they_joined"]) == (3, 1, 1)
    assert (found["join_median_s"], found["join_worst_s"]) == (2.0, 2.0)


def test_a_gap_names_what_happened_around_it() -> None:
    faults = [Fault("kill", 0, 1.0), Fault("freeze", 1, 7.5, leads=True, seconds=4.0), Fault("start", 0, 12.0)]
    told = Gap(10.0, 14.0).describe(5.0, faults)
    assert told == "4.00 s at 5.0 s (freeze of 1, the leader for 4.0 s at -2.50 s; start of 0 at +2.00 s)"
    assert Gap(30.0, 31.0).describe(5.0, faults) == "1.00 s at 25.0 s (nothing happened)"


def test_the_target_of_mixed_faults_is_what_their_allowed_outages_leave() -> None:
    faults = [
        Fault("kill", 0, 0.0),
        Fault("kill", 0, 0.0, leads=True),
        Fault("freeze", 0, 0.0, seconds=1.5),
        Fault("cut", 0, 0.0, seconds=5.0),
        Fault("start", 0, 0.0),
    ]
    target = target_of(["kill", "freeze", "cut"], 29.0, faults, 100.0, patience=2.0)
    assert target.goodput == pytest.approx(1 - (0.5 + 2.0 + 1.5 + 3.0) / 100)
    assert target.gap == 5.0


def test_the_targets_of_kills_are_those_that_were_decided() -> None:
    assert target_of(["kill"], 29.0, [], 100.0, 2.0)[:2] == (0.977, 3.0)
    assert target_of(["kill"], 5.0, [], 100.0, 2.0).goodput == 0.85


def test_a_gap_counts_only_while_somebody_was_alive_throughout() -> None:
    gap = Gap(10.0, 20.0)
    assert alive_throughout([member(died=15.0), member(ready=14.0)], gap)
    assert not alive_throughout([member(died=13.0), member(ready=14.0)], gap)
    assert not alive_throughout([member(ready=11.0)], gap)


def test_times_are_reported_in_words_and_as_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(members=4, mib=16.0, state_mb=84.0, patience=2.0, batch=32)
    report = Report(str(tmp_path / "figures.json"), given)
    report.times("kill", "SIGKILL", [number / 100 for number in range(1, 101)])
    assert capsys.readouterr().out == "SIGKILL: median 0.51 s, 95% 0.95 s, worst 1.00 s of 100\n"
    [line] = (tmp_path / "figures.json").read_text().splitlines()
    found = json.loads(line)
    assert (found["figure"], found["p95_s"], found["worst_s"], found["setting"]["batch"]) == ("kill", 0.95, 1.0, 32)


def test_a_figure_that_misses_its_target_is_kept_for_strict_and_one_without_a_target_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argparse.Namespace(members=4, mib=16.0, state_mb=84.0, patience=2.0, batch=32)
    report = Report(str(tmp_path / "figures.json"), given)
    report.times("return", "back", [9.0])
    report.times("kill", "SIGKILL", [0.4, 0.4, 1.4], **KILL)
    report.times("slow kill", "SIGKILL", [0.4, 0.4, 1.6], **KILL)
    report.times("slow kills", "SIGKILL", [0.6, 0.6, 0.6], **KILL)
    report.times("cut", "a cut", [0.1], worst_to=3.0, met=False, lost=1)
    report.figure("join", "a joiner", met=True, seconds=1.0)
    report.figure("storm", "a storm", met=False, goodput=0.5)
    assert report.missed == ["slow kill", "slow kills", "cut", "storm"]
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "back: median 9.00 s, 95% 9.00 s, worst 9.00 s of 1"
    assert told[1].endswith("of 3 (target median 0.5 s, worst 1.5 s: met)")
    assert told[4].endswith("of 1 (target worst 3 s: NOT met)")
    lines = [json.loads(line) for line in (tmp_path / "figures.json").read_text().splitlines()]
    assert [line.get("met") for line in lines] == [None, True, False, False, False, True, False]
    assert lines[4]["lost"] == 1
