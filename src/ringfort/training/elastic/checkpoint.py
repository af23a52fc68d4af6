"""Checkpoints of a run on local disks: one file each, written whole or not at all, with a hash per block.

    magic, version, length of the head      16 bytes
    head                                    msgpack: what run, where in it, the manifest of the state
    the state's arrays                      as they are in memory

A file is written under another name, flushed to the disk and then renamed, so a power cut leaves the old files or the
new one. No folder is shared: each machine keeps the latest few of its own, and a run that lost all its memory continues
with the newest that any machine has.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from ringfort.errors import CheckpointError
from ringfort.training.elastic.protocol import Mark
from ringfort.training.elastic.state_tree import BLOCK, Image, Manifest, block_hash, hashed

VERSION: Final = 1
_MAGIC: Final = b"ringfort"
_START: Final = struct.Struct("<8sII")
_MAX_HEAD: Final = 256 * 1024 * 1024
"""Bytes. A million arrays and a terabyte of blocks need less."""
_NAME: Final = re.compile(r"step-(\d{1,18})-[0-9a-z]+\.ringfort")


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which run a checkpoint is of, and where in it."""

    run: Annotated[str, msgspec.Meta(max_length=256)]
    branch: Annotated[str, msgspec.Meta(max_length=128)]
    epoch: int
    step: int
    cursor: int
    chain: bytes
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
    """A checkpoint on the disk."""

    path: Path
    stamp: Stamp
    manifest: Manifest
    _begin: int

    def read(self) -> Image:
        """Return the state. Raise `CheckpointError` if a block is damaged."""
        data = np.empty(self.manifest.nbytes, np.uint8)
        with _translated(self.path), self.path.open("rb") as file:
            file.seek(self._begin)
            for index, expected in enumerate(self.manifest.hashes):
                block = memoryview(data)[index * BLOCK : (index + 1) * BLOCK]
                if file.readinto(block) != len(block) or block_hash(block) != expected:
                    raise CheckpointError(str(self.path), f"block {index} is damaged or missing")
        return Image(self.manifest, data)


class CheckpointFolder:
    """The checkpoints of one machine."""

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def write(self, stamp: Stamp, image: Image, writer: str) -> Path:
        """Write a checkpoint, then remove all but the latest `keep` of `writer`, which is a name of this process. Raise
        `CheckpointError` if the disk does not take it; nothing is lost then."""
        whole = hashed(image)
        head = msgspec.msgpack.encode(_Head(stamp, whole.manifest))
        path = self.folder / f"step-{stamp.step:09d}-{writer}.ringfort"
        temporary = path.with_suffix(".new")
        with _translated(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.write(_START.pack(_MAGIC, VERSION, len(head)))
                    file.write(head)
                    file.write(memoryview(whole.data))
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)  # the new name must survive a power cut before old files are removed
            finally:
                os.close(handle)
            for old in self._files(writer)[self.keep :]:
                old.unlink(missing_ok=True)
        return path

    def saved(self) -> Iterator[Saved | CheckpointError]:
        """Yield every checkpoint, newest first; for a file that cannot be used, the reason."""
        for path in self._files():
            try:
                yield open_checkpoint(path)
            except CheckpointError as exc:
                yield exc

    def _files(self, writer: str | None = None) -> list[Path]:
        """Return the files, newest first."""
        found = list[tuple[int, str, Path]]()
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match and (writer is None or path.name.endswith(f"-{writer}.ringfort")):
                    found.append((int(match[1]), path.name, path))
        return [path for _, _, path in sorted(found, reverse=True)]


def open_checkpoint(path: Path) -> Saved:
    """Read the head of a checkpoint. Raise `CheckpointError` if it is damaged or of a newer version."""
    with _translated(path), path.open("rb") as file:
        start = file.read(_START.size)
        if len(start) != _START.size or not start.startswith(_MAGIC):
            raise CheckpointError(str(path), "is not a checkpoint of Ringfort")
        _, version, length = _START.unpack(start)
        if version > VERSION:
            why = f"has format {version}, newer than {VERSION}; run: pip install -U ringfort"
            raise CheckpointError(str(path), why)
        if length > _MAX_HEAD:
            raise CheckpointError(str(path), "its head is damaged")
        try:
            head = msgspec.msgpack.decode(file.read(length), type=_Head)
        except (msgspec.ValidationError, msgspec.DecodeError) as exc:
            raise CheckpointError(str(path), "its head is damaged") from exc
        return Saved(path, head.stamp, head.manifest, _START.size + length)


@contextmanager
def _translated(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as exc:
        raise CheckpointError(str(path), exc.strerror or str(exc)) from exc
