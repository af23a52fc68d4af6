"""`TrainerCheckpoints`: the checkpoints of a Trainer on the local disk of each machine, of which none need be there.

The Trainer writes its folder `checkpoint-STEP` on each machine, and each rank its random state. Then the machines give
each other the files that they lack, and each writes a seal into its folder: the name, size and hash of every file. The
seal comes last and is renamed into place, so a folder is whole or has no seal. A group that starts asks which machine
has the newest folder that agrees with its seal, and that one gives it to the others. All files are opaque bytes here.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import msgspec
import numpy as np

from ringfort.backends.sub import SubBackend
from ringfort.context import DistributedContext
from ringfort.errors import CheckpointError, InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.training.elastic.checkpoint import sync_folder, translated
from ringfort.training.elastic.state_tree import HASH

_log = logging.getLogger("ringfort.torch.checkpoints")  # a child of the one that `--torch-backend` shows

SEAL: Final = "ringfort.json"
BLOCK: Final = 8 * 1024 * 1024
"""Bytes that are read, hashed and sent at once."""


_Place = tuple[float, Annotated[int, msgspec.Meta(ge=0)]]


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a seal says of a file."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    hash: str


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes a folder a checkpoint."""

    run: float
    """When the run began, in seconds since 1970: of two runs in one folder the later one counts."""
    step: int
    files: dict[str, File]

    @property
    def place(self) -> tuple[float, int]:
        """The larger it is, the newer the checkpoint."""
        return self.run, self.step


class TrainerCheckpoints:
    """The checkpoints of one run. Every rank has one, and every rank makes the same calls."""

    def __init__(
        self, context: DistributedContext, folder: Path, keep: int, *, is_writer: bool, timeout: float
    ) -> None:
        """`is_writer` says whether this rank has its machine's folder: one rank of each machine does. `timeout` bounds
        how long others may take to read, write or receive a checkpoint."""
        if type(keep) is not int or keep < 1:
            raise InvalidArgumentError("keep", keep, "must be a whole number of at least 1")
        self._context = context
        self._folder = folder
        self._keep = keep
        self._is_writer = is_writer
        self._timeout = timeout

    def newest(self) -> tuple[float, Path] | None:
        """Return the newest checkpoint that any machine has, and when its run began. Afterwards every machine has it.

        Raise `CheckpointError` if it cannot be read or written."""
        own = self._newest_whole() if self._is_writer else None
        offers = self._context.all_gather_object(own and own.place, timeout=self._timeout)
        best = max((self._place(offer) for offer in offers if offer is not None), default=None)
        if best is None:
            return None
        run, step = best
        path, is_missing = self._path(step), self._is_writer and (own is None or own.place != best)
        with translated(path):
            if is_missing:
                discard(path)
            files = self._completed(path, own.files if own and not is_missing else {})
            if is_missing:
                _write_seal(path, Seal(run, step, files))
        self._context.barrier(timeout=self._timeout)
        if self._context.rank == 0:
            having = [str(rank) for rank, offer in enumerate(offers) if offer is not None and tuple(offer) == best]
            _log.info("Continuing after step %d; its checkpoint was at rank %s", step, " and ".join(having))
        return run, path

    def seal(self, run: float, step: int, best: str | None = None) -> None:
        """Make a checkpoint of what the Trainer has just written, and remove older ones, but not the folder `best`.
        Raise `CheckpointError` if the disk does not take it."""
        path = self._path(step)
        self._context.barrier(timeout=self._timeout)  # the other ranks of this machine have written their files
        with translated(path):
            described = {name: _described(path / name) for name in _names(path)} if self._is_writer else {}
            files = self._completed(path, described)
            if self._is_writer:
                if not files:
                    raise CheckpointError(str(path), "no machine has written a file of it")
                _write_seal(path, Seal(run, step, files))
                own_trace().event("checkpoint", f"{platform.node()} has saved step {step}")
                self._remove_old(run, step, best and Path(best).name)

    def _remove_old(self, run: float, step: int, best: str | None) -> None:
        """Remove all but the last `keep` checkpoints up to this one. One that claims to be newer is damaged, or else
        the run would have continued after it."""
        sealed = self._sealed()
        kept = [seal.step for seal in sealed if seal.place <= (run, step)][: self._keep]
        for path in (self._path(seal.step) for seal in sealed if seal.step not in kept):
            if path.name != best:
                discard(path)

    def _completed(self, path: Path, files: dict[str, File]) -> dict[str, File]:
        """Give each machine the files of a checkpoint that it lacks and another has. Return those that it has then."""
        told = msgspec.to_builtins(files) if self._is_writer else None
        lists = self._context.all_gather_object(told, timeout=self._timeout)
        have = {rank: msgspec.convert(one, dict[str, File]) for rank, one in enumerate(lists) if one is not None}
        owners = {name: rank for rank in reversed(have) for name in have[rank]}
        groups = dict[tuple[int, ...], DistributedContext]()
        for name, owner in sorted(owners.items()):
            members = (owner, *(rank for rank in have if name not in have[rank]))
            if len(members) == 1 or self._context.rank not in members:
                continue
            if members not in groups:
                sub = SubBackend(self._context.backend, members, is_ordered=True, is_brief=True)
                groups[members] = DistributedContext(sub)
            self._hand_over(groups[members], path, name, have[owner][name])
            files = files | {name: have[owner][name]}
        for group in groups.values():
            group.close()
        return files

    def _hand_over(self, group: DistributedContext, path: Path, name: str, file: File) -> None:
        """Send a file from rank 0 of `group` to its other ranks, in blocks."""
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(str(path), f"another machine gave the invalid name {name!r}")
        is_sender = group.rank == 0
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        digest, block = blake2b(digest_size=HASH), np.zeros(min(BLOCK, file.nbytes), np.uint8)
        with (path / name).open("rb" if is_sender else "wb") as disk:
            for start in range(0, file.nbytes, BLOCK):
                part = block[: file.nbytes - start]
                if is_sender:
                    found = np.frombuffer(disk.read(len(part)), np.uint8)
                    part[: len(found)] = found
                digest.update(group.broadcast(part, timeout=self._timeout))
                if not is_sender:
                    disk.write(memoryview(part))
        if digest.hexdigest() != file.hash:
            raise CheckpointError(str(path / name), "its bytes changed while it was handed over")

    def _newest_whole(self) -> Seal | None:
        """Return the newest checkpoint here that agrees with its seal. Log why newer ones do not."""
        for seal in self._sealed():
            path = self._path(seal.step)
            damaged = [name for name, file in seal.files.items() if not _agrees(path / name, file)]
            if not damaged:
                return seal
            _log.warning("Checkpoint %s: %s is damaged or missing. The one before it is tried", path, damaged[0])
        return None

    def _sealed(self) -> list[Seal]:
        """Return the seals of this machine, newest first."""
        found = list[Seal]()
        for path in self._folder.glob(f"checkpoint-*/{SEAL}"):
            try:
                seal = msgspec.json.decode(path.read_bytes(), type=Seal)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
                _log.warning("%s cannot be read, so that checkpoint is not used: %s", path, exc)
                continue
            if path.parent == self._path(seal.step):
                found.append(seal)
        return sorted(found, key=lambda seal: seal.place, reverse=True)

    def _place(self, offer: object) -> tuple[float, int]:
        """Return which checkpoint another machine has: its step becomes the name of a folder."""
        try:
            return msgspec.convert(offer, _Place)
        except msgspec.ValidationError as exc:
            raise CheckpointError(str(self._folder), "another machine gave an invalid step") from exc

    def _path(self, step: int) -> Path:
        return self._folder / f"checkpoint-{step}"


def discard(path: Path) -> None:
    """Remove what an earlier run, or a hand-over that was cut off, has left where a checkpoint will be written."""
    if path.exists():
        with translated(path):
            (path / SEAL).unlink(missing_ok=True)  # first, so that a folder that is half removed has none
            shutil.rmtree(path)


def _names(path: Path) -> list[str]:
    """Return the files below a folder, but not its seal."""
    files = (file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return sorted(name for name in files if not name.startswith(SEAL))


def _described(path: Path) -> File:
    digest = blake2b(digest_size=HASH)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
        return File(file.tell(), digest.hexdigest())


def _agrees(path: Path, file: File) -> bool:
    try:
        return path.is_file() and path.stat().st_size == file.nbytes and _described(path) == file
    except OSError as exc:  # of a damaged disk
        _log.warning("%s cannot be read: %s", path, exc)
        return False


def _write_seal(path: Path, seal: Seal) -> None:
    """Write the seal, after everything that it seals has reached the disk."""
    path.mkdir(parents=True, exist_ok=True)
    for name in seal.files:
        _flush(path / name)
    for folder in {(path / name).parent for name in seal.files}:
        sync_folder(folder)
    fresh = path / f"{SEAL}.new"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(seal)))
    _flush(fresh)
    fresh.replace(path / SEAL)
    sync_folder(path)
    sync_folder(path.parent)


def _flush(path: Path) -> None:
    """Make the bytes of a file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
