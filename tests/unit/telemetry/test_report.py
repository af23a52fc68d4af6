"""Reports: what a rank tells in a second, in 2 KB."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.errors import ProtocolError
from ringfort.telemetry.records import MAX_TEXT, Event, Header, Sent, Step, Values
from ringfort.telemetry.report import LOCAL_BYTES, MAX_EVENTS, MAX_REPORT_BYTES, ROW, Report, Reporter, decode, encode
from ringfort.telemetry.trace import cut_text
from ringfort.telemetry.trace_file import TraceReader, TraceWriter


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    writer = TraceWriter(tmp_path / "1.trace")
    writer.describe(Header(1, 0.0, rank=0, world_size=2, program="p" * 64, run="r" * 64))
    return writer


@pytest.fixture
def reporter(writer: TraceWriter) -> Reporter:
    return Reporter(TraceReader(writer.path), "h" * 64, "n" * 64, clock=lambda: 5.0)


def test_a_report_has_all_steps_if_there_is_room(writer: TraceWriter, reporter: Reporter) -> None:
    steps = tuple(Step(n, n / 10, 0.1, 0.01, 0.02, 0.03, 0.004, 64) for n in range(1, 11))
    for step in steps:
        writer.write(step)
    writer.write(Values(10, 1.0, {"loss": 0.5}))
    writer.set_step(10)
    report = decode(encode(reporter.report({"cpu": 0.5})))
    assert (report.steps, report.every, report.step) == (steps, 1, 10)
    assert (report.sums.steps, report.sums.samples) == (10, 640)
    assert report.sums.exchange == pytest.approx(0.2)
    assert report.values[0].values == {"loss": 0.5}
    assert report.vitals == {"cpu": 0.5}
    assert reporter.report().sums.steps == 0


def test_many_steps_are_thinned_by_their_numbers_and_still_added_up(writer: TraceWriter, reporter: Reporter) -> None:
    for number in range(1000):
        writer.write(Step(number, 1.0, 0.001, exchange=0.0005, samples=1))
        writer.write(Values(number, 1.0, {"loss": 1.0 / (1 + number)}))
    report = reporter.report(dict.fromkeys(("cpu", "memory", "gpu", "temperature"), 0.5))
    assert len(encode(report)) <= MAX_REPORT_BYTES
    assert report.sums.steps == 1000
    assert report.every > 1
    assert report.steps
    assert {step.number // ROW % report.every for step in report.steps} == {0}
    assert len(report.steps) >= ROW  # of one row, without gaps
    assert report.values[-1].step == 999  # the newest is never thinned out


def test_ranks_with_different_room_leave_steps_that_all_of_them_sent(tmp_path: Path) -> None:
    numbers: list[set[int]] = []
    for rank, names in enumerate(("p", "p" * 60)):
        writer = TraceWriter(tmp_path / f"{rank}.trace")
        writer.describe(Header(1, 0.0, rank=rank, world_size=2, program=names, run=names))
        reporter = Reporter(TraceReader(writer.path), names, names, clock=lambda: 5.0)
        sent: set[int] = set()
        for number in range(3000):
            writer.write(Step(number, 1.0, 0.01, exchange=0.005, samples=1))
            if number % 100 == 99 - 30 * rank:
                writer.write(Event(1.0, "text", "x" * 100 * rank))
                sent |= {step.number for step in reporter.report({"cpu": 0.5}).steps}
        numbers.append(sent)
    common = sorted(numbers[0] & numbers[1])
    assert len(common) > 300
    rows = [number for number in common if number + 1 in numbers[0] & numbers[1]]
    assert len(rows) > 0.8 * len(common)  # most follow each other


def test_reports_of_this_machine_have_all_steps(writer: TraceWriter) -> None:
    reporter = Reporter(TraceReader(writer.path), clock=lambda: 5.0, limit=LOCAL_BYTES)
    for number in range(200):
        writer.write(Step(number, 1.0, 0.005, exchange=0.0005, samples=1))
    report = reporter.report()
    assert (len(report.steps), report.every) == (200, 1)


def test_a_flood_of_events_is_counted(writer: TraceWriter, reporter: Reporter) -> None:
    for number in range(500):
        writer.write(Event(1.0, "flood", cut_text(f"{number} " + "ä" * 200)))
    report = reporter.report()
    assert len(encode(report)) <= MAX_REPORT_BYTES
    assert len(report.events) + report.dropped == 500
    assert report.events[-1].text.startswith("499 ")
    assert len(report.events) <= MAX_EVENTS
    assert all(len(event.text) <= MAX_TEXT for event in report.events)


def test_sent_bytes_become_rates(writer: TraceWriter, reporter: Reporter) -> None:
    writer.write(Sent(10.0, {1: 1000, 2: 0}, 500))
    assert reporter.report().sent == {}
    writer.write(Sent(12.0, {1: 3000}, 500))
    writer.write(Sent(12.0, {2: 800}, 1500))
    report = reporter.report()
    assert (report.sent, report.received) == ({1: 1000.0, 2: 400.0}, 500.0)
    writer.write(Sent(13.0, {1: 10}, 10))  # another group has taken the place of the first
    assert reporter.report().sent == {1: 0.0}


@given(st.binary(max_size=MAX_REPORT_BYTES + 10))
@settings(max_examples=200)
def test_nonsense_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_damaged_reports_are_errors_of_ours_or_reports(writer: TraceWriter, reporter: Reporter) -> None:
    for number in range(5):
        writer.write(Step(number, 1.0, 0.1))
    data = encode(reporter.report({"cpu": 0.1}))
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 0x55
        try:
            assert isinstance(decode(bytes(damaged)), Report)
        except ProtocolError:
            continue
