"""The traces of several processes, which come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ringfort.telemetry.folder import traces
from ringfort.telemetry.records import Header, Step
from ringfort.telemetry.trace_file import TraceWriter
from ringfort.telemetry.trace_set import ENDED, MAX_ENDED, RECENT, TraceSet


class Machine:
    """A folder in which processes write traces, in virtual time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        self.looks = 0
        self.set = TraceSet(self._find, "host", "study", clock=lambda: self.now)
        self.writers: dict[int, TraceWriter] = {}

    def _find(self) -> list[Path]:
        self.looks += 1
        return traces(self.folder)

    def process(self, pid: int, rank: int | None = None, run: str = "") -> TraceWriter:
        writer = self.writers[pid] = TraceWriter(self.folder / f"{pid}.trace")
        writer.describe(Header(pid, self.now, pid if rank is None else rank, run=run))
        return writer

    def step(self, pid: int, number: int) -> None:
        self.writers[pid].write(Step(number, self.now, 0.1))
        self.writers[pid].set_step(number)

    def kill(self, pid: int) -> None:
        """Its trace stays."""
        self.writers.pop(pid).abandon()

    def pids(self, limit: int = 256) -> list[int]:
        return sorted(report.header.pid for report in self.set.reports(limit=limit))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.set.close()
    for pid in list(machine.writers):
        with suppress(OSError):
            machine.kill(pid)


def test_each_process_is_reported_with_what_is_new(machine: Machine) -> None:
    assert machine.set.reports() == []
    machine.process(1)
    machine.process(2)
    machine.step(1, 1)
    first, second = machine.set.reports({"cpu": 0.5})
    assert (first.step, first.sums.steps, first.host, first.name, first.vitals) == (1, 1, "host", "study", {"cpu": 0.5})
    assert second.sums.steps == 0
    machine.step(2, 1)
    assert [report.sums.steps for report in machine.set.reports()] == [0, 1]


def test_a_killed_process_is_reported_as_ended_for_a_while_and_then_no_more(machine: Machine) -> None:
    machine.process(1)
    machine.set.reports()
    machine.step(1, 7)
    machine.kill(1)
    (report,) = machine.set.reports()
    assert (report.is_alive, report.step, report.sums.steps) == (False, 7, 1)
    machine.now += ENDED
    assert [report.is_alive for report in machine.set.reports()] == [False]
    machine.now += 0.1
    machine.set.reports()
    assert machine.set.reports() == []
    assert (machine.folder / "1.trace").exists()


def test_a_process_that_ends_and_removes_its_trace_is_reported_as_ended(machine: Machine) -> None:
    machine.process(1)
    machine.set.reports()
    machine.step(1, 8)
    machine.writers.pop(1).close()
    (report,) = machine.set.reports()
    assert (report.is_alive, report.step) == (False, 8)


def test_a_process_that_ended_long_ago_is_not_reported(machine: Machine) -> None:
    machine.process(1)
    machine.step(1, 1)
    machine.process(2)
    machine.now += RECENT
    machine.step(2, 1)
    machine.kill(1)
    machine.kill(2)
    machine.now += 1.0
    assert machine.pids() == [2]


def test_a_process_id_that_is_used_again_is_another_process(machine: Machine) -> None:
    machine.process(1)
    machine.set.reports()
    machine.kill(1)
    for _ in range(2):
        machine.set.reports()
        machine.now += ENDED + 1
    assert machine.pids() == []
    (machine.folder / "1.trace").rename(machine.folder / "old")  # so that the number of its file is not used again
    machine.process(1)
    assert machine.pids() == [1]


def test_of_many_processes_some_are_reported_in_turn(machine: Machine) -> None:
    for pid in range(5):
        machine.process(pid)
    seen = [machine.pids(limit=2) for _ in range(5)]
    assert all(len(pids) == 2 for pids in seen)
    assert sorted(pid for pids in seen for pid in pids) == sorted([*range(5)] * 2)


def test_what_is_no_trace_is_left_alone_until_it_is_one(machine: Machine) -> None:
    (machine.folder / "9.trace").write_bytes(b"no trace")
    (machine.folder / "8.trace").mkdir()
    writer = machine.writers[7] = TraceWriter(machine.folder / "7.trace")
    assert machine.set.reports() == []
    writer.describe(Header(7, machine.now, 0))
    assert machine.pids() == [7]


def test_the_output_of_a_process_can_be_found_after_its_end(machine: Machine) -> None:
    for pid in range(1, 100):
        machine.process(pid)
        machine.set.reports()
        machine.kill(pid)
        for _ in range(2):
            machine.set.reports()
            machine.now += ENDED + 1
    assert machine.set.trace_of(99) == machine.folder / "99.trace"
    assert machine.set.trace_of(99, ended=False) is None
    assert machine.set.trace_of(1) is None
    assert len(machine.set._headers) <= MAX_ENDED


def test_the_trace_of_a_rank_is_that_of_the_newest_process_of_its_run(machine: Machine) -> None:
    machine.process(1, rank=0, run="one")
    machine.set.reports()
    assert machine.set.trace_of(0) == machine.set.trace_of(0, "one") == machine.folder / "1.trace"
    assert machine.set.trace_of(0, "two") is machine.set.trace_of(1) is None
    machine.set.close()
    assert machine.set.trace_of(0) is None
    assert machine.pids() == [1]  # it may be used again
    machine.now += 1
    machine.process(2, rank=0, run="one")
    assert machine.pids() == [1, 2]
    assert machine.set.trace_of(0) == machine.folder / "2.trace"
