"""The reaper: a process, `python -I -S launch/reaper.py`, that ends the children of a parent that dies.

It reads lines from its standard input, a pipe that only the parent holds: `+123` when process group 123 was started,
and `-123` when it has ended. At the end of the pipe, however the parent died, the groups that are left get SIGTERM and
then SIGKILL. It imports nothing of Ringfort, so that it starts in a few hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 5.0
"""How long the groups may take to end by SIGTERM. Nobody waits for them any more, so it may be long."""
POLL_SECONDS = 0.05


def main() -> None:
    """Wait for the end of the parent, then end its children."""
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
    """Send `signum`; returns whether the group exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)
        return True
    return False


if __name__ == "__main__":
    main()
