"""Votes are written in the background, one after the other, and a failing disk is reported once."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ringfort.cluster.core.events import DiskTrouble
from ringfort.cluster.core.peer_messages import Epoch, Member, Votes
from ringfort.cluster.net import durable_votes
from ringfort.cluster.net.durable_votes import DurableVotes, VoteWriter

FULL = os.strerror(errno.ENOSPC)
GROUP = Epoch(1, "n.a", (Member("n.a"), Member("o.b")), (), ("n.a#1",))


class Disk:
    """A writer, what it reported, and a disk that a test can make fail."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.written: list[tuple[int, str]] = []
        self.troubles: list[str] = []
        self.is_full = False
        self.may_end = threading.Event()
        self.may_end.set()
        self.store = DurableVotes(home, "net", "n.a", fsync=self._fsync)
        self.writer = VoteWriter(
            self.store, lambda votes, why: self.written.append((votes.highest, why)), self._on_trouble
        )

    def _on_trouble(self, trouble: DiskTrouble) -> None:
        self.troubles.append(trouble.why)

    def _fsync(self, handle: int) -> None:
        assert self.may_end.wait(10)
        if self.is_full:
            raise OSError(errno.ENOSPC, FULL)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "home")


def run(disk: Disk, work: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        assert await disk.writer.open() == []
        await work()
        await disk.writer.finish()
        disk.writer.close(is_released=False)

    asyncio.run(all_of_it())


async def until_written(disk: Disk, count: int) -> None:
    while len(disk.written) < count:
        await asyncio.sleep(0.01)


def test_votes_are_written_in_order(disk: Disk) -> None:
    async def work() -> None:
        for number in range(1, 4):
            disk.writer.write(Votes(number, GROUP))
        await until_written(disk, 3)

    run(disk, work)
    assert disk.written == [(1, ""), (2, ""), (3, "")]
    assert disk.troubles == []


def test_a_full_disk_is_reported_once_and_every_failed_write_has_its_reason(disk: Disk) -> None:
    async def work() -> None:
        disk.is_full = True
        disk.writer.write(Votes(1, GROUP))
        disk.writer.write(Votes(2, GROUP))
        await until_written(disk, 2)
        assert disk.writer.trouble is not None
        disk.is_full = False
        disk.writer.write(Votes(3, GROUP))
        await until_written(disk, 3)
        assert disk.writer.trouble is None

    run(disk, work)
    assert disk.written == [(1, f"its disk fails: {FULL}"), (2, f"its disk fails: {FULL}"), (3, "")]
    assert disk.troubles == [FULL]


def test_a_slow_disk_is_reported_while_the_loop_goes_on(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_votes, "SLOW_DISK", 0.05)

    async def work() -> None:
        disk.may_end.clear()
        disk.writer.write(Votes(1, GROUP))
        while not disk.troubles:
            await asyncio.sleep(0.01)
        assert disk.written == []
        disk.may_end.set()
        await until_written(disk, 1)

    run(disk, work)
    assert disk.written == [(1, "")]
    assert "is not done" in disk.troubles[0]


def test_a_file_that_is_being_written_is_not_closed(disk: Disk) -> None:
    async def work() -> None:
        await disk.writer.open()
        disk.may_end.clear()
        disk.writer.write(Votes(1, GROUP))
        await asyncio.sleep(0.05)
        disk.writer.close(is_released=True)
        disk.may_end.set()
        await until_written(disk, 1)
        disk.writer.close(is_released=False)

    asyncio.run(work())
    assert disk.written == [(1, "")]
