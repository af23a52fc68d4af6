"""`VoteWriter`: writes votes to the disk without blocking the control loop, and reports disks that are slow or full."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ringfort.cluster.core.events import DiskTrouble
from ringfort.cluster.core.peer_messages import Votes
from ringfort.cluster.net.durable_votes import DurableVotes

_log = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_DISK: Final = 1.0
"""Seconds after which a write that has not finished is reported."""


@dataclass(eq=False)
class VoteWriter:
    """Writes one record at a time, in a thread, so that heartbeats continue while the disk is slow."""

    store: DurableVotes
    on_written: Callable[[Votes, str], None]
    """Called after each write with the votes and the reason for a failure; empty if it succeeded."""
    on_trouble: Callable[[DiskTrouble], None]
    """Called once for each kind of failure until a write succeeds again."""
    trouble: DiskTrouble | None = None
    """Why votes cannot be written; None if they can."""
    _queue: deque[Votes] = field(default_factory=deque[Votes])
    _task: asyncio.Task[None] | None = None

    async def open(self) -> list[Votes]:
        """Create this process's file. Return the votes of earlier processes that bind this one."""
        self.store.open()
        return await _in_thread(self.store.recalled)

    async def ended_processes(self) -> list[tuple[str, Votes]]:
        """Return the processes of this node that have certainly ended, with their last votes."""
        return await _in_thread(self.store.ended)

    def touch(self) -> None:
        """Mark the file as belonging to a live process."""
        self.store.touch()

    def write(self, votes: Votes) -> None:
        """Write `votes` after those that are queued already."""
        self._queue.append(votes)
        if self._task is None:
            self._task = asyncio.ensure_future(self._write_all())

    async def finish(self) -> None:
        """Drop what is queued and wait for the write that is under way. Cancelling this does not end the write."""
        self._queue.clear()
        if self._task is not None:
            await asyncio.shield(self._task)

    def close(self, *, is_released: bool) -> None:
        """Close the file; see `DurableVotes.close`. A file in use by a stuck write stays locked until the process
        ends."""
        if self._task is None:
            self.store.close(is_released=is_released)

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            votes = self._queue.popleft()
            slow = loop.call_later(SLOW_DISK, self._report, f"the disk has taken {SLOW_DISK:g} s and is not done")
            why = ""
            try:
                await _in_thread(lambda votes=votes: self.store.write(votes))
                self.trouble = None
            except Exception as exc:
                why = getattr(exc, "strerror", None) or str(exc)
                if not isinstance(exc, OSError):
                    _log.exception("Writing votes failed")
            slow.cancel()
            if why:
                self._report(why)
            self.on_written(votes, f"its disk fails: {why}" if why else "")
        self._task = None

    def _report(self, why: str) -> None:
        trouble = DiskTrouble(str(self.store.path), why)
        if trouble != self.trouble:
            self.trouble = trouble
            _log.warning("%s", trouble)
            self.on_trouble(trouble)


async def _in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in a thread of its own. A pool would not do: the interpreter waits for
    pool threads at exit, and a disk may never answer."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # so that it cannot be cancelled under the thread

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as exc:
            done.set_exception(exc)

    threading.Thread(target=run, name="ringfort-disk", daemon=True).start()
    return await asyncio.wrap_future(done)
