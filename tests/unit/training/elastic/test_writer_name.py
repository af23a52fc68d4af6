"""Names of the processes that share a checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path

from ringfort.training.elastic.writer_name import WriterName


def test_each_process_has_a_name_of_its_own_and_gets_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first, second = WriterName(folder), WriterName(folder)
    assert (first.name, second.name) == ("w0", "w1")
    first.close()
    first.close()
    again = WriterName(folder)
    assert again.name == "w0"
    again.close()
    second.close()


def test_a_worker_that_outlives_its_process_does_not_keep_the_name(tmp_path: Path) -> None:
    """Otherwise each process that starts again meanwhile writes under another name, and no old file is removed."""
    first = WriterName(tmp_path)
    (word, hold), (started, start) = os.pipe(), os.pipe()
    worker = os.fork()
    if not worker:
        os.close(hold)
        os.write(start, b"1")
        os.read(word, 1)  # until the test is over
        os._exit(0)
    os.close(word)
    try:
        os.read(started, 1)
        first.close()  # as the kernel does for a process that is killed
        again = WriterName(tmp_path)
        assert again.name == "w0"
        again.close()
    finally:
        for end in (hold, started, start):
            os.close(end)
        os.waitpid(worker, 0)


def test_the_name_stays_with_the_process_whatever_its_workers_do(tmp_path: Path) -> None:
    first = WriterName(tmp_path)
    worker = os.fork()
    if not worker:
        first.close()
        os._exit(0)
    os.waitpid(worker, 0)
    second = WriterName(tmp_path)
    assert (first.name, second.name) == ("w0", "w1")
    first.close()
    second.close()


def test_a_folder_that_cannot_be_made_is_not_an_error_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    names = [WriterName(tmp_path / "file" / "folder") for _ in range(2)]
    assert names[0].name != names[1].name
    assert all(name.name.isalnum() and name.name.islower() for name in names)
    for name in names:
        name.close()
