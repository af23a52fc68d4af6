"""`Segment`: memory that several processes of one machine share, and that ends with the last of them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from ringfort.errors import TransportError

TOKEN_BYTES = 32
PAGE = 4096
"""Bytes before what the segment is for: room for the token, and what follows is aligned."""

_NO_SHRINK: int = getattr(fcntl, "F_SEAL_SHRINK", 0)
_PLACE = re.compile(r"/proc/\d+/fd/\d+")
_HAS_MEMFD = sys.platform == "linux" and _NO_SHRINK > 0


class Offer(msgspec.Struct, frozen=True):
    """Where a segment is, for a process of the same machine and user, and what proves that it is the one."""

    path: str
    size: int
    token: bytes


class Segment:
    """Shared memory. `memory` is what all who have opened it see."""

    def __init__(self, fd: int, offer: Offer, folder: Path | None = None) -> None:
        """Take over `fd`, through which others may open memory that has no name."""
        self._map = mmap.mmap(fd, offer.size)
        self._fd = fd
        self.offer = offer
        self.memory = memoryview(self._map)[PAGE:]
        self._folder = folder

    @classmethod
    def create(cls, size: int) -> Segment:
        """Return a new segment with `size` bytes of zeros. Raises `TransportError` if there is not enough memory."""
        size += PAGE
        token = secrets.token_bytes(TOKEN_BYTES)
        folder: Path | None = None
        fd = -1
        try:
            if _HAS_MEMFD:
                fd = os.memfd_create("ringfort", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.fchmod(fd, 0o600)  # it is made with 0777, whatever the umask
                path = f"/proc/{os.getpid()}/fd/{fd}"
            else:
                folder = Path(tempfile.mkdtemp(prefix="ringfort-"))  # mode 0700
                path = str(folder / "segment")
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, size)
            if _HAS_MEMFD:  # nobody can take the memory away under the others
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NO_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            segment = cls(fd, Offer(path, size, token), folder)
        except (OSError, ValueError) as exc:  # mmap raises it for an invalid size
            with suppress(OSError):
                os.close(fd)
            _remove(folder)
            raise TransportError(f"Cannot allocate {size} bytes of shared memory: {exc}") from exc
        segment._map[:TOKEN_BYTES] = token
        return segment

    @classmethod
    def open(cls, offer: Offer, size: int) -> Segment:
        """Return the segment of `size` bytes that another process made. Raises `TransportError` if it cannot be opened
        or is another one: this process may see other files under the same name."""
        try:
            if _HAS_MEMFD and not _PLACE.fullmatch(offer.path):  # opening a device can have effects of its own
                raise OSError(errno.EINVAL, "not a shared-memory file")
            fd = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                _check(fd, offer, size + PAGE)
                segment = cls(fd, offer)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            raise TransportError(f"Cannot open the shared memory of another process: {why}") from exc
        segment.settle()
        if not secrets.compare_digest(segment._map[:TOKEN_BYTES], offer.token):
            segment.close()
            raise TransportError("The shared memory of another process is not the one that it offered")
        return segment

    def settle(self) -> None:
        """Remove the name of the segment, once everybody has opened it, so that it ends with the last process that uses
        it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _remove(self._folder)
        self._folder = None

    def close(self) -> None:
        """Close this process's view of the memory, at the latest when its last user is gone. May be called twice."""
        self.settle()
        self.memory = memoryview(b"")
        with suppress(BufferError):  # somebody still holds a piece; it goes with that
            self._map.close()


def _remove(folder: Path | None) -> None:
    if folder is not None:
        with suppress(OSError):  # a cleaner of old files has removed it already
            (folder / "segment").unlink(missing_ok=True)
            folder.rmdir()


def _check(fd: int, offer: Offer, size: int) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != offer.size or offer.size != size:
        raise OSError(errno.EINVAL, "not the file that was offered")
    if found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "the file belongs to another user")
    if _HAS_MEMFD and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NO_SHRINK:
        raise OSError(errno.EINVAL, "the file could be truncated")
