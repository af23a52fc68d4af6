"""Steps as a trace in Chrome's format: the rules of the format, and what is in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.telemetry.chrome_trace import PHASES, TraceRecorder
from ringfort.telemetry.records import Event
from ringfort.telemetry.view import Curve, RankView, RunView, ShownStep, Split
from tests.helpers.telemetry import Rank, SimulatedRun

COMMON = {"ph": str, "name": str, "pid": int, "tid": int}
OWN: Mapping[str, dict[str, type]] = {
    "M": {"args": dict},
    "X": {"cat": str, "ts": float, "dur": float, "args": dict},
    "i": {"cat": str, "ts": float, "s": str},
    "C": {"ts": float, "args": dict},
}
"""The fields of each kind of event: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""


def checked(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a trace that follows the rules: JSON without NaN, the fields of each kind, names for processes and
    threads, slices of one thread that lie in each other or beside each other."""
    found = json.loads(json.dumps(document, allow_nan=False))
    assert found.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = found["traceEvents"]
    named: dict[str, set[Any]] = defaultdict(set)
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        fields = {**COMMON, **OWN[event["ph"]]}
        assert event.keys() == fields.keys(), event
        for name, kind in fields.items():
            assert isinstance(event[name], (int, float) if kind is float else kind), event
        where = event["pid"], event["tid"]
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                named[event["name"]].add(event["pid"] if event["name"].startswith("process") else where)
            case "X":
                start = round(event["ts"] * 1000)
                slices[where].append((start, start + round(event["dur"] * 1000)))
                assert event["dur"] > 0
            case "i":
                assert event["s"] in ("g", "p", "t")
            case _:
                assert all(isinstance(value, (int, float)) for value in event["args"].values())
    for where, spans in slices.items():
        assert where in named["thread_name"]
        assert where[0] in named["process_name"]
        inside: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while inside and inside[-1] <= start:
                inside.pop()
            assert not inside or end <= inside[-1], "slices overlap"
            inside.append(end)
    return events


def recorded(run: SimulatedRun, steps: int, seconds: float) -> TraceRecorder:
    recorder = TraceRecorder(steps)
    recorder.take(run.advance(2.0))
    for _ in range(round(seconds)):
        recorder.take(run.advance(1.0))
    return recorder


def test_each_machine_is_a_process_each_rank_a_thread_and_each_step_a_slice_with_its_phases() -> None:
    ranks = [
        Rank("study", 0.1, data=0.02, host="a"),
        Rank("study", 0.15, host="a"),
        Rank("shed", 0.2, codec=0.01, clock=500.0),
    ]
    run = SimulatedRun(ranks, wire=0.03)
    recorder = recorded(run, 5, 3.0)
    assert recorder.is_complete
    assert not recorder.has_gaps
    assert recorder.summary() == "5 steps of 3 ranks of 'train.py'"
    events = checked(recorder.document())
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if "name" in event["args"]
    }
    assert names == {
        ("process_name", 1, 0): "study",
        ("process_name", 2, 0): "shed",
        ("thread_name", 1, 1): "rank 0",
        ("thread_name", 1, 2): "rank 1",
        ("thread_name", 2, 3): "rank 2",
    }
    steps = [event for event in events if event.get("cat") == "step"]
    assert {(event["tid"], event["args"]["step"]) for event in steps} == {
        (tid, number) for tid in (1, 2, 3) for number in range(steps[0]["args"]["step"], steps[0]["args"]["step"] + 5)
    }
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "phase":
            seconds[event["tid"], event["name"]] += event["dur"] / 1e6
    expected = {
        (1, "data"): 0.1,
        (1, "compute"): 0.5,
        (1, "waiting"): 0.45,
        (1, "wire"): 0.15,
        (2, "compute"): 0.75,
        (2, "waiting"): 0.3,
        (2, "wire"): 0.15,
        (3, "compute"): 1.0,
        (3, "codec"): 0.05,
        (3, "wire"): 0.15,
    }
    assert seconds == pytest.approx(expected, abs=1e-4)
    # The steps of machines whose clocks differ begin together.
    starts = {(event["args"]["step"], round(event["ts"] / 1e4)) for event in steps}
    assert len(starts) == 5


def test_events_and_logged_values_are_in_it_at_their_time() -> None:
    run = SimulatedRun([Rank("study"), Rank("shed")])
    recorder = TraceRecorder(16)
    recorder.take(run.advance(2.0))
    recorder.take(run.advance(1.0))
    run.history.take(run.report(run.ranks[1], (), [Event(run.now, "lost", "rank 7 is lost")]))
    run.history.take(run.report(run.ranks[0], (), [Event(run.now - 100, "old", "long ago")]))
    recorder.take(run.advance(3.0))
    events = checked(recorder.document())
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["cat"], instant["tid"], instant["s"]) == ("rank 7 is lost", "lost", 2, "t")
    losses = [event["args"]["value"] for event in events if event["ph"] == "C" and event["name"] == "loss"]
    assert losses
    assert losses == sorted(losses, reverse=True)


def test_only_further_steps_count_and_each_rank_that_makes_steps_is_waited_for() -> None:
    run = SimulatedRun([Rank("study"), Rank("shed"), Rank("attic")])
    recorder = TraceRecorder(12)
    recorder.take(run.advance(9.0))
    assert not recorder.has_steps
    recorder.take(run.advance(1.0))
    assert not recorder.is_complete
    assert recorder.missing() == [
        f"rank {rank} on {name} (training): 8 of 12 steps" for rank, name in enumerate(("study", "shed", "attic"))
    ]
    run.ranks[2].is_alive = False
    recorder.take(run.advance(2.0))
    assert recorder.is_complete
    assert recorder.seen.keys() == {0, 1}
    checked(recorder.document())


def test_a_rank_of_the_run_that_was_never_seen_is_missing() -> None:
    recorder = TraceRecorder(1)
    ranks = (RankView("a:1", 0, "study"),)
    for number in (1, 2):
        timeline = {0: (ShownStep(number, float(number), Split(1.0)),)}
        recorder.take(RunView(0.0, "mine", ranks=ranks, timeline=timeline, world_size=2))
    assert not recorder.is_complete
    assert recorder.missing() == ["rank 1, which was not seen: 0 of 1 steps"]
    assert recorder.summary() == "1 step of 1 rank of 'mine'"


def test_steps_that_are_too_many_to_be_reported_leave_gaps() -> None:
    recorder, ranks = TraceRecorder(3), (RankView("a:1", 0, "study"),)
    for end in (8, 16, 24, 32):
        timeline = {0: tuple(ShownStep(number, number / 100, Split(0.01)) for number in range(8, end + 1, 8))}
        recorder.take(RunView(0.0, "mine", ranks=ranks, timeline=timeline))
    assert recorder.is_complete
    assert recorder.has_gaps
    assert len([event for event in checked(recorder.document()) if event.get("cat") == "step"]) == 3


@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.lists(st.floats(0, 10), min_size=len(PHASES), max_size=len(PHASES))),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=5),
)
@settings(max_examples=100)
def test_any_steps_make_a_trace_that_follows_the_rules(
    steps: list[tuple[float, list[float]]], values: list[float | None]
) -> None:
    shown = tuple(ShownStep(number, start, Split(*parts)) for number, (start, parts) in enumerate(steps, 1))
    ranks = (RankView("a:1", 3, "study"), RankView("b:1", -1, "shed", state="learner"))
    curve = Curve("loss", [start for start, _ in steps][: len(values)], [], values[: len(steps)])
    recorder = TraceRecorder(20)
    recorder.take(RunView(0.0, ranks=ranks, timeline={3: (ShownStep(0, 0.0, Split()),)}))
    recorder.take(RunView(0.0, ranks=ranks, timeline={3: shown, 4: ()}, curves=(curve,)))
    checked(recorder.document())


def test_a_trace_of_nothing_follows_the_rules_too() -> None:
    recorder = TraceRecorder(1)
    recorder.take(RunView(5.0))
    assert checked(recorder.document()) == []
    assert not recorder.is_complete
