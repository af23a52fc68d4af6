"""How many steps a training program has done, as far as that can be seen without asking it: each optimizer's steps and
each context's `average_gradients` are counted, and the largest count is the program's. Nothing here ever fails: it is
only for people to look at."""

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
"""The attribute of a doer that has its count. Not a table of doers: they need not be hashable, and one with weak
references would swallow a Ctrl-C."""


class Steps:
    """The steps of one process."""

    def __init__(self, path: str | None = None) -> None:
        """They are also written to the file `path`, a `StepFile`, if it can be."""
        self.done = 0
        self._file = -1
        if path is not None:
            with suppress(OSError):  # the launcher has gone and taken its file along: nobody would read it
                self._file = os.open(path, os.O_WRONLY)

    def mark(self, doer: Any) -> None:
        """`doer`, such as an optimizer, has done one more step."""
        count = getattr(doer, _MARK, 0) + 1
        with suppress(AttributeError):  # it has room for its own alone
            setattr(doer, _MARK, count)
        if count > self.done:
            self.done = count
            if self._file >= 0:
                with suppress(OSError):
                    os.pwrite(self._file, _COUNT.pack(count), 0)


class StepFile:
    """Where the ranks of one machine write how far they are, for their launcher to read. They go in step, so one place
    does for all."""

    def __init__(self) -> None:
        self.path: str | None = None
        """None where there is no room for it."""
        self._file = -1
        with suppress(OSError):
            self._file, self.path = tempfile.mkstemp(prefix="ringfort-steps-")

    def clear(self) -> None:
        """Nothing is done yet."""
        with suppress(OSError):
            os.ftruncate(self._file, 0)

    def read(self) -> int:
        """How many were done."""
        with suppress(OSError):
            written = os.pread(self._file, _COUNT.size, 0)
            if len(written) == _COUNT.size:
                return _COUNT.unpack(written)[0]
        return 0

    def close(self) -> None:
        """Removes it."""
        if self.path is not None:
            with suppress(OSError):
                os.unlink(self.path)  # noqa: PTH108  # as it was made
            os.close(self._file)
            self.path, self._file = None, -1


@cache
def own_steps() -> Steps:
    """Of this process."""
    return Steps(step_file())
