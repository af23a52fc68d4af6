"""`RunCheckpoints`: the checkpoints of one run on this machine's disk."""

from __future__ import annotations

import logging
from hashlib import blake2b
from pathlib import Path
from typing import Final

from ringfort.cluster.core.peer_messages import Epoch
from ringfort.errors import CheckpointError, DistributedError
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

    def __init__(self, folder: str | None, every: int, keep: int, run: str, settings: str) -> None:
        self._every = every
        self._run = run
        self._settings = settings
        self._folder = None if folder is None else CheckpointFolder(folder, keep)
        self._name = None if self._folder is None else WriterName(self._folder.folder)
        self._writer: CheckpointWriter | None = None
        if self._folder is not None and self._name is not None:
            self._writer = CheckpointWriter(self._folder, self._name.name)
        self.saved = None if self._folder is None else self._newest(self._folder)
        """The newest checkpoint that fits the run, until the run has a state."""

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

    def _newest(self, folder: CheckpointFolder) -> Saved | None:
        try:
            return folder.newest(lambda stamp: stamp.run == self._run and stamp.settings == self._settings)
        except DistributedError as exc:  # such as a folder that may not be read
            _log.warning("%s. No checkpoint is used", exc)
            return None

    def _stamp(self, mark: Mark, number: int) -> Stamp:
        return Stamp(self._run, mark.branch, number, mark.step, mark.cursor, mark.chain, self._settings)
