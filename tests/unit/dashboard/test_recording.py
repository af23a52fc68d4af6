"""Recordings: what was seen is shown again, also of a file that was cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from ringfort.dashboard import recording, recording_file
from ringfort.dashboard.known import Ended, Happened, Known, Linked, Over, Printed, Reported
from ringfort.dashboard.recording import FULL, RecordedSource, _choose
from ringfort.dashboard.recording_file import LIMIT, Recorder, RecordingReader
from ringfort.errors import InvalidArgumentError
from ringfort.telemetry.view import LinkView, RunView, ShownEvent
from ringfort.telemetry.watching import LogPart
from tests.helpers.telemetry import Rank, SimulatedRun

START = 1_000_000.0


class Taped(SimulatedRun):
    """A run whose reports are recorded."""

    def __init__(self, path: Path, ranks: int = 2) -> None:
        super().__init__([Rank(f"host{number}", compute=0.1 + 0.05 * number) for number in range(ranks)])
        self.recorder = Recorder(path)
        self.at = self.now
        self.known = Known(lambda: self.at)

    def put(self, frame: recording_file.AnyFrame) -> None:
        self.at = at = self.now if isinstance(frame, Reported) else self.now + 0.25
        self.known.take(frame, at)
        self.recorder.write(frame, at)

    def train(self, seconds: int) -> RunView:
        for _ in range(seconds):
            steps = self._steps_until(self.now + 1.0)
            self.now += 1.0
            for rank, made in zip(self.ranks, steps, strict=True):
                if rank.is_alive:
                    self.put(Reported(self.report(rank, made)))
        return self.known.history.view(now=self.now)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ringfort"


def taped(path: Path) -> list[RunView]:
    """A run of a minute with a loss and a return; its views at the end of each part."""
    run = Taped(path)
    run.put(Linked((LinkView("host0", "host1", 0.0, 1e7, 0.001, "Wi-Fi"),)))
    views = [run.train(20)]
    run.put(Printed("train.py", LogPart(1, 9, 0, b"out of memory\n")))
    run.ranks[1].is_alive = False
    run.put(Ended("host1", 101))
    views.append(run.train(20))
    run.put(Happened(ShownEvent(run.now, "joined", "host1 is here")))
    run.ranks[1].is_alive = True
    views.append(run.train(20))
    run.recorder.close()
    return views


@pytest.fixture
def played(path: Path) -> Iterator[tuple[RecordedSource, list[float], list[RunView]]]:
    """A source of that recording, its clock, and the views that were recorded."""
    views = taped(path)
    clock = [0.0]
    with RecordedSource(path, clock=lambda: clock[0]) as source:
        yield source, clock, views


def at_end_of(part: int) -> float:
    """The position of the end of a part. The recording begins with the links, 0.75 s before the first report."""
    return 20.0 * (part + 1) - 0.25


def same(found: RunView, expected: RunView) -> None:
    assert found.is_recording
    for name in RunView.__struct_fields__:
        if name not in ("is_recording", "notice"):
            assert getattr(found, name) == getattr(expected, name), name


def test_a_recording_shows_what_was_seen(played: tuple[RecordedSource, list[float], list[RunView]]) -> None:
    source, clock, views = played
    assert source.duration == 59.75
    for part, view in enumerate(views):
        clock[0] = at_end_of(part)
        same(source.view(), view)
    assert (source.playing, source.position, source.view().notice) == (False, 59.75, "")
    assert [rank.state for rank in views[1].ranks] == ["training", "lost"]


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 0), (1, 1, 0)])
def test_a_jump_shows_the_same_as_playing(
    played: tuple[RecordedSource, list[float], list[RunView]], order: tuple[int, ...]
) -> None:
    source, _, views = played
    source.playing = False
    for part in order:
        source.seek(at_end_of(part))
        same(source.view(), views[part])
        assert source.position == at_end_of(part)


def test_output_is_known_from_when_it_was_recorded(played: tuple[RecordedSource, list[float], list[RunView]]) -> None:
    source, _, _ = played
    source.playing = False
    source.seek(10)
    source.view()
    assert source.log(1) == []
    source.seek(30)
    source.view()
    assert source.log(1) == source.log(1, "train.py") == ["out of memory"]
    assert source.log(1, "other") == []


def test_time_stops_goes_faster_and_begins_again(played: tuple[RecordedSource, list[float], list[RunView]]) -> None:
    source, clock, _ = played
    clock[0] = 5.0
    assert source.position == 5.0
    source.playing = False
    clock[0] = 50.0
    assert source.position == 5.0
    source.playing, source.speed = True, 10.0
    clock[0] = 51.0
    assert source.position == 15.0
    clock[0] = 100.0
    assert (source.position, source.playing) == (59.75, False)
    source.playing = True
    assert source.position == 0.0
    source.seek(-5)
    assert source.position == 0.0
    source.seek(1e9)
    assert source.position == 59.75
    for speed in (0.0, -1.0, 1e6, float("nan")):
        with pytest.raises(InvalidArgumentError, match=r"must be from 0\.1 to 1000"):
            source.speed = speed


def test_a_recording_that_was_cut_plays_up_to_the_cut_and_says_so(path: Path) -> None:
    taped(path)
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) * 2 // 3, len(whole) // 2):
        path.write_bytes(whole[:size])
        with RecordedSource(path, clock=lambda: 0.0) as source:
            source.seek(1.0)
            assert "cut off" not in source.view().notice
            source.seek(1e9)
            view = source.view()
            assert "cut off" in view.notice
            assert view.verdict.step > 0
            assert 0 < source.duration <= 60.0


def test_a_recording_without_any_frame_says_so_too(path: Path) -> None:
    Recorder(path)._file.close()
    with RecordedSource(path) as source:
        assert "cut off" in source.view().notice
        assert (source.duration, source.position, source.log(0)) == (0.0, 0.0, [])


@settings(max_examples=30)
@given(st.data())
def test_damage_never_makes_a_reader_fail(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "run"
    taped(path)
    whole = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(30, len(whole) - 1), min_size=1, max_size=20)):
        whole[place] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    with RecordedSource(path, clock=lambda: 0.0) as source:
        for position in (0.0, 1e9, 10.0):
            source.seek(position)
            source.view()
            source.log(1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a recording"),
        (b"\x89PNG\r\n", "is not a recording"),
        (b"ringfort recording 2\n....", "was made by another version of Ringfort"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=why):
        RecordedSource(path)


def test_what_cannot_be_read_or_written_is_refused_with_the_reason(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read: No such file"):
        RecordedSource(path)
    with pytest.raises(InvalidArgumentError, match="cannot be read: Is a directory"):
        RecordedSource(tmp_path)
    with pytest.raises(InvalidArgumentError, match="cannot be created: No such file"):
        Recorder(tmp_path / "missing" / "file")
    path.write_bytes(b"something dear")
    with pytest.raises(InvalidArgumentError, match="exists already"):
        Recorder(path)
    assert path.read_bytes() == b"something dear"


def test_a_day_of_32_ranks_fits_into_a_recording(path: Path) -> None:
    run = Taped(path, ranks=32)
    for rank in run.ranks:
        rank.vitals = dict.fromkeys(("cpu", "memory", "memory_total", "gpu", "temperature"), 0.5)
    run.train(60)
    run.recorder.close()
    assert path.stat().st_size / 60 * 24 * 3600 < LIMIT


def test_a_recording_stops_at_its_limit_and_says_so(path: Path) -> None:
    recorder = Recorder(path, limit=4096)
    event = Happened(ShownEvent(START, "checkpoint", "x" * 100))
    for second in range(100):
        recorder.write(event, START + second)
        recorder.flush()
    assert "reached its limit" in recorder.notice
    assert path.stat().st_size <= 4096 + 64
    recorder.close()
    with RecordedSource(path) as source:
        source.seek(1e9)
        assert source.view().notice == ""  # it is complete


def test_a_full_disk_ends_a_recording_and_nothing_else() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    recorder = Recorder.__new__(Recorder)
    recorder.notice, recorder._limit, recorder._written, recorder._latest = "", 1 << 20, 0, 0.0
    recorder._file = full.open("wb")
    recorder.write(Over(), START)
    recorder.flush()
    recorder.write(Over(), START)
    recorder.close()
    assert recorder.notice == "The recording has stopped: No space left on device."


def test_times_never_go_back_even_if_the_clock_does(path: Path) -> None:
    recorder = Recorder(path)
    for at in (START, START + 5, START - 3600, START + 6):
        recorder.write(Happened(ShownEvent(at, "e", "x")), at)
    recorder.close()
    reader = RecordingReader(path)
    assert (reader.start, reader.end, reader.notice) == (START, START + 6, "")
    reader.close()


def test_a_jump_in_a_long_recording_reads_a_part_of_it_and_shows_the_same_speed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Taped(path)
    run.train(100)
    run.put(Ended("host1", 101))
    run.ranks[1].is_alive = False
    run.train(3000)
    run.recorder.close()
    monkeypatch.setattr(recording, "MOST", 300)
    taken: list[object] = []
    take = Known.take
    monkeypatch.setattr(Known, "take", lambda self, frame, at: (taken.append(frame), take(self, frame, at))[1])
    with RecordedSource(path, clock=lambda: 0.0) as source:
        source.seek(2999)
        view = source.view()
        assert len(taken) < 600 + FULL
        rate = next(curve for curve in view.curves if curve.name == "samples/s")
        middle = [value for at, value in zip(rate.at, rate.values, strict=True) if START + 500 < at < START + 2500]
        assert len(middle) > 100
        # 32 samples in 120 ms, of which a second has eight or nine.
        assert all(value is not None and 230 < value < 300 for value in middle)
        assert ("lost", "rank 1 on host1 has ended") in [(event.kind, event.text) for event in view.events]


def test_blocks_are_chosen_at_equal_distances_and_the_needed_ones_if_not_too_many() -> None:
    assert _choose([(1, False)] * 10, 100) == list(range(10))
    assert _choose([(1, False)] * 100, 10) == list(range(0, 100, 10))
    blocks = [(1, number in (3, 77)) for number in range(100)]
    assert _choose(blocks, 10) == sorted({*range(0, 100, 10), 3, 77})
    assert len(_choose([(1, True)] * 1000, 10)) <= 20
    assert _choose([], 10) == []


def test_a_reader_keeps_places_and_no_frames_in_memory(path: Path) -> None:
    recorder = Recorder(path)
    for second in range(2000):
        for _ in range(3):
            recorder.write(Happened(ShownEvent(START + second, "e", "x" * 100)), START + second)
    recorder.close()
    reader = RecordingReader(path)
    kept = sum(part.itemsize * len(part) for part in (reader._at, reader._offsets, reader._counts))
    assert len(reader) == 2000
    assert kept + len(reader._needed) < 25 * 2000
    assert [frame for _, frame in reader.frames(reader.block(1234))] == [
        Happened(ShownEvent(START + 1234, "e", "x" * 100))
    ] * 3
    descriptor = reader._file
    reader.close()
    reader.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
