"""What each process of this node has promised, in a file that outlives it: the next process keeps to it, and vouches
for the one that has ended.

A process holds a lock on its file for as long as it lives. Whoever gets the lock knows that the other has ended, if it
is the file that was locked and not a copy of it: a file says on which machine it was written, and which file it was.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final

import msgspec

from ringfort.cluster.core.membership import is_binding, promised_by
from ringfort.cluster.core.peer_messages import Standing
from ringfort.errors import IdentityError, ProtocolError
from ringfort.identity import files
from ringfort.identity.hosts import HostMarks, this_host

_log = logging.getLogger(__name__)

FOLDER: Final = "standings"
KEPT_FOR: Final = 24 * 3600.0
"""Seconds for which a process that has ended is remembered: a run that still waits for it is resumed by then."""
_CLOCK_IS_SET: Final = 1.7e9
"""Seconds since 1970, in November 2023: a clock that shows less is wrong."""
TOUCHED_EVERY: Final = 600.0
"""Seconds after which a process that lives marks its file as new, so that a long run is not forgotten."""
MAX_VOUCHED: Final = 32
"""The latest that are vouched for; each is told to every peer that is met."""
_HEAD: Final = Struct("<IIQ")
"""Length, checksum and number of what follows. The higher number is the later one."""
_PLACE: Final = 1 << 20
"""Bytes between the two places of a file; what nobody has written takes no room on the disk."""


class _Content(msgspec.Struct, frozen=True):
    host: HostMarks
    file: tuple[int, int]
    """Device and inode of the file itself."""
    standing: Standing
    is_released: bool = False
    """It left in the sight of all: what it promised binds nobody."""


_decoder = msgspec.msgpack.Decoder(_Content)


class StandingStore:
    """This process's file, and those of the others of the same node and cluster."""

    def __init__(
        self,
        home: Path,
        network: str,
        peer: str,
        host: HostMarks | None = None,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        self._folder = home / FOLDER
        self._prefix = f"{network}-"
        self._peer = peer
        self._host = this_host() if host is None else host
        self._standing = Standing()
        self._number = 0
        self._handle = -1
        self._fsync = fsync
        self._touched = time.monotonic()
        self._warned: set[Path] = set()

    def open(self) -> None:
        """Makes and locks the file. Raises `IdentityError`, with what mends it, where that cannot be."""
        files.ensure_folder(self._folder)
        path = self._path(self._peer)
        # It gets its name when it is locked: one that is not yet would be taken for that of a process that has ended.
        coming = path.with_name(f".{path.name}")
        try:
            self._handle = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._put(self._standing)
            coming.rename(path)
        except OSError as exc:
            with suppress(OSError):
                coming.unlink()
            raise IdentityError(path, exc.strerror or str(exc), "export RINGFORT_HOME=/a/folder/of/your/own") from exc

    @property
    def path(self) -> Path:
        """This process's file."""
        return self._path(self._peer)

    def write(self, standing: Standing) -> None:
        """On the disk when this returns: the machine may lose power after the promise is given. Where this raises
        `OSError`, the promise before is there as it was. May be called in another thread than the rest, one at a time.
        """
        if self._handle < 0:
            return
        self._put(standing)
        self._fsync(self._handle)
        self._standing = standing

    def touch(self) -> None:
        """To be called now and then: this process still lives."""
        if self._handle >= 0 and time.monotonic() - self._touched >= TOUCHED_EVERY:
            self._touched = time.monotonic()
            with suppress(OSError):
                os.utime(self._handle)

    def dead(self) -> list[tuple[str, Standing]]:
        """The processes that have surely ended, latest first, with the last each promised. Old files are removed."""
        found: list[tuple[float, str, Standing]] = []
        for path, age, content, has_ended in self._others():
            if has_ended:
                found.append((age, self._peer_of(path), content.standing))
        return [(peer, standing) for _, peer, standing in sorted(found, key=lambda one: one[:2])[:MAX_VOUCHED]]

    def recalled(self) -> list[Standing]:
        """What other processes of this node have promised that binds a new one: also of those that may live, for a new
        process may be there before the old one has quite gone."""
        return [
            promised_by(self._peer_of(path), content.standing)
            for path, _, content, _ in self._others()
            if not content.is_released
        ]

    def close(self, *, is_released: bool = False) -> None:
        """This process ends. Nothing is left of one that nobody could be split from."""
        if self._handle >= 0:
            with suppress(OSError):
                if not is_binding(promised_by(self._peer, self._standing)):
                    self._path(self._peer).unlink()
                elif is_released:
                    self._put(self._standing, is_released=True)
            os.close(self._handle)
            self._handle = -1

    def _put(self, standing: Standing, *, is_released: bool = False) -> None:
        """Writes to the one of two places in the file that is not the latest: a disk that is full, or power that is
        lost, damages nothing that was there. (A new file in its place would need a lock of its own.)"""
        status = os.fstat(self._handle)
        content = _Content(self._host, (status.st_dev, status.st_ino), standing, is_released)
        data = msgspec.msgpack.encode(content)
        record = _HEAD.pack(len(data), zlib.crc32(data), self._number + 1) + data
        if os.pwrite(self._handle, record, (self._number + 1) % 2 * _PLACE) < len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._number += 1

    def _others(self) -> Iterator[tuple[Path, float, _Content, bool]]:
        """Each other process of this node that somebody may remember: its file, its age, what is in it, and whether it
        has surely ended."""
        for path in sorted(self._folder.glob(f"{self._prefix}*")):
            peer = self._peer_of(path)
            if peer == self._peer or peer.rpartition(".")[0] != self._peer.rpartition(".")[0]:
                continue
            with suppress(OSError, ProtocolError):
                age, content, has_ended = self._read(path)
                if age > KEPT_FOR and has_ended:
                    path.unlink()
                elif is_binding(promised_by(peer, content.standing)):
                    yield path, age, content, has_ended
                elif has_ended:
                    path.unlink()

    def _read(self, path: Path) -> tuple[float, _Content, bool]:
        """Raises `OSError`, or `ProtocolError` for a file that is not whole."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except OSError:  # its process lives; or there are no locks here, and nobody can tell
                is_free = False
            status = os.fstat(handle)
            content = _decoded(os.pread(handle, _PLACE, 0), os.pread(handle, _PLACE, _PLACE))
        finally:
            os.close(handle)
        is_own = self._wrote(content, status)
        if is_free and not is_own and path not in self._warned:
            self._warned.add(path)
            _log.warning(
                "%s was written on another machine or is a copy. This machine does not say that its process has "
                "ended. If that process is gone for good: rm %s",
                path,
                path,
            )
        # Where it was written before the clock was set, as on a machine that has none of its own, the age is unknown.
        age = time.time() - status.st_mtime if status.st_mtime > _CLOCK_IS_SET else 0.0
        return age, content, is_free and is_own

    def _wrote(self, content: _Content, status: os.stat_result) -> bool:
        """Whether the lock on this very file was this machine's to take."""
        if self._host.boot and self._host.boot == content.host.boot:
            return content.file == (status.st_dev, status.st_ino)
        # Devices are numbered anew when a machine starts.
        return self._host.is_same(content.host) and content.file[1] == status.st_ino

    def _path(self, peer: str) -> Path:
        return self._folder / f"{self._prefix}{peer}"

    def _peer_of(self, path: Path) -> str:
        return path.name[len(self._prefix) :]


def _decoded(*places: bytes) -> _Content:
    """The latest of what is whole. Raises `ProtocolError` where nothing is."""
    found: list[tuple[int, bytes]] = []
    for place in places:
        if len(place) >= _HEAD.size:
            length, checksum, number = _HEAD.unpack_from(place)
            data = place[_HEAD.size : _HEAD.size + length]
            if len(data) == length and zlib.crc32(data) == checksum:
                found.append((number, data))
    if not found:
        raise ProtocolError("the file is not whole")
    try:
        return _decoder.decode(max(found)[1])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise ProtocolError(f"the file cannot be read: {exc}") from exc
