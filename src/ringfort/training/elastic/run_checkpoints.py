"""`RunCheckpoints`: the checkpoints of one run on this machine's disk."""

from __future__ import annotations

import logging
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import CheckpointError
from ringfort.training.elastic.checkpoint import CheckpointFolder, Saved, Stamp
from ringfort.training.elastic.checkpoint_writer import CheckpointWriter, is_due
from ringfort.training.elastic.protocol import FOUNDING, Mark
from ringfort.training.elastic.state_tree import Image, StateTree
from ringfort.training.elastic.writer_name import WriterName

_log = logging.getLogger(__name__)

_LAST_WRITE: Final = 60.0
"""Seconds that the last checkpoint may take when the run is closed."""


class RunCheckpoints:
    """Finds the newest checkpoint, and writes one every `every` steps. Without a folder it does neither."""

    def __init__(self, folder: str | PathLike[str] | None, every: int, keep: int, run: str, settings: str) -> None:
        """Raise `InvalidArgumentError` if the folder cannot be used. `look` finds what is there."""
        self._every = every
        self._run = run
        self._settings = settings
        self._folder = None if folder is None else CheckpointFolder(folder, keep)
        if self._folder is not None:
            self._folder.check()
        self._name = None if self._folder is None else WriterName(self._folder.folder)
        self._writer: CheckpointWriter | None = None
        if self._folder is not None and self._name is not None:
            self._writer = CheckpointWriter(self._folder, self._name.name)
        self.saved: Saved | None = None
        """The newest checkpoint that fits the run, until the run has a state."""

    def look(self, state: StateTree) -> None:
        """Find the newest checkpoint of this run that fits the program's state, which may lack leaves that are created
        later. Those of other runs are named in the log and left alone."""
        if self._folder is None:
            return
        try:
            self.saved = self._folder.newest(lambda found: self._unfit(found, state))
        except CheckpointError as exc:  # such as a disk that cannot be read
            _log.warning("%s. No checkpoint is used", exc)

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        return FOUNDING if self.saved is None else self.saved.stamp.step

    def save(self, mark: Mark, epoch: Epoch, me: int, state: StateTree, *, is_last: bool) -> None:
        """Write the state in the background, if it is this member's turn or the last step."""
        is_mine = mark.step > 0 and is_due(mark.step, me, len(epoch.holders), self._every)
        if self._writer is not None and (is_mine or is_last):
            self._writer.submit(self._stamp(mark, epoch.number), state.image())

    def save_apart(self, mark: Mark, number: int, image: Image) -> str:
        """Write the state of a branch that gives way into a folder of its own. Return what became of it, in words."""
        if self._folder is None or self._name is None:
            return "without checkpoint= its state is dropped"
        digest = blake2b(mark.branch.encode(), digest_size=4).hexdigest()
        apart = CheckpointFolder(Path(f"{self._folder.folder}-{digest}"), self._folder.keep)
        try:
            return f"its state is in {apart.write(self._stamp(mark, number), image, self._name.name)}"
        except CheckpointError as exc:
            return f"its state is dropped, because it cannot be written: {exc}"

    def close(self) -> None:
        """Wait for the last write. Idempotent."""
        try:
            if self._writer is not None:
                self._writer.close(_LAST_WRITE)
        finally:
            if self._name is not None:
                self._name.close()

    def _unfit(self, found: Saved, state: StateTree) -> str:
        """Return why a checkpoint is not one of this run; empty if it is."""
        stamp = found.stamp
        if stamp.run != self._run:
            return f"it is of the run {stamp.run!r}, and this is {self._run!r}"
        if stamp.settings != self._settings:
            return f"it is of a run with {stamp.settings}, and this one has {self._settings}"
        why = state.misfit(found.manifest)
        return why and f"it is of a run with another state: {why}"

    def _stamp(self, mark: Mark, number: int) -> Stamp:
        return Stamp(self._run, mark.branch, number, mark.step, mark.cursor, mark.chain, self._settings)
