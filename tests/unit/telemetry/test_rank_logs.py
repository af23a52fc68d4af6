"""The output of a rank, in two files in turn: a viewer gets the newest first and misses nothing that follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfort.dashboard.output import RankOutput
from ringfort.telemetry.rank_logs import log_file, next_part, older_log_file
from ringfort.telemetry.watching import MAX_PART


class Log:
    """What a launcher writes, and a viewer that reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = RankOutput()

    def write(self, text: str) -> None:
        with log_file(self.folder, 3).open("a") as file:
            file.write(text)

    def turn(self) -> None:
        """The other file is used from now on."""
        log_file(self.folder, 3).replace(older_log_file(self.folder, 3))

    def read(self, parts: int = 1) -> int:
        """Take so many parts, or fewer if that is all; return how many came."""
        for number in range(parts):
            part = next_part(self.folder / "77.trace", self.output.request(3))
            if part is None:
                return number
            assert len(part.data) <= MAX_PART
            self.output.add(part)
        return parts


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_a_rank_without_output_has_none(log: Log) -> None:
    assert log.read() == 0
    assert log.output.lines() == []


def test_the_newest_part_comes_first_then_what_follows_then_what_was_before(log: Log) -> None:
    lines = [f"line {number}" for number in range(400)]
    log.write("\n".join(lines) + "\n")
    assert log.read() == 1
    assert log.output.lines()[-100:] == lines[-100:]
    log.write("the next\n")
    log.read()
    assert log.output.lines()[-2:] == ["line 399", "the next"]
    assert log.read(100) < 5
    assert log.output.lines() == [*lines, "the next"]


def test_nothing_is_missed_when_the_files_change_places(log: Log) -> None:
    log.write("a\nb\n")
    log.read()
    log.write("c\n")
    log.turn()
    log.write("d\n")
    log.read(10)
    assert log.output.lines() == ["a", "b", "c", "d"]


def test_a_viewer_that_comes_just_after_the_files_changed_places_sees_the_older_one(log: Log) -> None:
    log.write("a\nb\n")
    log.turn()
    log.write("")
    log.read(10)
    assert log.output.lines() == ["a", "b"]
    log.write("c\n")
    log.read(10)
    assert log.output.lines() == ["a", "b", "c"]


def test_output_that_is_faster_than_a_viewer_is_left_out_and_said_to_be(log: Log) -> None:
    log.write("first\n")
    log.read()
    log.write(("x" * 99 + "\n") * (MAX_PART // 50))
    log.write("last\n")
    log.read()
    lines = log.output.lines()
    assert lines[0] == "first"
    assert "[some output was not sent]" in lines
    assert lines[-1] == "last"


def test_a_file_that_became_shorter_is_read_anew(log: Log) -> None:
    log.write("much longer than the next\n")
    log.read()
    log_file(log.folder, 3).write_text("new\n")
    log.read()
    assert log.output.lines()[-1] == "new"


def test_output_is_found_by_the_process_where_its_rank_there_is_another(log: Log) -> None:
    log.write("of another process\n")
    (log.folder / "77.log").symlink_to(log_file(log.folder, 0).name)
    (log.folder / "77.log.1").symlink_to(older_log_file(log.folder, 0).name)
    assert log.read() == 0
    log_file(log.folder, 0).write_text("its own\n")
    log.read(10)
    assert log.output.lines() == ["its own"]
