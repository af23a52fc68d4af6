"""`WriterName`: which of the processes that share a checkpoint folder this one is.

The name is the first one that no living process has, by a lock on a file. So a process that starts again gets its old
name, and the files under that name are replaced some day.
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ringfort.transport.forks import keep_from_children

_log = logging.getLogger(__name__)

_MOST: Final = 64
"""Processes that share a folder. More than that write under random names."""


class WriterName:
    """A name that is this process's own while it is open. The lock ends with the process, however that ends, and
    whatever children it has forked: a worker that outlives it would keep the name, and the files under it would stay
    while the next process writes under another one."""

    def __init__(self, folder: Path) -> None:
        """Take the first free name in `folder`. A folder that cannot be used is reported when a checkpoint is written;
        then the name is random."""
        self.name = f"p{os.urandom(4).hex()}"
        self._file: int | None = None
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(_MOST):
                file = os.open(folder / f".writer-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(file)
                except OSError as exc:  # some network file systems have no locks
                    os.close(file)
                    _log.info("Cannot lock files in %s: %s", folder, exc)
                    return
                else:
                    self._file, self.name = file, f"w{number}"
                    keep_from_children(self)
                    return

    def abandon(self) -> None:
        """In a forked child: close its copy of the descriptor. The lock stays with the parent."""
        self.close()

    def close(self) -> None:
        """Give the name back. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
