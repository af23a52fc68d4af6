"""Checkpoints of a run on local disks: one file each, written whole or not at all, with a hash per block.

    magic, version, length of the head, hash of the head      32 bytes
    head                                                      msgpack: what run, where in it, the manifest of the state
    the state's arrays                                        as they are in memory

A file is written under another name, flushed to the disk and then renamed, so a power cut leaves the old files or the
new one. No folder is shared: each machine keeps the latest few of its own, and a run that lost all its memory continues
with the newest that any machine has.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np

from ringfort.errors import CheckpointError, DistributedError, InvalidArgumentError
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import BLOCK, HASH, Image, Manifest, hashed

_log = logging.getLogger(__name__)

VERSION: Final = 2
"""Format 1 had no tree in its manifest."""
_MAGIC: Final = b"ringfort"
_START: Final = struct.Struct("<8sII16s")
_MAX_HEAD: Final = 256 * 1024 * 1024
"""Bytes. A million arrays and a terabyte of blocks need less."""
_NAME: Final = re.compile(r"step-(\d{9,18})-([0-9a-f]{8})-([0-9a-z]+)\.(ringfort|new)")
"""Step, digest of run and branch, writer; `.new` while it is written."""
_HOPELESS: Final = (errno.EEXIST, errno.ENOTDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
"""A folder that cannot be made for one of these reasons is a mistake in its name."""
_ADVICE: Final = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "free some space, or keep fewer checkpoints",
    errno.EEXIST: "choose a folder, not a file",
    errno.ENOTDIR: "choose a folder, not a file",
    errno.EACCES: "choose a folder that this user may write",
    errno.EROFS: "choose a folder that this user may write",
}

Count = Annotated[int, msgspec.Meta(ge=0)]


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which run a checkpoint is of, and where in it."""

    run: Annotated[str, msgspec.Meta(max_length=256)]
    branch: Annotated[str, msgspec.Meta(max_length=128)]
    epoch: Count
    step: Count
    cursor: Count
    """Samples that were consumed, over all passes."""
    chain: Annotated[bytes, msgspec.Meta(max_length=64)]
    settings: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """What all members must agree on: the data set, the batch, the seed."""

    @property
    def mark(self) -> Mark:
        """The mark of a member with this state."""
        return Mark(self.branch, self.step, self.chain, self.cursor)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stamp: Stamp
    manifest: Manifest


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk, of which only the head was read."""

    path: Path
    stamp: Stamp
    manifest: Manifest
    nbytes: int
    """Bytes of the file."""
    written: float
    """When it was written, in seconds since 1970."""

    def read(self) -> Image:
        """Return the state. Raise `CheckpointError` if a block is damaged."""
        data = np.empty(self.manifest.nbytes, np.uint8)
        self._read(lambda index: memoryview(data)[index * BLOCK : (index + 1) * BLOCK])
        return Image(self.manifest, data)

    def verify(self) -> None:
        """Read every block, in little memory. Raise `CheckpointError` if one is damaged."""
        block = memoryview(bytearray(BLOCK))
        self._read(lambda index: block[: self.manifest.nbytes - index * BLOCK])

    def _read(self, memory: Callable[[int], memoryview]) -> None:
        damaged = list[int]()
        with translated(self.path), self.path.open("rb") as file:
            file.seek(self.nbytes - self.manifest.nbytes)
            for index, expected in enumerate(self.manifest.hashes):
                block = memory(index)
                if file.readinto(block) != len(block) or _hash(block) != expected:
                    damaged.append(index)
        if damaged:
            count, total = len(damaged), len(self.manifest.hashes)
            why = (
                f"{count} of {total} blocks of 1 MiB {'is' if count == 1 else 'are'} damaged, first block {damaged[0]}"
            )
            raise CheckpointError(str(self.path), why)


class _File(NamedTuple):
    """A file of a folder, as its name tells."""

    step: int
    branch: str
    writer: str
    path: Path


class CheckpointFolder:
    """The checkpoints of one machine."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if type(keep) is not int or keep < 1:
            raise InvalidArgumentError("keep", keep, "must be a whole number of at least 1")
        self.folder = Path(folder)
        self.keep = keep

    def write(self, stamp: Stamp, image: Image, writer: str) -> Path:
        """Write a checkpoint, then remove older ones of `writer`. Raise `CheckpointError` if the disk does not take it;
        nothing is lost then.

        `writer` names this process among those that write into the folder, in lower-case letters and digits. A machine
        that restarts uses the same name again, so that its old files are removed some day: the latest `keep` files of
        this branch stay, and the latest of the run's other branches, which may have gone further. Files of other runs
        stay, and so do those that cannot be read: a later version may.
        """
        whole = hashed(image, _hash)
        head = msgspec.msgpack.encode(_Head(stamp, whole.manifest))
        branch = blake2b(f"{stamp.run}\n{stamp.branch}".encode(), digest_size=4).hexdigest()
        path = self.folder / f"step-{stamp.step:09d}-{branch}-{writer}.ringfort"
        if not _NAME.fullmatch(path.name):
            raise InvalidArgumentError("writer", writer, "must be lower-case letters and digits")
        temporary = path.with_suffix(".new")
        with translated(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self._files(".new"):  # of a process that was killed while it wrote
                if left.writer == writer:
                    left.path.unlink(missing_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.write(_START.pack(_MAGIC, VERSION, len(head), _hash(head)))
                    file.write(head)
                    file.write(memoryview(whole.data))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            sync_folder(self.folder)  # the new name must survive a power cut before old files are removed
            own = [file for file in self._files() if file.writer == writer]
            superfluous = [file for file in own if file.branch == branch][self.keep :]
            superfluous += [file for file in own if file.branch != branch and _is_of(file.path, stamp, image.manifest)][
                1:
            ]
            for file in superfluous:
                file.path.unlink(missing_ok=True)
        return path

    def saved(self) -> Iterator[Saved | CheckpointError]:
        """Yield every checkpoint, newest first; for a file that cannot be used, the reason. Only heads are read."""
        with translated(self.folder):
            files = self._files()
        for file in files:
            try:
                yield open_checkpoint(file.path)
            except CheckpointError as exc:
                if not isinstance(exc.__cause__, FileNotFoundError):  # otherwise its writer has removed it meanwhile
                    yield exc

    def newest(self, unfit: Callable[[Saved], str]) -> Saved | None:
        """Return the newest checkpoint for which `unfit` returns no reason against it, after reading every block of it.
        Log why others that are newer cannot be used; of those that are unfit for one reason, only the first."""
        told = set[str]()
        for found in self.saved():
            try:
                if isinstance(found, CheckpointError):
                    raise found
                why = unfit(found)
                if not why:
                    found.verify()
                    return found
                if why not in told:
                    told.add(why)
                    raise CheckpointError(str(found.path), why)
            except CheckpointError as exc:
                _log.warning("%s. The one before it is tried", exc)
        return None

    def check(self) -> None:
        """Make the folder. Raise `InvalidArgumentError` if no checkpoint could ever be written there; a disk that is
        full or broken may be repaired while the run goes on."""
        try:
            with translated(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except CheckpointError as exc:
            if isinstance(exc.__cause__, OSError) and exc.__cause__.errno in _HOPELESS:
                raise InvalidArgumentError("checkpoint", str(self.folder), f"cannot be used: {exc.why}") from exc

    def _files(self, suffix: str = ".ringfort") -> list[_File]:
        """Return the files, newest first. There are none if the folder does not exist."""
        found = list[_File]()
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and path.suffix == suffix:
                    found.append(_File(int(match[1]), match[2], match[3], path))
        return sorted(found, reverse=True)


def _is_of(path: Path, stamp: Stamp, manifest: Manifest) -> bool:
    """Return whether a file is of the run of `stamp`, whose state has that manifest."""
    try:
        found = open_checkpoint(path)
    except CheckpointError:
        return False
    is_same = (found.stamp.run, found.stamp.settings) == (stamp.run, stamp.settings)
    return is_same and not manifest.differences(found.manifest)


def open_checkpoint(path: Path) -> Saved:
    """Read the head of a checkpoint. Raise `CheckpointError` if it is damaged, cut short or of a newer version."""
    with translated(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        start = file.read(_START.size)
        if len(start) != _START.size or not start.startswith(_MAGIC):
            raise CheckpointError(str(path), "not a checkpoint of Ringfort")
        _, version, length, expected = _START.unpack(start)
        if version > VERSION:
            raise CheckpointError(str(path), f"has format {version}, newer than {VERSION}; pip install -U ringfort")
        data = file.read(length) if length <= min(_MAX_HEAD, status.st_size) else b""
    if len(data) != length or _hash(data) != expected:
        raise CheckpointError(str(path), "its head is damaged or cut short")
    try:
        head = msgspec.msgpack.decode(data, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise CheckpointError(str(path), f"its head is invalid: {exc}") from exc
    nbytes = head.manifest.nbytes
    if nbytes < 0 or len(head.manifest.hashes) != -(-nbytes // BLOCK):
        raise CheckpointError(str(path), "its head is invalid: it does not have a hash for each block")
    whole = _START.size + length + nbytes
    if status.st_size != whole:
        raise CheckpointError(str(path), f"has {status.st_size} bytes instead of {whole}; it was cut short or changed")
    return Saved(path, head.stamp, head.manifest, whole, status.st_mtime)


def _hash(block: memoryview | bytes) -> bytes:
    """Return the hash of one block of a file; the format has it, so it never changes."""
    return blake2b(block, digest_size=HASH).digest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)


@contextmanager
def translated(path: Path) -> Generator[None]:
    """Raise `OSError` as `CheckpointError`, with what to do where that is known."""
    try:
        yield
    except DistributedError:  # ours already: a `CheckpointError`, or a lost peer's, which is a ConnectionError too
        raise
    except OSError as exc:
        why = exc.strerror or str(exc)
        advice = _ADVICE.get(exc.errno or 0)
        raise CheckpointError(str(path), why[:1].lower() + why[1:] + (f"; {advice}" if advice else "")) from exc
