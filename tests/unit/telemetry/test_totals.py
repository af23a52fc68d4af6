"""Totals: what ranks have done, added up over their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfort.telemetry.records import Event, Header, Sent, Step, Values
from ringfort.telemetry.totals import MAX_NAMES, OTHER, Totals
from ringfort.telemetry.trace_file import SLOTS, TraceWriter


def process(folder: Path, pid: int, rank: int, started: float = 0.0) -> TraceWriter:
    writer = TraceWriter(folder / f"{pid}.trace")
    writer.describe(Header(pid, started, rank=rank, world_size=2))
    return writer


def test_steps_values_events_and_bytes_are_added_up(tmp_path: Path) -> None:
    writer, totals = process(tmp_path, 1, 0), Totals(tmp_path)
    for number in (1, 2):
        writer.write(Step(number, 1.0, 1.0, 0.25, 0.125, 0.0625, 0.03125, samples=32))
        writer.write(Values(number, 1.0, {"loss": 1 / number, "lr": 0.1}))
        writer.write(Sent(1.0, {1: 100 * number, 2: 10}, 7 * number))
        writer.set_step(number)
        writer.write(Event(1.0, "lost", "rank 1 is lost"))
        totals.read()
    found = totals.ranks[0]
    assert (found.step, found.steps, found.samples, found.is_alive, found.lost) == (2, 2, 64, True, 0)
    assert found.seconds == {"compute": 1.0625, "data": 0.5, "exchange": 0.25, "codec": 0.125, "seal": 0.0625}
    assert (found.values, found.events) == ({"loss": 0.5, "lr": 0.1}, {"lost": 2})
    assert (found.sent, found.received) == ({1: 200, 2: 10}, 14)
    totals.close()
    writer.close()


def test_counts_go_on_after_a_restart_and_in_another_group(tmp_path: Path) -> None:
    totals = Totals(tmp_path)
    for pid, started in ((1, 5.0), (2, 6.0)):
        writer = process(tmp_path, pid, 0, started)
        writer.write(Step(1, 1.0, 1.0))
        writer.write(Sent(1.0, {1: 100}, 10))
        writer.write(Sent(2.0, {1: 30}, 3))  # of a group that followed the first
        totals.read()
        assert totals.ranks[0].is_alive
        writer.write(Step(2, 1.0, 1.0))
        writer.abandon() if pid == 1 else writer.close()  # killed, and ended well
    totals.read()
    found = totals.ranks[0]
    assert (found.header.pid, found.is_alive) == (2, False)
    assert (found.steps, found.sent, found.received) == (4, {1: 260}, 26)
    totals.read()
    assert found.steps == 4
    totals.close()


def test_a_process_with_another_rank_counts_there_and_the_latest_that_lives_is_the_rank(tmp_path: Path) -> None:
    older, newer, totals = process(tmp_path, 1, 1, started=5.0), process(tmp_path, 2, 0, started=6.0), Totals(tmp_path)
    for writer in (older, newer):
        writer.write(Step(1, 1.0, 1.0))
    totals.read()
    newer.abandon()  # killed: the other one takes its rank
    older.describe(Header(1, 5.0, rank=0, world_size=1))
    older.write(Step(2, 1.0, 1.0))
    for _ in range(2):
        totals.read()
        assert {rank: (one.is_alive, one.steps) for rank, one in totals.ranks.items()} == {0: (True, 2), 1: (False, 1)}
        assert totals.ranks[0].header.pid == 1
    totals.close()
    older.close()


def test_a_process_without_a_rank_is_not_counted_yet(tmp_path: Path) -> None:
    writer, totals = process(tmp_path, 1, -1), Totals(tmp_path)
    writer.write(Step(1, 1.0, 1.0))
    TraceWriter(tmp_path / "2.trace").abandon()  # ended before it said who it was
    (tmp_path / "3.trace").write_bytes(b"nonsense")
    totals.read()
    assert not totals.ranks
    writer.describe(Header(1, 0.0, rank=4))
    totals.read()
    assert totals.ranks[4].steps == 1
    totals.close()
    writer.close()


def test_records_that_were_overwritten_are_counted_as_lost(tmp_path: Path) -> None:
    writer, totals = process(tmp_path, 1, 0), Totals(tmp_path)
    for number in range(SLOTS + 100):
        writer.write(Step(number, 1.0, 1.0))
    totals.read()
    assert (totals.ranks[0].steps, totals.ranks[0].lost) == (SLOTS, 100)
    totals.close()
    writer.close()


@pytest.mark.parametrize("kind", ["values", "events"])
def test_names_that_a_program_makes_up_do_not_fill_the_memory(tmp_path: Path, kind: str) -> None:
    writer, totals = process(tmp_path, 1, 0), Totals(tmp_path)
    for number in range(2 * MAX_NAMES):
        writer.write(Values(1, 1.0, {f"v{number}": 1.0}) if kind == "values" else Event(1.0, f"k{number}", ""))
    totals.read()
    found = totals.ranks[0]
    assert len(found.values) + len(found.events) <= MAX_NAMES + 1
    assert kind == "values" or found.events[OTHER] == MAX_NAMES
    totals.close()
    writer.close()
