"""The output of ranks in files: names, bytes, limits, and disks that are full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ringfort.errors import InvalidArgumentError
from ringfort.launch.output_files import RECENT_BYTES, OutputFiles, RecentOutput


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_rank_has_a_file_with_the_bytes_of_both_streams(tmp_path: Path) -> None:
    logs = OutputFiles(tmp_path / "new" / "folder")
    for rank in (0, 1):
        logs.begin(rank)
    logs.write(0, b"one\r\xff")
    logs.write(1, b"other")
    logs.write(0, b" two\n")
    logs.close()
    assert kept(tmp_path / "new" / "folder") == {"rank-0.log": b"one\r\xff two\n", "rank-1.log": b"other"}


def test_a_restart_and_another_run_write_over_nothing(tmp_path: Path) -> None:
    for word in (b"first", b"second"):
        logs = OutputFiles(tmp_path)
        logs.begin(0)
        logs.write(0, word)
        logs.begin(0, restarts=1)
        logs.write(0, word + b" again")
        logs.close()
    assert kept(tmp_path) == {
        "rank-0.log": b"first",
        "rank-0.restart-1.log": b"first again",
        "rank-0.run-2.log": b"second",
        "rank-0.run-2.restart-1.log": b"second again",
    }


def test_machines_that_share_a_folder_have_their_names_in_it_and_runs_of_their_own(tmp_path: Path) -> None:
    for host in ("study", "shed.local", "study", "a/b c"):
        logs = OutputFiles(tmp_path, host=host)
        logs.begin(0)
        logs.close()
    names = {"rank-0.study.log", "rank-0.shed.local.log", "rank-0.study.run-2.log", "rank-0.a_b_c.log"}
    assert kept(tmp_path).keys() == names


def test_two_launchers_that_start_at_once_do_not_write_to_one_file(tmp_path: Path) -> None:
    one, other = OutputFiles(tmp_path), OutputFiles(tmp_path)
    for logs, word in ((one, b"one"), (other, b"other")):
        logs.begin(0)
        logs.write(0, word)
        logs.close()
    assert kept(tmp_path) == {"rank-0.log": b"one", "rank-0.run-2.log": b"other"}


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match=r"log_dir='.*/file': cannot be written: File exists; name a folder"):
        OutputFiles(tmp_path / "file")
    with pytest.raises(InvalidArgumentError, match="cannot be written: "):
        OutputFiles(Path("/proc/logs"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_one_warning_and_no_error(tmp_path: Path) -> None:
    said: list[str] = []
    logs = OutputFiles(tmp_path, warn=said.append)
    for rank in (0, 1):
        logs.begin(rank)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, logs._files[rank])
        os.close(full)
    for rank in (0, 1, 0):
        logs.write(rank, b"word")
    logs.close()
    (warning,) = said
    assert warning.startswith(f"cannot keep the output of rank 0 in {tmp_path}: No space left on device. The run")


def test_output_that_a_full_disk_has_lost_is_mentioned_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, write, room = OutputFiles(tmp_path), os.write, [6]

    def limited(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(file, data[: room[0]])
        room[0] -= written
        return written

    logs.begin(0)
    monkeypatch.setattr(os, "write", limited)
    logs.write(0, b"one\ntwo\n")
    logs.write(0, b"three\n")
    room[0] = 10  # not enough for the words
    logs.write(0, b"four\n")
    room[0] = 1000
    logs.write(0, b"five\n")
    room[0] = 0
    logs.write(0, b"six\n")
    room[0] = 1000
    logs.close()
    words = b"\n[ringfort: %d bytes of output are missing here, they could not be written]\n"
    assert kept(tmp_path) == {"rank-0.log": b"one\ntw" + words % 13 + b"five\n" + words % 4}


def test_a_folder_that_was_removed_is_one_warning_and_no_error(tmp_path: Path) -> None:
    said: list[str] = []
    logs = OutputFiles(tmp_path / "logs", tmp_path / "logs", warn=said.append)
    (tmp_path / "logs").rmdir()
    logs.begin(0)
    logs.started(0, 17)
    logs.write(0, b"word")
    logs.begin(1)
    assert len(said) == 1
    logs.close()


def test_viewers_find_the_latest_output_by_rank_and_by_process_also_after_a_restart(tmp_path: Path) -> None:
    logs = OutputFiles(recent=tmp_path)
    for restarts, pid in enumerate((17, 18)):
        logs.begin(3, restarts)
        logs.started(3, pid)
        logs.write(3, b"%d\n" % pid)
    logs.close()
    (tmp_path / "rank-3.log.1").write_bytes(b"older")
    older = dict.fromkeys(("rank-3.log.1", "17.log.1", "18.log.1"), b"older")
    assert kept(tmp_path) == {**dict.fromkeys(("rank-3.log", "17.log", "18.log"), b"17\n18\n"), **older}


def test_the_latest_output_takes_little_room_and_is_never_less_than_half_of_it(tmp_path: Path) -> None:
    recent = RecentOutput(tmp_path, 0)
    written = b""
    for number in range(5000):
        line = b"line %d %s\n" % (number, b"x" * (number % 100))
        recent.write(line)
        written += line
    found = (tmp_path / "rank-0.log.1").read_bytes() + (tmp_path / "rank-0.log").read_bytes()
    assert written.endswith(found)
    assert RECENT_BYTES < len(found) <= 2 * RECENT_BYTES
    recent.write(b"y" * 3 * RECENT_BYTES)
    assert (tmp_path / "rank-0.log").read_bytes() == b"y" * RECENT_BYTES
    recent.close()
