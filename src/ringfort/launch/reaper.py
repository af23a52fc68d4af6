"""Ends what a launcher started if the launcher dies: a process of its own, `python -I -S launch/reaper.py`, that
outlives it.

It reads lines from its standard input, a pipe that only the launcher holds: `+123` when process group 123 was started
and `-123` when it has ended. When the pipe ends, however the launcher died, what is left gets SIGTERM and then SIGKILL.
It imports nothing of Ringfort, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 5.0
"""How long what is left may take to end by SIGTERM. Nobody watches any more, so it may be generous."""
POLL_SECONDS = 0.05


def main() -> None:
    """Wait for the launcher's end, then make an end of the rest."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        groups = groups | {int(line[1:])} if line[0] == "+" else groups - {int(line[1:])}
    deadline = time.monotonic() + GRACE_SECONDS
    groups = {group for group in groups if _signal(group, signal.SIGTERM)}
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        groups = {group for group in groups if _signal(group, 0)}
    for group in groups:
        _signal(group, signal.SIGKILL)


def _signal(group: int, signum: int) -> bool:
    """Whether anybody was there to get it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)
        return True
    return False


if __name__ == "__main__":
    main()
