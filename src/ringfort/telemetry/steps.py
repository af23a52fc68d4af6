"""Count a program's training steps, for display only.

The steps of each optimizer and the `average_gradients` calls of each context are counted separately; the largest count
is the program's step. Errors are suppressed: a display must never stop a training run.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cache
from struct import Struct
from typing import Any, Final

from ringfort.config import step_file

_COUNT: Final = Struct("=Q")
_MARK: Final = "_ringfort_steps"
"""The attribute that holds an object's count. A WeakKeyDictionary would need hashable objects, and its callback can
swallow a KeyboardInterrupt."""


class Steps:
    """The training steps of one process."""

    def __init__(self, path: str | None = None) -> None:
        """Also write each new count to the file `path`, created by `StepFile`, if it can be opened."""
        self.done = 0
        self._file = -1
        if path is not None:
            with suppress(OSError):  # the launcher has exited and removed the file
                self._file = os.open(path, os.O_WRONLY)

    def mark(self, doer: Any) -> None:
        """Count one step of `doer`, for example an optimizer."""
        count = getattr(doer, _MARK, 0) + 1
        with suppress(AttributeError):  # a class with __slots__
            setattr(doer, _MARK, count)
        if count > self.done:
            self.done = count
            if self._file >= 0:
                with suppress(OSError):
                    os.pwrite(self._file, _COUNT.pack(count), 0)


class StepFile:
    """A file in which the ranks of one machine write their step for their launcher. All ranks write to the same place,
    because they are at the same step."""

    def __init__(self) -> None:
        self.path: str | None = None
        """None if the file could not be created."""
        self._file = -1
        with suppress(OSError):
            self._file, self.path = tempfile.mkstemp(prefix="ringfort-steps-")

    def clear(self) -> None:
        """Reset the count to 0, before a restart."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)

    def read(self) -> int:
        """Return the latest count; 0 if there is none."""
        with suppress(OSError):
            written = os.pread(self._file, _COUNT.size, 0)
            if len(written) == _COUNT.size:
                return _COUNT.unpack(written)[0]
        return 0

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)  # noqa: PTH108  # as it was made
            os.close(self._file)
            self.path, self._file = None, -1


@cache
def own_steps() -> Steps:
    """Return the counter of this process."""
    return Steps(step_file())
