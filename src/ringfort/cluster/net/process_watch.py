"""`ProcessWatch`: whether the training process lives, is stopped, or has ended, seen from its control process."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import Final

_LOOK: Final = 0.05
"""Seconds between two looks at a process that is stopped."""
_STOPPED: Final = frozenset(b"Tt")
"""States in /proc/PID/stat: stopped by a signal, stopped by a debugger."""


class ProcessWatch:
    """Watches the parent process. Its end shows at `descriptor`, where the system has such a thing (Linux's pidfd);
    everywhere a process that is no longer the parent has ended."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is a pidfd that the parent opened of itself: so no other process can be taken for it."""
        self.pid = os.getppid()
        self.descriptor = descriptor
        self._stat = -1
        with suppress(OSError):
            self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self.descriptor is not None:
            return self._wait(0.0)
        return os.getppid() != self.pid

    @property
    def is_stopped(self) -> bool:
        """Whether all of the process stands still: SIGSTOP, Ctrl-Z, a debugger. Costs some 10 microseconds."""
        if self._stat >= 0:
            try:
                text = os.pread(self._stat, 512, 0)
            except OSError:  # it has ended
                return False
            # The name of the program is in parentheses and may have any character in it.
            return text[text.rindex(b")") + 2] in _STOPPED
        if sys.platform != "darwin":
            return False
        import psutil

        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def wait_while_stopped(self) -> None:
        """Returns when the process runs, or has ended."""
        while self.is_stopped and not self.has_ended:
            self._wait(_LOOK)

    def close(self) -> None:
        """Watches no longer."""
        for descriptor in (self.descriptor, self._stat):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self._stat = None, -1

    def _wait(self, seconds: float) -> bool:
        """Whether the process ended within `seconds`."""
        if self.descriptor is None:
            time.sleep(seconds)
            return os.getppid() != self.pid
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def open_own_pidfd() -> int | None:
    """A descriptor that shows the end of this process; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(os.getpid())
    except OSError:  # an older kernel, or a sandbox
        return None
