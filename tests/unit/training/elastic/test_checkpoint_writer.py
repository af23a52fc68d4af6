"""`CheckpointWriter`: training never waits for the disk, and `is_due`: members take turns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringfort.errors import CheckpointError, InvalidArgumentError
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp
from ringfort.training.elastic.checkpoint_writer import CheckpointWriter, is_due
from ringfort.training.elastic.state_tree import Image, StateTree

IMAGE = StateTree({"w": np.ones(3)}).image()
PATIENCE = 20.0
"""Seconds; passed only if something hangs."""


def stamp(step: int) -> Stamp:
    return Stamp("night", "a@1", epoch=1, step=step, cursor=step, chain=b"")


class FakeDisk:
    """A disk that waits for permission before each write and fails when told to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_write = threading.Semaphore(0)
        self.written: list[int] = []
        self.failures: dict[int, Exception] = {}
        self.at_once = 0

    def write(self, stamp: Stamp, image: Image, writer: str) -> Path:
        assert (image, writer) == (IMAGE, "study")
        self.at_once += 1
        assert self.at_once == 1
        self.begun.release()
        try:
            assert self.may_write.acquire(timeout=PATIENCE)
            if stamp.step in self.failures:
                raise self.failures[stamp.step]
            self.written.append(stamp.step)
        finally:
            self.at_once -= 1
        return Path(f"step-{stamp.step}")

    def wait_until_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE)

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self.may_write.release()


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def writer(disk: FakeDisk) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(disk, "study")
    yield writer
    disk.allow(100)
    assert writer.close(PATIENCE)


def test_a_checkpoint_is_written_while_the_program_continues(disk: FakeDisk, writer: CheckpointWriter) -> None:
    writer.submit(stamp(1), IMAGE)
    disk.wait_until_begun()
    assert (disk.written, writer.saved_step) == ([], -1)
    disk.allow()
    assert writer.close(PATIENCE)
    assert (disk.written, writer.saved_step) == ([1], 1)


def test_a_newer_one_replaces_the_one_that_waits_and_one_is_written_at_a_time(
    disk: FakeDisk, writer: CheckpointWriter
) -> None:
    writer.submit(stamp(1), IMAGE)
    disk.wait_until_begun()
    for step in (2, 3, 4):
        writer.submit(stamp(step), IMAGE)
    disk.allow(2)
    assert writer.close(PATIENCE)
    assert disk.written == [1, 4]


def test_the_thread_ends_when_nothing_waits_and_another_is_started_when_needed(
    disk: FakeDisk, writer: CheckpointWriter
) -> None:
    writer.submit(stamp(1), IMAGE)
    disk.wait_until_begun()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "ringfort-checkpoint"]
    disk.allow()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    writer.submit(stamp(2), IMAGE)
    disk.allow()
    assert writer.close(PATIENCE)
    assert disk.written == [1, 2]


def test_closing_waits_no_longer_than_told_and_drops_what_waits(
    disk: FakeDisk, writer: CheckpointWriter, caplog: pytest.LogCaptureFixture
) -> None:
    writer.submit(stamp(1), IMAGE)
    disk.wait_until_begun()
    writer.submit(stamp(2), IMAGE)
    assert not writer.close(timeout=0)
    assert "still being written after 0 s" in caplog.text
    disk.allow(2)
    assert writer.close(PATIENCE)
    assert disk.written == [1]


def test_closing_without_any_checkpoint_is_done_at_once(writer: CheckpointWriter) -> None:
    assert writer.close(0)
    assert writer.close(0)
    with pytest.raises(InvalidArgumentError, match="closed"):
        writer.submit(stamp(1), IMAGE)


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_failure_is_told_once_for_each_reason_until_a_write_succeeds(
    disk: FakeDisk, writer: CheckpointWriter, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    full, broken = "no space left on device", "input/output error"
    disk.failures = {
        step: CheckpointError(f"run1/step-{step}", why)
        for step, why in ((1, full), (2, full), (3, broken), (4, full), (6, full))
    }
    for step in range(1, 7):
        writer.submit(stamp(step), IMAGE)
        disk.wait_until_begun()  # so that it is not replaced by the next one
        disk.allow()
    assert writer.close(PATIENCE)
    assert disk.written == [5]
    assert writer.saved_step == 5
    assert messages(caplog) == [
        ("WARNING", f"Checkpoint run1/step-1: {full}. Step 1 was not saved; training continues"),
        ("WARNING", f"Checkpoint run1/step-3: {broken}. Step 3 was not saved; training continues"),
        ("INFO", "Checkpoints are written again, from step 5"),
        ("WARNING", f"Checkpoint run1/step-6: {full}. Step 6 was not saved; training continues"),
    ]


def test_a_fault_in_the_disks_code_is_told_once_with_its_traceback_and_does_not_end_the_writer(
    disk: FakeDisk, writer: CheckpointWriter, caplog: pytest.LogCaptureFixture
) -> None:
    disk.failures = {1: ZeroDivisionError("x"), 2: ZeroDivisionError("x")}
    for step in (1, 2, 3):
        writer.submit(stamp(step), IMAGE)
        disk.wait_until_begun()
        disk.allow()
    assert writer.close(PATIENCE)
    assert disk.written == [3]
    assert messages(caplog) == [("ERROR", "Step 1 was not saved; training continues")]
    assert "ZeroDivisionError" in caplog.text


def test_a_real_folder_gets_the_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    writer = CheckpointWriter(folder, "study")
    writer.submit(stamp(7), IMAGE)
    assert writer.close(PATIENCE)
    assert [found.stamp.step for found in folder.saved() if isinstance(found, Saved)] == [7]


# --- taking turns -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**9))
def test_members_write_at_different_steps_and_somebody_in_every_interval(size: int, interval: int, first: int) -> None:
    period = max(size, interval)
    writers = [
        [rank for rank in range(size) if is_due(step, rank, size, interval)] for step in range(first, first + period)
    ]
    assert all(len(due) <= 1 for due in writers)
    assert sorted(rank for due in writers for rank in due) == list(range(size))  # each once in a period
    for begin in range(period - interval + 1):
        assert any(writers[begin : begin + interval])


def test_the_writes_are_spread_evenly() -> None:
    steps = [[step for step in range(30) if is_due(step, rank, 3, 10)] for rank in range(3)]
    assert steps == [[0, 10, 20], [3, 13, 23], [6, 16, 26]]
    assert [step for step in range(12) if is_due(step, 2, 4, 1)] == [2, 6, 10]  # more members than steps


@pytest.mark.parametrize(("rank", "size", "interval"), [(0, 1, 0), (0, 1, -3), (2, 2, 5), (-1, 2, 5)])
def test_turns_that_cannot_be_are_refused(rank: int, size: int, interval: int) -> None:
    with pytest.raises(InvalidArgumentError):
        is_due(5, rank, size, interval)
