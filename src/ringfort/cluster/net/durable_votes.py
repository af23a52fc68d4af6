"""`DurableVotes`: the votes of each process of this node, in a file that outlives the process. `VoteWriter` writes them
without blocking the control loop, and reports disks that are slow or full.

The next process of the machine is bound by them and can report that the earlier one has ended. A process holds a lock
on its file as long as it lives. Whoever acquires the lock knows that the other process has ended, provided that the
file is the one that was locked and not a copy: a file records the machine it was written on and its own inode.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, TypeVar

import msgspec

from ringfort.cluster.core.events import DiskTrouble
from ringfort.cluster.core.membership import is_binding, promised_by
from ringfort.cluster.core.peer_messages import Votes
from ringfort.errors import IdentityError, ProtocolError
from ringfort.identity import files
from ringfort.identity.hosts import HostMarks, this_host

_log = logging.getLogger(__name__)

T = TypeVar("T")

FOLDER: Final = "votes"
"""The folder's name from the first release on; files in it must stay readable."""
KEPT_FOR: Final = 24 * 3600.0
"""Seconds for which the votes of an ended process are kept. A run that waits for it is resumed by then. Not those of an
elastic run: its checkpoints are as good after a month, and half of its machines must not continue without the rest."""
_CLOCK_IS_SET: Final = 1.7e9
"""Seconds since 1970 (November 2023). A clock that shows less is wrong."""
TOUCHED_EVERY: Final = 600.0
"""Seconds after which a live process updates the modification time of its file, so that a long run is not forgotten."""
SLOW_DISK: Final = 1.0
"""Seconds after which a write that has not finished is reported."""
MAX_VOUCHED: Final = 32
"""The latest ended processes that are reported; each is sent to every peer that connects."""
_HEAD: Final = Struct("<IIQ")
"""Length, checksum and serial number of a record. The higher serial number is the later one."""
_PLACE: Final = 1 << 20
"""Bytes between the two records of a file. The gap is sparse and takes no room on the disk."""
_ROOM: Final = 16 * 1024
"""Bytes that are written at each of the two places in the beginning. Overwriting them changes nothing of the file but
its data, so `_flush` does not wait for the journal of the file system, in which a large checkpoint may be before it."""
_flush: Final[Callable[[int], None]] = getattr(os, "fdatasync", os.fsync)


class _Content(msgspec.Struct, frozen=True):
    host: HostMarks
    file: tuple[int, int]
    """Device and inode of the file itself."""
    votes: Votes
    is_released: bool = False
    """The process left while all members of its group could be reached, so its votes bind nobody."""


_decoder = msgspec.msgpack.Decoder(_Content)


class _Process(NamedTuple):
    """Another process of this node, as its file tells."""

    peer: str
    age: float
    content: _Content
    has_ended: bool

    @property
    def own_votes(self) -> Votes:
        """Without those that it took over from earlier processes."""
        return promised_by(self.peer, self.content.votes)


@dataclass(eq=False)
class DurableVotes:
    """This process's file, and those of the other processes of the same node and cluster."""

    home: Path
    scope: str
    """Names the cluster and run: votes of one scope do not bind processes of another."""
    peer: str
    host: HostMarks = field(default_factory=this_host)
    kept_for: float = KEPT_FOR
    """Seconds for which the votes of ended processes bind this one."""
    fsync: Callable[[int], None] = _flush
    _votes: Votes = field(default_factory=Votes)
    _serial: int = 0
    _handle: int = -1
    _touched: float = 0.0
    _warned: set[Path] = field(default_factory=set[Path])

    @property
    def path(self) -> Path:
        """This process's file."""
        return self.home / FOLDER / f"{self.scope}-{self.peer}"

    def open(self) -> None:
        """Create and lock the file. Raise `IdentityError`, with the remedy, if that is not possible."""
        files.ensure_folder(self.path.parent)
        self._touched = time.monotonic()
        # It gets its name only once it is locked: an unlocked file would be taken for that of an ended process.
        coming = self.path.with_name(f".{self.path.name}")
        try:
            self._handle = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for place in (0, _PLACE):
                os.pwrite(self._handle, bytes(_ROOM), place)
            self._put(self._votes)
            coming.rename(self.path)
        except OSError as exc:
            with suppress(OSError):
                coming.unlink()
            why = exc.strerror or str(exc)
            raise IdentityError(self.path, why, "export RINGFORT_HOME=/a/folder/of/your/own") from exc

    def write(self, votes: Votes) -> None:
        """Write `votes` so that they survive a loss of power. After an `OSError`, either these or the previous ones are
        found later: a disk that cannot confirm a record may have it.

        May run in another thread than the other methods, one call at a time.
        """
        if self._handle < 0:
            return
        self._put(votes)
        self.fsync(self._handle)
        self._votes = votes

    def touch(self) -> None:
        """Call this now and then, to show that the process still lives."""
        if self._handle >= 0 and time.monotonic() - self._touched >= TOUCHED_EVERY:
            self._touched = time.monotonic()
            with suppress(OSError):
                os.utime(self._handle)

    def ended(self) -> list[tuple[str, Votes]]:
        """Return the processes that have certainly ended, latest first, with their last votes. Remove old files."""
        found = sorted((p for p in self._others() if p.has_ended), key=lambda process: (process.age, process.peer))
        return [(process.peer, process.content.votes) for process in found[:MAX_VOUCHED]]

    def recalled(self) -> list[Votes]:
        """Return the votes of other processes of this node that bind a new one. A process that may still live counts
        as well: a new one may start before the old one has ended."""
        return [process.own_votes for process in self._others() if not process.content.is_released]

    def close(self, *, is_released: bool = False) -> None:
        """Unlock the file. It is removed if these votes bind nobody."""
        if self._handle >= 0:
            with suppress(OSError):
                if not is_binding(promised_by(self.peer, self._votes)):
                    self.path.unlink()
                elif is_released:
                    self._put(self._votes, is_released=True)
            os.close(self._handle)
            self._handle = -1

    def _put(self, votes: Votes, *, is_released: bool = False) -> None:
        """Overwrite the older of the two records in the file: a full disk or a loss of power does not damage the
        latest. (A new file would need a lock of its own.)"""
        status = os.fstat(self._handle)
        content = _Content(self.host, (status.st_dev, status.st_ino), votes, is_released)
        data = msgspec.msgpack.encode(content)
        record = _HEAD.pack(len(data), zlib.crc32(data), self._serial + 1) + data
        if os.pwrite(self._handle, record, (self._serial + 1) % 2 * _PLACE) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._serial += 1

    def _others(self) -> Iterator[_Process]:
        """Yield the other processes of this node whose votes bind somebody. Remove the files of the rest."""
        node = self.peer.rpartition(".")[0]
        for path in sorted(self.path.parent.glob(f"{self.scope}-*")):
            peer = path.name.removeprefix(f"{self.scope}-")
            if peer == self.peer or peer.rpartition(".")[0] != node:
                continue
            with suppress(OSError, ProtocolError):
                process = self._read(path, peer)
                is_old = process.age > self.kept_for and process.has_ended
                if is_binding(process.own_votes) and not is_old:
                    yield process
                elif process.has_ended:
                    path.unlink()

    def _read(self, path: Path, peer: str) -> _Process:
        """Raise `OSError`, or `ProtocolError` if the file is incomplete."""
        with path.open("rb") as file:
            handle, is_free = file.fileno(), True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # its process lives; or the file system has no locks, and nobody can tell
                is_free = False
            status = os.fstat(handle)
            content = _decoded(os.pread(handle, _PLACE, 0), os.pread(handle, _PLACE, _PLACE))
        is_own = self._wrote(content, status)
        if is_free and not is_own and path not in self._warned:
            self._warned.add(path)
            _log.warning(
                "%s was written on another machine or is a copy, so this machine cannot report that its process has "
                "ended. If that process is gone for good: rm %s",
                path,
                path,
            )
        # The age is unknown if the file was written before the clock was set, as on a machine without a battery clock.
        age = time.time() - status.st_mtime if status.st_mtime > _CLOCK_IS_SET else 0.0
        return _Process(peer, age, content, is_free and is_own)

    def _wrote(self, content: _Content, status: os.stat_result) -> bool:
        """Return whether this machine wrote this very file, so that its lock means something here."""
        if self.host.boot and self.host.boot == content.host.boot:
            return content.file == (status.st_dev, status.st_ino)
        # Device numbers may change when a machine boots.
        return self.host.is_same(content.host) and content.file[1] == status.st_ino


def _decoded(*places: bytes) -> _Content:
    """Return the latest complete record. Raise `ProtocolError` if there is none."""
    found: list[tuple[int, bytes]] = []
    for place in places:
        if len(place) >= _HEAD.size:
            length, checksum, serial = _HEAD.unpack_from(place)
            data = place[_HEAD.size : _HEAD.size + length]
            if len(data) == length and zlib.crc32(data) == checksum:
                found.append((serial, data))
    if not found:
        raise ProtocolError("the file is incomplete")
    try:
        return _decoder.decode(max(found)[1])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise ProtocolError(f"malformed file: {exc}") from exc


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
            failure = ""
            try:
                await _in_thread(lambda votes=votes: self.store.write(votes))
                self.trouble = None
            except Exception as exc:
                why = getattr(exc, "strerror", None) or str(exc)
                if not isinstance(exc, OSError):
                    _log.exception("Writing votes failed")
                self._report(why)
                failure = f"its disk fails: {why}"
            slow.cancel()
            self.on_written(votes, failure)
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
