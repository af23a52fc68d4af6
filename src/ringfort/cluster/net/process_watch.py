"""`ProcessWatch`: tells the control process whether its training process runs, is stopped, or has ended."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import Final

_LOOK: Final = 0.05
"""Seconds between two checks of a stopped process."""
_STOPPED: Final = frozenset(b"Tt")
"""States in /proc/PID/stat: stopped by a signal, or by a debugger."""


class ProcessWatch:
    """Watches the parent process. `descriptor`, a Linux pidfd, becomes readable when it ends. Without one, a process
    has ended when it is no longer the parent."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is a pidfd that the parent opened itself, so it cannot refer to another process."""
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
        """Whether the process is stopped: by SIGSTOP, Ctrl-Z or a debugger. The check takes about 10 microseconds."""
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
        """Return when the process runs or has ended."""
        while self.is_stopped and not self.has_ended:
            self._wait(_LOOK)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.descriptor, self._stat):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self._stat = None, -1

    def _wait(self, seconds: float) -> bool:
        """Return whether the process ends within `seconds`."""
        if self.descriptor is None:
            time.sleep(seconds)
            return os.getppid() != self.pid
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def open_own_pidfd() -> int | None:
    """Return a pidfd of this process, or None if the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(os.getpid())
    except OSError:  # an older kernel, or a sandbox
        return None
