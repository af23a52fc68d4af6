"""How many steps a training program has done, as far as that can be seen without asking it: each optimizer's steps and
each context's `average_gradients` are counted, and the largest count is the program's."""

from __future__ import annotations

import mmap
import os
import tempfile
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, Final
from weakref import WeakKeyDictionary

from ringfort.config import step_file

_COUNT: Final = Struct("=Q")


class Steps:
    """The steps of one process."""

    def __init__(self, path: str | None = None) -> None:
        """They are also written to the file `path`, a `StepFile`, if it can be."""
        self.done = 0
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._memory = None if path is None else _memory_of(path)

    def mark(self, doer: Any) -> None:
        """`doer`, such as an optimizer, has done one more step."""
        count = self._counts[doer] = self._counts.get(doer, 0) + 1
        if count > self.done:
            self.done = count
            if self._memory is not None:
                _COUNT.pack_into(self._memory, 0, count)


def _memory_of(path: str) -> mmap.mmap | None:
    """None where the launcher has gone and taken its file along: nobody would read it."""
    try:
        with Path(path).open("r+b") as file:
            return mmap.mmap(file.fileno(), _COUNT.size)
    except (OSError, ValueError):
        return None


class StepFile:
    """Where the ranks of one machine write how far they are, for their launcher to read. They go in step, so one place
    does for all."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="ringfort-steps-")  # noqa: SIM115  # `close` closes it
        self.path = self._file.name
        self.clear()

    def clear(self) -> None:
        """Nothing is done yet."""
        os.pwrite(self._file.fileno(), _COUNT.pack(0), 0)

    def read(self) -> int:
        """How many were done."""
        return _COUNT.unpack(os.pread(self._file.fileno(), _COUNT.size, 0))[0]

    def close(self) -> None:
        """Removes it."""
        self._file.close()


@cache
def own_steps() -> Steps:
    """Of this process."""
    return Steps(step_file())
