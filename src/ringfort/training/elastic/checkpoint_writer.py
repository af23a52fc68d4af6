"""`CheckpointWriter`: writes checkpoints in a thread of its own, so that training does not wait for the disk.

`is_due` says when a member writes. All members have the same state, so they take turns.
"""

from __future__ import annotations

import logging
import platform
import threading
from pathlib import Path
from typing import Protocol

from ringfort.errors import CheckpointError, InvalidArgumentError
from ringfort.telemetry.trace import own_trace
from ringfort.training.elastic.checkpoint import Stamp
from ringfort.training.elastic.protocol import FOUNDING
from ringfort.training.elastic.state_tree import Image

_log = logging.getLogger(__name__)


def is_due(step: int, rank: int, size: int, interval: int) -> bool:
    """Return whether the member of this `rank` writes a checkpoint after `step`. Pure.

    Each of `size` members writes once in `interval` steps, at a step of its own, evenly spaced. If there are more
    members than steps in an interval, one member writes after each step. That holds as long as the members stay the
    same; where they change, the time between two checkpoints of one member may be almost twice as long.
    """
    if interval < 1 or not 0 <= rank < size:
        raise InvalidArgumentError("interval", interval, f"must be at least 1 (rank {rank} of {size})")
    period = max(interval, size)
    return step % period == rank * period // size


class Disk(Protocol):
    """Where checkpoints go: a `CheckpointFolder`."""

    def write(self, stamp: Stamp, image: Image, writer: str) -> Path:
        """Write a checkpoint. Raise `CheckpointError` if that fails."""
        ...


class CheckpointWriter:
    """Writes one checkpoint at a time. A newer one takes the place of one that waits.

    A failed write is a warning in the log, once per reason until a write succeeds again. Training continues.
    """

    def __init__(self, disk: Disk, writer: str) -> None:
        """`writer` names this process in the folder; see `CheckpointFolder.write`."""
        self.saved_step = FOUNDING
        """The step of the newest checkpoint that this object has written."""
        self._disk = disk
        self._writer = writer
        self._lock = threading.Lock()
        self._waiting: tuple[Stamp, Image] | None = None
        self._thread: threading.Thread | None = None
        """The thread that writes; it ends when nothing waits."""
        self._is_closed = False
        self._warned: set[str] = set()

    def submit(self, stamp: Stamp, image: Image) -> None:
        """Write a checkpoint soon, and return at once. The image must not change any more."""
        with self._lock:
            if self._is_closed:
                raise InvalidArgumentError("step", stamp.step, "the checkpoint writer is closed")
            self._waiting = stamp, image
            if self._thread is None:
                # Not a pool: the interpreter waits for pool threads at exit, and a disk may never answer.
                self._thread = threading.Thread(target=self._write_all, name="ringfort-checkpoint", daemon=True)
                self._thread.start()

    def close(self, timeout: float) -> bool:
        """Accept no more checkpoints, and wait for the one under way and the one that waits, for `timeout` seconds in
        all. Return whether all were written or have failed; if not, the one that waits is dropped."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout)
        with self._lock:
            if self._thread is None:
                return True
            self._waiting = None
        _log.warning("A checkpoint is still being written after %g s; it is given up", timeout)
        return False

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._thread = None
                    return
                stamp, image = self._waiting
                self._waiting = None
            self._write(stamp, image)
            del image  # its memory is not needed while the next one is awaited

    def _write(self, stamp: Stamp, image: Image) -> None:
        try:
            self._disk.write(stamp, image, self._writer)
        except CheckpointError as exc:
            if exc.why not in self._warned:
                self._warned.add(exc.why)
                _log.warning("%s. Step %d was not saved; training continues", exc, stamp.step)
                own_trace().event("checkpoint", f"{platform.node()} has not saved step {stamp.step}: {exc}")
        except Exception as exc:  # training must not end because of a checkpoint
            why = f"{type(exc).__name__}: {exc}"
            if why not in self._warned:
                self._warned.add(why)
                _log.exception("Step %d was not saved; training continues", stamp.step)
                own_trace().event("checkpoint", f"{platform.node()} has not saved step {stamp.step}: {why}")
        else:
            if self._warned:
                _log.info("Checkpoints are written again, from step %d", stamp.step)
            self._warned.clear()
            self.saved_step = stamp.step
            own_trace().event("checkpoint", f"{platform.node()} has saved step {stamp.step}")
