"""`ProcessWatch`: tells the control process whether its training process runs, is stopped, or has ended."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import Final

_LOOK: Final = 0.05
"""Seconds between two checks of a stopped process."""


class ProcessWatch:
    """Watches the parent process. `descriptor`, a Linux pidfd, becomes readable when it ends. Without one, a process
    has ended when it is no longer the parent."""

    def __init__(self, descriptor: int | None) -> None:
        """`descriptor` is a pidfd that the parent opened itself, so it cannot refer to another process."""
        self.pid = os.getppid()
        self.descriptor = descriptor

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._wait(0.0)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped: by SIGSTOP, Ctrl-Z or a debugger."""
        import psutil  # not at the top: the training process needs only the function below

        with suppress(psutil.Error):  # it has ended
            return psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def wait_while_stopped(self) -> None:
        """Return when the process runs or has ended."""
        while self.is_stopped and not self.has_ended:
            self._wait(_LOOK)

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

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
    with suppress(AttributeError, OSError):  # another system; an older kernel, or a sandbox
        return os.pidfd_open(os.getpid())
    return None
