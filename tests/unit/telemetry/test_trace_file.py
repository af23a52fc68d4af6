"""A process writes its trace, and another one reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringfort.errors import ProtocolError
from ringfort.telemetry.records import Event, Header, Step, Values
from ringfort.telemetry.trace_file import SLOTS, TraceReader, TraceWriter

HEADER = Header(1, 0.0, rank=3, world_size=4, program="train.py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "1.trace"


def step(number: int) -> Step:
    return Step(number, 1000.0 + number, 0.5, 0.1, 0.2, samples=64)


def test_what_is_written_is_read_once(path: Path) -> None:
    writer = TraceWriter(path)
    writer.describe(HEADER)
    written = [step(1), Values(1, 5.0, {"loss": 0.25}), Event(6.0, "joined", "study is here", 1)]
    for record in written:
        writer.write(record)
    reader = TraceReader(path)
    assert reader.header() == HEADER
    assert list(reader.new_records()) == written
    assert list(reader.new_records()) == []
    writer.write(step(2))
    assert list(reader.new_records()) == [step(2)]


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("more", [0, 1, SLOTS - 1])
def test_a_slow_reader_gets_the_newest_records(path: Path, rounds: int, more: int) -> None:
    writer, reader = TraceWriter(path), TraceReader(path)
    writer.write(step(1))
    assert len(list(reader.new_records())) == 1
    for number in range(2, 2 + rounds * SLOTS + more):
        writer.write(step(number))
    found = [record.number for record in reader.new_records() if isinstance(record, Step)]
    newest = 1 + rounds * SLOTS + more
    expected = min(SLOTS, newest - 1)
    assert found == list(range(newest - expected + 1, newest + 1))
    assert reader.lost == newest - 1 - expected


def test_the_latest_step_needs_no_records(path: Path) -> None:
    writer = TraceWriter(path)
    writer.set_step(17)
    assert TraceReader(path).step == 17


def test_a_record_that_is_being_written_is_left_for_later(path: Path) -> None:
    writer, reader = TraceWriter(path), TraceReader(path)
    writer.write(step(1))
    with path.open("r+b") as file:  # as in the middle of writing
        file.seek(1024)
        file.write(bytes(8))
    assert list(reader.new_records()) == []


def test_a_damaged_record_is_skipped(path: Path) -> None:
    writer, reader = TraceWriter(path), TraceReader(path)
    writer.write(step(1))
    writer.write(step(2))
    with path.open("r+b") as file:
        file.seek(1024 + 12)
        file.write(b"\xff\xff\xff")
    assert list(reader.new_records()) == [step(2)]


def test_a_file_without_a_header_says_so(path: Path) -> None:
    TraceWriter(path)
    with pytest.raises(ProtocolError, match="no header"):
        TraceReader(path).header()
    path.write_bytes(b"short")
    with pytest.raises(ProtocolError, match="not a trace"):
        TraceReader(path)


def test_a_reader_knows_that_the_writer_was_killed_and_reads_its_last_words(path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from ringfort.telemetry.records import Event\n"
        "from ringfort.telemetry.trace_file import TraceWriter\n"
        f"writer = TraceWriter(Path({str(path)!r}))\n"
        "writer.write(Event(1.0, 'word', 'my last one'))\n"
        "print('written', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        reader = TraceReader(path)
        assert reader.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not reader.is_alive()
    assert [record.text for record in reader.new_records() if isinstance(record, Event)] == ["my last one"]
