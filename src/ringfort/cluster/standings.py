"""What each process of this node has promised, in a file that outlives it: so that the next process can vouch for it.

A process holds a lock on its file for as long as it lives. Whoever gets the lock knows that the other has ended.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final

from ringfort.cluster.messages import Standing, decode_standing, encode_standing
from ringfort.errors import IdentityError, ProtocolError
from ringfort.identity import files

FOLDER: Final = "standings"
KEPT_FOR: Final = 24 * 3600.0
"""Seconds for which one vouches for a process that has ended: a run that still waits for it is resumed by then."""
MAX_VOUCHED: Final = 32
"""The latest that are vouched for; each is told to every peer that is met."""
_LENGTH: Final = Struct("<I")
_MAX_BYTES: Final = 1 << 20


class StandingStore:
    """This process's file, and those of the ended ones of the same node and cluster."""

    def __init__(self, home: Path, network: str, peer: str) -> None:
        self._folder = home / FOLDER
        self._prefix = f"{network}-"
        self._peer = peer
        self._handle = -1

    def open(self) -> None:
        """Makes and locks the file. Raises `IdentityError`, with what mends it, where that cannot be."""
        files.ensure_folder(self._folder)
        path = self._path(self._peer)
        # It gets its name when it is locked: one that is not yet would be taken for that of a process that has ended.
        coming = path.with_name(f".{path.name}")
        try:
            self._handle = os.open(coming, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            coming.rename(path)
        except OSError as exc:
            raise IdentityError(path, exc.strerror or str(exc), "export RINGFORT_HOME=/a/folder/of/your/own") from exc

    def write(self, standing: Standing) -> None:
        """On the disk when this returns: the machine may lose power after the promise is given."""
        if self._handle < 0:
            return
        data = encode_standing(standing)
        os.pwrite(self._handle, _LENGTH.pack(len(data)) + data, 0)
        os.fsync(self._handle)

    def dead(self) -> list[tuple[str, Standing]]:
        """The processes that have ended, latest first, with the last each promised. Old files are removed."""
        found: list[tuple[float, str, Standing]] = []
        for path in self._folder.glob(f"{self._prefix}*"):
            peer = path.name[len(self._prefix) :]
            if peer != self._peer and peer.rpartition(".")[0] == self._peer.rpartition(".")[0]:
                with suppress(OSError, ProtocolError):
                    age, standing = _read_if_dead(path)
                    if standing is not None and age <= KEPT_FOR:
                        found.append((age, peer, standing))
                    elif age > KEPT_FOR:
                        path.unlink()
        return [(peer, standing) for _, peer, standing in sorted(found, key=lambda one: one[:2])[:MAX_VOUCHED]]

    def close(self, *, forget: bool) -> None:
        """This process ends; with `forget`, nobody needs to be told what it promised."""
        if self._handle >= 0:
            if forget:
                with suppress(OSError):
                    self._path(self._peer).unlink()
            os.close(self._handle)
            self._handle = -1

    def _path(self, peer: str) -> Path:
        return self._folder / f"{self._prefix}{peer}"


def _read_if_dead(path: Path) -> tuple[float, Standing | None]:
    """Its age, and what is in it; None while its process lives. Raises `OSError`, also for that, or `ProtocolError`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        age = time.time() - os.fstat(handle).st_mtime
        data = os.read(handle, _MAX_BYTES)
        if len(data) < _LENGTH.size:
            return age, Standing()  # it ended before it promised anything
        (length,) = _LENGTH.unpack_from(data)
        return age, decode_standing(data[_LENGTH.size : _LENGTH.size + length])
    finally:
        os.close(handle)
